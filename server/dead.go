package server

import (
	"fmt"
	"time"

	"github.com/kvasir-kv/kvasir/internal/peercred"
)

// An engine that was killed says nothing, and silence proves nothing for minutes.
// But where its process can be seen, its end can: of who made the segments that a
// worker lends (lent.go), of who has the connection open over which it registered.

// cameFrom notes who registers in.
func (in *instance) cameFrom(c *caller) {
	in.owned(c.by)
	in.socket = c.peer.Socket
	if p, ok := peercred.Running(c.peer.PID); ok {
		in.process.Store(&p)
	}
}

// owned notes who may speak for in.
func (in *instance) owned(by principal) {
	in.by = by
	in.key = in.who().key()
}

func (in *instance) who() workerID { return workerID{in.id, in.by} }

// ended returns the process whose end proves that the worker has ended, if it has.
func (in *instance) ended() (peercred.Process, bool) {
	if in.driven != nil && in.driven.owned() {
		return in.driven.segments[0].Owner, in.driven.dead()
	}
	if p := in.process.Load(); p != nil {
		return *p, p.Gone()
	}
	return peercred.Process{}, false
}

// proofs is when to look for processes again. Looking reads all of /proc.
type proofs struct {
	next time.Time
}

// maxProofs is how often the process of one worker is looked for.
const maxProofs = 3

// dropDead drops the workers whose process has ended. Slots that they were told of
// stay in quarantine: a process may have handed its mapping on.
func (s *Server) dropDead(now time.Time) {
	s.findProcesses(now)
	for _, in := range s.registry.list() {
		if p, ok := in.ended(); ok {
			s.drop(in, fmt.Sprintf("its process %d has ended", p.PID))
		}
	}
}

// findProcesses finds who has the connections open over which workers registered.
func (s *Server) findProcesses(now time.Time) {
	if now.Before(s.proofs.next) {
		return
	}
	byUser := map[int][]*instance{}
	for _, in := range s.registry.list() {
		if in.by.User && in.socket != 0 && in.process.Load() == nil && in.proofs < maxProofs && (in.driven == nil || !in.driven.owned()) {
			in.proofs++
			byUser[in.by.UID] = append(byUser[in.by.UID], in)
		}
	}
	began, found := time.Now(), false
	for uid, list := range byUser {
		sockets := make(map[uint64]bool, len(list))
		for _, in := range list {
			sockets[in.socket] = true
		}
		owners := peercred.Owners(uid, sockets)
		for _, in := range list {
			if p, ok := owners[in.socket]; ok {
				in.process.Store(&p)
				found = true
			}
		}
	}
	if found {
		s.save()
	}
	s.proofs.next = now.Add(20 * time.Since(began))
}
