// SPDX-License-Identifier: Apache-2.0

package server

import (
	"fmt"
	"time"

	"github.com/kvasir-kv/kvasir/server/workers"
)

// A killed engine sends no message, and silence proves nothing for minutes. But the server sees the end of a process that it knows: the one
// that made the segments that a worker lends (package lent), and the one that has the connection over which the worker registered.

// dropDead drops the workers whose process has ended.
func (s *Server) dropDead(now time.Time) {
	if s.registry.FindProcesses(now) {
		s.save()
	}
	s.registry.FindMappings(s.store.Files().Name(), s.store.Files().Inode())
	for _, e := range s.registry.Ended() {
		s.drop(e.Worker, fmt.Sprintf("its process %d has ended", e.Process.PID))
		s.reclaim(e.Worker)
	}
}

// reclaim frees the slots of a dead worker at once if it is proved that no process can touch them any more. Otherwise they wait in
// quarantine.
func (s *Server) reclaim(in *workers.Worker) {
	if !s.registry.LeftAlone(in, s.store.Files().Name(), s.store.Files().Inode()) {
		return
	}
	if n := s.store.EndQuarantine(in.Key); n > 0 {
		s.log.Info("a dead worker's memory is free again: its process maps the pool no more", "worker", in.ID, "transfers", n)
	}
}
