// SPDX-License-Identifier: Apache-2.0

package server

import (
	"time"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// Messages that could mean several operations are held until their clients' generation is known; a heartbeat, sent every 10 s, shows it.
// They are the calls that a client had in flight when its server was replaced: keys of prompts, never chunks.

// hold keeps a copy of an ambiguous message, whose answer waits. It reports false if too many messages are held, or if the message comes
// from this process: the caller then declines it.
func (s *Server) hold(p *zmtp.Peer, m [][]byte) bool {
	kept := p != nil && s.held.Keep(p, whoIs(p).By, m)
	if kept {
		s.n.held.Add(1)
	}
	return kept
}

// release answers the held messages of a client whose generation is better known than `before`. A message that is still ambiguous is held
// again.
func (s *Server) release(p *zmtp.Peer, before lmcache.Generations) {
	c := whoIs(p).connection()
	for c.generations != before {
		before = c.generations
		for _, m := range s.held.Take(p) {
			s.reply(p, m)
		}
	}
}

// expireHeld declines, without a result, messages that were held for too long.
func (s *Server) expireHeld(now time.Time) {
	for p, messages := range s.held.Late(now) {
		for _, m := range messages {
			s.refuse(lmcache.OpUnknown, errAmbiguous)
			s.send(p, m[0], m[1])
		}
	}
}
