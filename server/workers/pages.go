// SPDX-License-Identifier: Apache-2.0

package workers

import (
	"slices"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/server/access"
)

// A worker whose device copies has the pool's pages pinned at some address of its process. LMCache's clients, up to 0.5.7rc2,
// unmap the pool when they register again and do not give the pinned pages up. Their new mapping often gets the old address: the
// device then goes on with the old pages, whatever is mapped there. That is right while the pool is the same file of the same
// length. Else what the device writes reaches nobody, and what it reads is old.

// maxPages bounds the workers in pages.
const maxPages = 4096

// pages remembers by worker which pages its device can have pinned. When it is full it forgets the oldest worker of the user or address
// with most workers, so that nobody can push out the workers of others.
type pages struct {
	of    map[workerID]page
	order []workerID // oldest first
}

type page struct {
	other bool   // they are not this pool's
	since uint64 // peercred.Ticks of when that was noted, 0 unknown
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

// firstOfMost returns the position of the first worker of the user or address with most workers.
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

// SavedPages is a worker in a Note whose device has other pages pinned than the pool's.
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

// PinnedOther takes over what an earlier server had in its note.
func (r *Registry) PinnedOther(list []SavedPages) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, w := range list[:min(len(list), maxPages)] {
		r.mu.pages.note(workerID{w.ID, w.By}, page{true, w.Since})
	}
}

// PinsOther notes that a worker's device has other pages pinned than the pool's: later registrations of its process are not offered
// the pool.
func (r *Registry) PinsOther(id int64, by access.Principal) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.pages.note(workerID{id, by}, page{true, peercred.Ticks()})
}

// MayPinOther reports whether the device of a worker that registers may have other pages pinned than the pool's: it had them before,
// or it comes from another server. Clients ping for the first time after they have registered, so a worker that pinged before it
// registers comes from another server. started is when its process started, in ticks after boot, 0 for one that is not seen. A process
// that started after the other pages were noted has none of them: containers give the id of one engine to the next.
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

// notePagesLocked notes which pages a worker that has registered can have pinned.
func (r *Registry) notePagesLocked(in *Worker) {
	switch {
	case in.Side() == Pickle:
		r.mu.pages.note(in.who(), page{true, peercred.Ticks()})
	case in.Mapped > 0:
		r.mu.pages.note(in.who(), page{})
	}
}
