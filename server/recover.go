// SPDX-License-Identifier: Apache-2.0

package server

import (
	"fmt"
	"runtime/debug"

	"github.com/kvasir-kv/kvasir/internal/invariant"
	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/lmcache"
)

// contain calls f, which answers one request, and turns a panic of f into errPanic. Builds with -tags invariants do not catch the panic. A
// panic while the store's books change never arrives here, because it ends the process.
func (s *Server) contain(op lmcache.Op, f func() error) (err error) {
	if !invariant.Enabled {
		defer func() {
			if v := recover(); v != nil {
				err = s.panicked(op, v)
			}
		}()
	}
	return f()
}

// panicked counts a caught panic and logs it. It logs the stack once per operation, so that a peer that repeats the request cannot fill the
// log.
func (s *Server) panicked(op lmcache.Op, v any) error {
	s.n.panics.Add(1)
	err := fmt.Errorf("%w: %v", errPanic, v)
	if !s.n.stackShown[op].Swap(true) {
		s.log.Error("a request met a bug of this server and was declined; please report it",
			"operation", op.String(), "panic", fmt.Sprint(v), "stack", string(debug.Stack()))
	}
	return err
}

// guardCopy returns a function that calls f, a part of a copy, and turns its panics into errors. A fault of memory that a peer has
// truncated becomes shm.ErrFault. f may run on its own goroutine.
func (s *Server) guardCopy(op lmcache.Op) func(f func()) error {
	return func(f func()) error {
		return s.contain(op, func() error { return shm.Guard(f) })
	}
}
