// SPDX-License-Identifier: Apache-2.0

package server

import (
	"time"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/kv"
)

// AnswerAs is Answer for a request of somebody else, over that socket.
func (s *Server) AnswerAs(who peercred.Peer, m [][]byte) [][]byte {
	c := s.callerOf(who)
	c.Number = 1<<32 + who.Socket
	return s.answer(&scratch{inProcess: c}, m)
}

// Answerer answers requests with one scratch, as a connection's goroutine does.
func (s *Server) Answerer() (answer func(m [][]byte) [][]byte) {
	sc := new(scratch)
	return func(m [][]byte) [][]byte { return s.answer(sc, m) }
}

// SetMaxMappings sets how many segments may be mapped at once.
func (s *Server) SetMaxMappings(n int) { s.registry.SetMaxMappings(n) }

// ProvideMore provides one step more of pool memory.
func (s *Server) ProvideMore() error { return s.store.Memory().More() }

// Connect returns a connection of somebody's whose client is not known yet: it
// answers messages in order.
func (s *Server) Connect(who peercred.Peer) (answer func(m [][]byte) [][]byte) {
	c := s.callerOf(who)
	c.conn = &connection{generations: s.opts.ClientGenerations}
	return func(m [][]byte) [][]byte { return s.answer(&scratch{inProcess: c}, m) }
}

// ConnectAs returns a connection of somebody's whose client is of the latest generation.
func (s *Server) ConnectAs(who peercred.Peer) (answer func(m [][]byte) [][]byte) {
	c := s.callerOf(who)
	return func(m [][]byte) [][]byte { return s.answer(&scratch{inProcess: c}, m) }
}

// HeldMessageBytes is what clients whose release is not known have in messages that are held.
func (s *Server) HeldMessageBytes() int64 {
	s.held.mu.Lock()
	defer s.held.mu.Unlock()
	return s.held.bytes
}

// HoldMessagesFor sets how long messages of clients whose release is not known are held.
func (s *Server) HoldMessagesFor(d time.Duration) {
	s.held.mu.Lock()
	s.held.time = d
	s.held.mu.Unlock()
}

// Waits is how many requests wait for lookups.
func (s *Server) Waits() int {
	s.waits.mu.Lock()
	defer s.waits.mu.Unlock()
	return s.waits.mu.all
}

// Namespaces are those of the registered workers' chunks without a salt.
func (s *Server) Namespaces() (out []kv.Namespace) {
	for _, in := range s.registry.List() {
		out = append(out, in.NamespaceOf(nil))
	}
	return out
}

// Fingerprint is that of a registered worker's layout; empty when there is none.
func (s *Server) Fingerprint(id int64) string {
	for _, in := range s.registry.List() {
		if in.ID == id {
			return in.Fingerprint
		}
	}
	return ""
}

// CopiesElsewhere returns the function that a server calls after a commit that left marks, for the registration that a worker has now.
func (s *Server) CopiesElsewhere(id int64) func() {
	for _, in := range s.registry.List() {
		if in.ID == id {
			return func() { s.copiesElsewhere(in) }
		}
	}
	return nil
}

// ProcessesUseNoDevice makes "no device" the default of Options.UsesDevice: most workers of tests have no process, and commit places that
// they did not write.
func ProcessesUseNoDevice() { usesDevice = func(int) (bool, bool) { return false, true } }
