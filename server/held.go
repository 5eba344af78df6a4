package server

import (
	"bytes"
	"sync"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// Limits on held messages. They are a client's calls in flight when its server was
// replaced: keys of prompts, never chunks.
const (
	maxHeld           = 16       // messages of one connection
	maxHeldBytes      = 2 << 20  // of one connection
	maxHeldBytesOfOne = 16 << 20 // of one user or address
	maxHeldBytesInAll = 64 << 20
)

// heldBytes counts what is held, by whose it is.
type heldBytes struct {
	sync.Mutex
	all int64
	by  map[principal]int64
}

// take counts n bytes of by's; false when that is more than its share, or than
// there may be.
func (h *heldBytes) take(by principal, n int64) bool {
	h.Lock()
	defer h.Unlock()
	if h.all+n > maxHeldBytesInAll || h.by[by]+n > maxHeldBytesOfOne {
		return false
	}
	if h.by == nil {
		h.by = make(map[principal]int64)
	}
	h.all += n
	h.by[by] += n
	return true
}

func (h *heldBytes) give(by principal, n int64) {
	h.Lock()
	defer h.Unlock()
	h.all -= n
	if h.by[by] -= n; h.by[by] == 0 {
		delete(h.by, by)
	}
}

// hold keeps a copy of an ambiguous message; false when there are too many.
func (s *Server) hold(who *caller, c *connection, m [][]byte) bool {
	n := int64(0)
	for _, frame := range m {
		n += int64(len(frame))
	}
	if len(c.held) == maxHeld || c.heldBytes+n > maxHeldBytes || !s.held.take(who.by, n) {
		return false
	}
	s.n.held.Add(1)
	own := make([][]byte, len(m))
	for i, frame := range m {
		own[i] = bytes.Clone(frame)
	}
	c.held, c.heldBytes = append(c.held, own), c.heldBytes+n
	return true
}

// takeHeld empties what the connection has held.
func (s *Server) takeHeld(who *caller) [][][]byte {
	c := who.connection()
	if len(c.held) == 0 {
		return nil
	}
	held := c.held
	s.held.give(who.by, c.heldBytes)
	c.held, c.heldBytes = nil, 0
	return held
}

// release answers the messages that were held, now that more is known of their
// sender than before. One that is still ambiguous is held again.
func (s *Server) release(p *zmtp.Peer, before lmcache.Generations) {
	who := whoIs(p)
	c := who.connection()
	for c.generations != before && len(c.held) > 0 {
		before = c.generations
		for _, m := range s.takeHeld(who) {
			s.reply(p, m)
		}
	}
}

// departed forgets what was held of a connection that has ended.
func (s *Server) departed(p *zmtp.Peer, _ error) { s.takeHeld(whoIs(p)) }
