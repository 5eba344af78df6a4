// SPDX-License-Identifier: Apache-2.0

package workers

import (
	"os"
	"slices"
	"time"

	"github.com/kvasir-kv/kvasir/internal/peercred"
)

// maxTries is how often the process of a worker or client is looked for. After that it counts as not known.
const maxTries = 3

// FindProcesses finds the processes that have the connections open over which workers registered and clients looked up. It reports whether
// it found the process of a worker. Only one goroutine may call it and FindMappings. A search reads all of /proc, so searches take at most
// a twentieth of the time.
func (r *Registry) FindProcesses(now time.Time) bool {
	if now.Before(r.nextSearch) {
		return false
	}
	byUser := map[int][]*Worker{}
	for _, in := range r.List() {
		in.knowFamily()
		if in.By.User && in.Socket != 0 && in.Process.Load() == nil && in.Search.Tries < maxTries && (in.Lent == nil || !in.Lent.Owned()) {
			in.Search.Tries++
			byUser[in.By.UID] = append(byUser[in.By.UID], in)
		}
	}
	clients := map[int][]*Client{}
	for _, k := range r.searching() {
		clients[k.by.UID] = append(clients[k.by.UID], k)
		if _, ok := byUser[k.by.UID]; !ok {
			byUser[k.by.UID] = nil // its connections are looked for below
		}
	}
	began, found := time.Now(), false
	for uid, list := range byUser {
		sockets := make(map[uint64]bool, len(list))
		for _, in := range list {
			sockets[in.Socket] = true
		}
		for _, k := range clients[uid] {
			sockets[k.socket] = true
		}
		owners := peercred.Owners(uid, sockets)
		for _, in := range list {
			if p, ok := owners[in.Socket]; ok {
				in.IsOf(p)
				found = true
			}
		}
		for _, k := range clients[uid] {
			if p, ok := owners[k.socket]; ok {
				r.foundClient(k, p)
			}
		}
	}
	r.nextSearch = now.Add(20 * time.Since(began))
	return found
}

// maxLooks is how often FindMappings looks at a worker's process. If the pool is not among its mappings until then, MapsPool stays false.
const maxLooks = 20

// FindMappings records which workers' processes map the pool, a segment of that name and inode. A worker that copies itself maps it soon
// after its registration.
func (r *Registry) FindMappings(pool string, inode uint64) {
	for _, in := range r.List() {
		p := in.Process.Load()
		if p == nil || in.Search.MapsPool || in.Lent != nil || in.Search.Looks >= maxLooks || in.Side() == Pickle {
			continue
		}
		in.Search.Looks++
		files, _ := peercred.Mapped(p.PID, pool)
		in.Search.MapsPool = files[pool] == inode && !p.Gone()
	}
}

// Ending is a worker, and the process whose end proves that the worker has ended.
type Ending struct {
	*Worker
	Process peercred.Process
}

// Ended returns the workers whose process is proved to have ended, in the order of their registrations.
func (r *Registry) Ended() (ended []Ending) {
	known := map[peercred.Process]bool{} // many workers may be of one process
	gone := func(p peercred.Process) bool {
		is, ok := known[p]
		if !ok {
			is = r.gone(p)
			known[p] = is
		}
		return is
	}
	for _, w := range r.List() {
		if p, ok := w.Ended(gone); ok {
			ended = append(ended, Ending{w, p})
		}
	}
	return ended
}

// LeftAlone reports whether it is proved that no process can touch the slots of a dead worker any more: the process that ended had mapped
// the pool, and all processes that map it now are registered workers or this process. The proof fails if a child inherited the mapping, or
// if the peer only forwards for another process.
func (r *Registry) LeftAlone(w *Worker, pool string, inode uint64) bool {
	p := w.Process.Load()
	if p == nil || !w.Search.MapsPool || !p.Gone() {
		return false
	}
	known := map[int]bool{os.Getpid(): true}
	for _, other := range r.List() {
		if q := other.Process.Load(); q != nil && !q.Gone() {
			known[q.PID] = true
		}
	}
	pids, whole := peercred.Mappers(pool, inode, *p)
	return whole && !slices.ContainsFunc(pids, func(pid int) bool { return !known[pid] })
}
