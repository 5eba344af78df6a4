package server

import (
	"github.com/kvasir-kv/kvasir/internal/peercred"
)

// AnswerAs is Answer for a request of somebody else, over that socket.
func (s *Server) AnswerAs(who peercred.Peer, m [][]byte) [][]byte {
	c := s.callerOf(who)
	c.number = 1<<32 + who.Socket
	return s.answer(&scratch{inProcess: c}, m)
}

// SetMaxMappings sets how many segments may be mapped at once.
func (s *Server) SetMaxMappings(n int) { s.registry.maxMappings = n }

// ProvideMore provides one step more of pool memory.
func (s *Server) ProvideMore() error { return s.provideStep(s.usable()) }

// Connect returns a connection of somebody's whose client is not known yet: it
// answers messages in order.
func (s *Server) Connect(who peercred.Peer) (answer func(m [][]byte) [][]byte) {
	c := s.callerOf(who)
	c.conn = &connection{generations: s.opts.ClientGenerations}
	return func(m [][]byte) [][]byte { return s.answer(&scratch{inProcess: c}, m) }
}
