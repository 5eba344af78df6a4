package server

import (
	"bytes"
	"sync"
	"time"

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
	maxHeldTime       = 15 * time.Second // a heartbeat comes every 10 s
)

// heldMessages keeps messages until their clients show what they are.
type heldMessages struct {
	sync.Mutex // a leaf
	bytes      int64
	by         map[principal]int64
	of         map[*zmtp.Peer]*held
}

// held is what one connection has waiting.
type held struct {
	messages [][][]byte // oldest first
	bytes    int64
	since    time.Time // of the oldest
}

// hold keeps a copy of an ambiguous message; false when there are too many.
func (s *Server) hold(p *zmtp.Peer, m [][]byte) bool {
	if p == nil {
		return false
	}
	own, n := make([][]byte, len(m)), int64(0)
	for i, frame := range m {
		own[i] = bytes.Clone(frame)
		n += int64(len(frame))
	}
	by := whoIs(p).by
	all := &s.held
	all.Lock()
	defer all.Unlock()
	if all.of == nil {
		all.by, all.of = make(map[principal]int64), make(map[*zmtp.Peer]*held)
	}
	h := all.of[p]
	if h == nil {
		h = &held{since: time.Now()}
	}
	if len(h.messages) == maxHeld || h.bytes+n > maxHeldBytes || all.by[by]+n > maxHeldBytesOfOne || all.bytes+n > maxHeldBytesInAll {
		return false
	}
	h.messages, h.bytes = append(h.messages, own), h.bytes+n
	all.of[p] = h
	all.by[by] += n
	all.bytes += n
	s.n.held.Add(1)
	return true
}

// take returns what a connection has held, and forgets it.
func (all *heldMessages) take(p *zmtp.Peer) [][][]byte {
	all.Lock()
	defer all.Unlock()
	return all.takeLocked(p)
}

func (all *heldMessages) takeLocked(p *zmtp.Peer) [][][]byte {
	h := all.of[p]
	if h == nil {
		return nil
	}
	by := whoIs(p).by
	delete(all.of, p)
	all.bytes -= h.bytes
	if all.by[by] -= h.bytes; all.by[by] == 0 {
		delete(all.by, by)
	}
	return h.messages
}

// release answers the messages that were held, now that more is known of their
// sender than before. One that is still ambiguous is held again.
func (s *Server) release(p *zmtp.Peer, before lmcache.Generations) {
	c := whoIs(p).connection()
	for c.generations != before {
		before = c.generations
		for _, m := range s.held.take(p) {
			s.reply(p, m)
		}
	}
}

// departed forgets what was held of a connection that has ended.
func (s *Server) departed(p *zmtp.Peer, _ error) { s.held.take(p) }

// expireHeld declines, without a result, what has been held for too long.
func (s *Server) expireHeld(now time.Time) {
	for p, messages := range s.held.late(now) {
		for _, m := range messages {
			s.refuse(lmcache.OpUnknown, errAmbiguous)
			if err := p.Send(m[0], m[1]); err != nil {
				s.n.dropped.Add(1)
			}
		}
	}
}

func (all *heldMessages) late(now time.Time) map[*zmtp.Peer][][][]byte {
	all.Lock()
	defer all.Unlock()
	var out map[*zmtp.Peer][][][]byte
	for p, h := range all.of {
		if now.Sub(h.since) >= maxHeldTime {
			if out == nil {
				out = make(map[*zmtp.Peer][][][]byte)
			}
			out[p] = all.takeLocked(p)
		}
	}
	return out
}
