package server

import (
	"fmt"
	"os"
	"slices"
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
// gone tells of a process whether it has ended.
func (in *instance) ended(gone func(peercred.Process) bool) (peercred.Process, bool) {
	if in.driven != nil && in.driven.owned() {
		return in.driven.segments[0].Owner, in.driven.deadBy(gone)
	}
	if p := in.process.Load(); p != nil {
		return *p, gone(*p)
	}
	return peercred.Process{}, false
}

// proofs is when to look for processes again. Looking reads all of /proc.
type proofs struct {
	next time.Time
}

// maxProofs is how often the process of one worker is looked for.
const maxProofs = 3

// dropDead drops the workers whose process has ended.
func (s *Server) dropDead(now time.Time) {
	s.findProcesses(now)
	s.findMappings()
	known := map[peercred.Process]bool{} // many workers may be of one process
	gone := func(p peercred.Process) bool {
		is, ok := known[p]
		if !ok {
			is = p.Gone()
			known[p] = is
		}
		return is
	}
	for _, in := range s.registry.list() {
		if p, ok := in.ended(gone); ok {
			s.drop(in, fmt.Sprintf("its process %d has ended", p.PID))
			s.reclaim(in)
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

// maxLooks is how often a worker's process is looked at for the pool.
const maxLooks = 20

// findMappings notes which workers' processes map the pool. A worker that copies
// itself does so soon after its registration.
func (s *Server) findMappings() {
	for _, in := range s.registry.list() {
		p := in.process.Load()
		if p == nil || in.maps || in.driven != nil || in.looks >= maxLooks || in.side() == sidePickle {
			continue
		}
		in.looks++
		files, _ := peercred.Mapped(p.PID, s.store.PoolName())
		in.maps = files[s.store.PoolName()] == s.store.PoolInode() && !p.Gone()
	}
}

// reclaim gives back at once what a dead worker was told of, where it is proved that
// nobody touches it any more: the process that ended was the one that mapped the
// pool, and those that map it now are registered workers, or this server. A process
// that inherited the mapping, or whose owner only forwards, leaves it in quarantine.
func (s *Server) reclaim(in *instance) {
	p := in.process.Load()
	if p == nil || !in.maps || !p.Gone() {
		return
	}
	known := map[int]bool{os.Getpid(): true}
	for _, other := range s.registry.list() {
		if q := other.process.Load(); q != nil && !q.Gone() {
			known[q.PID] = true
		}
	}
	pids, whole := peercred.Mappers(s.store.PoolName(), s.store.PoolInode(), *p)
	if !whole || slices.ContainsFunc(pids, func(pid int) bool { return !known[pid] }) {
		return
	}
	if n := s.store.EndQuarantine(in.key); n > 0 {
		s.log.Info(fmt.Sprintf("worker %d: the memory of %d transfers is free again: its process maps the pool no more", in.id, n))
	}
}
