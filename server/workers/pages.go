// SPDX-License-Identifier: Apache-2.0

package workers

import "github.com/kvasir-kv/kvasir/server/access"

// A worker whose device copies has the pool's pages pinned at some address of its process. LMCache's clients, up to 0.5.7rc2,
// unmap the pool when they register again and do not give the pinned pages up. Their new mapping often gets the old address: the
// device then goes on with the old pages, whatever is mapped there. That is right while the pool is the same file of the same
// length. Else what the device writes reaches nobody, and what it reads is old.

// maxPages bounds of how many workers it is remembered which pages they can have pinned.
const maxPages = 4096

// pages remembers it, by worker; the oldest is forgotten first.
type pages struct {
	other map[workerID]bool // pages that are not this pool's
	order []workerID
}

func (p *pages) note(who workerID, other bool) {
	if _, ok := p.other[who]; !ok {
		if len(p.order) >= maxPages {
			delete(p.other, p.order[0])
			p.order = append(p.order[:0], p.order[1:]...)
		}
		p.order = append(p.order, who)
	}
	p.other[who] = other
}

// PinsOther notes that a worker's device has other pages pinned than the pool's: its later registrations are not offered the pool.
func (r *Registry) PinsOther(id int64, by access.Principal) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.pages.note(workerID{id, by}, true)
}

// MayPinOther reports whether the device of a worker that registers may have other pages pinned than the pool's: it had them before,
// or it comes from another server. Clients ping for the first time after they have registered, so one that pinged before does. With
// younger, the worker's process began after the pool was made.
func (r *Registry) MayPinOther(id int64, by access.Principal, younger bool) bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	who := workerID{id, by}
	if other, ok := r.mu.pages.other[who]; ok {
		return other
	}
	_, pinged := r.mu.unknown[who]
	return pinged && !younger
}

// notePagesLocked notes which pages a worker that has registered can have pinned.
func (r *Registry) notePagesLocked(in *Worker) {
	switch {
	case in.Side() == Pickle:
		r.mu.pages.note(in.who(), true)
	case in.Mapped > 0:
		r.mu.pages.note(in.who(), false)
	}
}
