package server

import (
	"github.com/kvasir-kv/kvasir/internal/peercred"
)

// AnswerAs is Answer for a request of somebody else.
func (s *Server) AnswerAs(who peercred.Peer, m [][]byte) [][]byte {
	return s.answer(&scratch{inProcess: s.callerOf(who)}, m)
}

// SetMaxMappings sets how many segments may be mapped at once.
func (s *Server) SetMaxMappings(n int) { s.registry.maxMappings = n }

// ProvideMore provides one step more of pool memory.
func (s *Server) ProvideMore() error { return s.provideStep(s.usable()) }
