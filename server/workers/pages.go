// SPDX-License-Identifier: Apache-2.0

package workers

import (
	"slices"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/server/access"
)

// The device of a worker has the pool's pages pinned at some address of the worker's process. LMCache's clients, up to 0.5.7rc2, unmap the
// pool when they register again, but do not release the pinned pages. Their new mapping often gets the same address: the device then uses
// the old pages, whatever is mapped there. That is right while the pool is the same file with the same length. Otherwise nobody sees what
// the device writes, and it reads old bytes.

// maxPages bounds the workers that pages remembers. A new one takes the place of the oldest of the user or address with the most workers.
const maxPages = 4096

// pages remembers, by worker, which pages its device may have pinned. When it is full, it forgets the oldest worker of the user or address
// with the most workers, so that no user can displace the workers of others.
type pages struct {
	of    map[workerID]page
	order []workerID // oldest first
}

type page struct {
	other bool   // the pages are not those of this pool
	since uint64 // peercred.Ticks when that was recorded; 0: not known
}

func (p *pages) note(who workerID, is page) {
	if _, ok := p.of[who]; !ok {
		if len(p.order) >= maxPages {
			i := firstOfMost(p.order)
			delete(p.of, p.order[i])
			p.order = slices.Delete(p.order, i, i+1)
		}
		p.order = append(p.order, who)
	}
	p.of[who] = is
}

// firstOfMost returns the index of the first worker of the user or address with the most workers.
func firstOfMost(order []workerID) (first int) {
	type owned struct{ n, first int }
	by, most := make(map[access.Principal]owned), 0
	for i, who := range order {
		o, ok := by[who.by]
		if !ok {
			o.first = i
		}
		o.n++
		by[who.by] = o
		if o.n > most || o.n == most && o.first < first {
			most, first = o.n, o.first
		}
	}
	return first
}

// SavedPages is a worker of a Note whose device has pages pinned that are not the pool's.
type SavedPages struct {
	ID    int64
	By    access.Principal
	Since uint64 `json:",omitzero"` // peercred.Ticks
}

func (r *Registry) savedPages() (list []SavedPages) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	for _, who := range r.mu.pages.order {
		if is := r.mu.pages.of[who]; is.other {
			list = append(list, SavedPages{who.id, who.by, is.since})
		}
	}
	return list
}

// PinnedOther takes over these workers from an earlier server's note.
func (r *Registry) PinnedOther(list []SavedPages) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, w := range list[:min(len(list), maxPages)] {
		r.mu.pages.note(workerID{w.ID, w.By}, page{true, w.Since})
	}
}

// PinsOther records that a worker's device has pages pinned that are not the pool's. Later registrations of its process are not offered the
// pool.
func (r *Registry) PinsOther(id int64, by access.Principal) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.pages.note(workerID{id, by}, page{true, peercred.Ticks()})
}

// MayPinOther reports whether the device of a worker that registers may have pages pinned that are not the pool's: it had such pages
// before, or the worker comes from another server. Clients ping for the first time after they have registered, so a worker that pinged
// before it registers comes from another server. started is when its process started, in ticks after boot; 0: not seen. A process that
// started after such pages were recorded has none of them: containers give the id of one engine to the next.
func (r *Registry) MayPinOther(id int64, by access.Principal, started uint64) bool {
	const second = 100 // ticks
	r.mu.RLock()
	defer r.mu.RUnlock()
	who := workerID{id, by}
	if is, ok := r.mu.pages.of[who]; ok {
		return is.other && (is.since == 0 || started <= is.since+second)
	}
	_, pinged := r.mu.unknown[who]
	return pinged
}

// notePagesLocked records which pages a newly registered worker may have pinned.
func (r *Registry) notePagesLocked(in *Worker) {
	switch {
	case in.Side() == Pickle:
		r.mu.pages.note(in.who(), page{true, peercred.Ticks()})
	case in.Mapped > 0:
		r.mu.pages.note(in.who(), page{})
	}
}
