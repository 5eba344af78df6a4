// SPDX-License-Identifier: Apache-2.0

package server

import (
	"time"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// Messages that could mean several things are held until their clients show what they
// are: a heartbeat, every 10 s, does. They are a client's calls in flight when its server
// was replaced: keys of prompts, never chunks.

// hold keeps a copy of an ambiguous message; false when there are too many.
func (s *Server) hold(p *zmtp.Peer, m [][]byte) bool {
	kept := p != nil && s.held.Keep(p, whoIs(p).By, m)
	if kept {
		s.n.held.Add(1)
	}
	return kept
}

// release answers the messages that were held, now that more is known of their
// sender than before. One that is still ambiguous is held again.
func (s *Server) release(p *zmtp.Peer, before lmcache.Generations) {
	c := whoIs(p).connection()
	for c.generations != before {
		before = c.generations
		for _, m := range s.held.Take(p) {
			s.reply(p, m)
		}
	}
}

// expireHeld declines, without a result, what has been held for too long.
func (s *Server) expireHeld(now time.Time) {
	for p, messages := range s.held.Late(now) {
		for _, m := range messages {
			s.refuse(lmcache.OpUnknown, errAmbiguous)
			s.send(p, m[0], m[1])
		}
	}
}
