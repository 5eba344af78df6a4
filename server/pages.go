// SPDX-License-Identifier: Apache-2.0

package server

import (
	"errors"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/server/workers"
)

// errOtherPages is the reason why a worker that registers again is not offered the pool.
var errOtherPages = errors.New("its engine ran before this pool was made, or before the pool became larger, or with another server, and its GPU may have the pages of the earlier one pinned; " +
	"restart the engine to have it copy to the pool again")

// mayPin reports whether a device of a process may copy to and from the pool. It is false only if the server sees that the process uses no
// such device.
func (s *Server) mayPin(pid int) bool {
	uses, seen := s.opts.UsesDevice(pid)
	return uses || !seen
}

// pinsOther returns an error if a worker that registers must not be offered the pool, because its device may have other pages pinned.
func (s *Server) pinsOther(in *workers.Worker, pid int) error {
	if !in.Pins {
		return nil
	}
	p, _ := peercred.Running(pid)
	if s.registry.MayPinOther(in.ID, in.By, p.Started) {
		return errOtherPages
	}
	return nil
}

// copiesElsewhere drops a worker whose commits leave the pool unchanged. The worker is asked to register again, and its chunks then pass
// through the socket.
func (s *Server) copiesElsewhere(in *workers.Worker) {
	s.registry.PinsOther(in.ID, in.By)
	now, err := s.registry.Get(in.ID, in.By)
	if err != nil || now.Lent != nil || now.Side() == workers.Pickle {
		return
	}
	in = now // it may have registered again during the commit, and been offered the pool
	if !s.registry.RemoveThis(in) {
		return
	}
	s.log.Error("what a worker stored did not reach the pool, and is not kept: its GPU has the pages of an earlier pool pinned, as LMCache's clients leave them when they register again. "+
		"Nothing of it was served. Restart its engine: until then chunks of vLLM's workers pass through the socket, and those of SGLang's are declined", "worker", in.ID, "model", in.Model)
	s.detachWorker(in, "copied elsewhere")
	s.save()
}
