// SPDX-License-Identifier: Apache-2.0

package store

import (
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// Transfer has the parameters of BeginStore and BeginLoad, and their results. One value may be used for many transfers of workers. An own
// transfer needs its own value until Done.
type Transfer struct {
	// Own means that this process moves the bytes itself, until Done. Else a worker does, until its commit.
	Own bool
	// Lasting means that the worker's hold of a store has no deadline. It ends with the worker's commit, or once the worker's process has
	// ended (Detach, EndQuarantine).
	Lasting bool
	// Marked asks for marks in the places of a worker. A commit whose bytes did not reach the pool is then noticed (Committed.Unwritten).
	Marked bool
	// Skip reports which chunks of a group a store takes no place for; nil: it wants all.
	Skip func(group, chunk int) bool
	// TTL is how long the stored objects are served, from BeginStore on; 0: without an end. Objects that are there already, and those of
	// the chunks before the range, live at least as long afterwards.
	TTL time.Duration

	// Results for a worker: one element for each object.
	Offsets []int64 // bytes from the pool's start
	Indices []int   // positions of their chunks in the range
	Groups  []int   // their object groups

	// Results for an own transfer: its objects. They stay in place until Done.
	Parts []Part

	store *Store
	hold  *hold.Hold
}

// Part is one object of an own Transfer.
type Part struct {
	Chunk int    // number of the chunk in the range
	Group int    // object group
	Bytes []byte // in the pool
}

func (t *Transfer) begin(s *Store) {
	t.Offsets, t.Indices, t.Groups, t.Parts = t.Offsets[:0], t.Indices[:0], t.Groups[:0], nil
	t.store, t.hold = s, nil
}

// place adds the places of objects to the results for a worker.
func (t *Transfer) place(objects []heldObject) {
	for _, o := range objects {
		t.Offsets = append(t.Offsets, o.offset)
		t.Indices = append(t.Indices, o.chunk)
		t.Groups = append(t.Groups, o.group)
	}
}

// ownLocked begins an own Transfer over slots that are already held in the pool.
func (s *Store) ownLocked(t *Transfer, name hold.Transfer, requestID []byte, objects []heldObject) {
	for _, o := range objects {
		t.Parts = append(t.Parts, Part{Chunk: o.chunk, Group: o.group, Bytes: s.mu.pool.View(o.slot)})
	}
	t.hold = s.newHold(name, requestID, objects)
	s.mu.holds.AddOwn(t.hold)
}

// BeginStore takes places for the objects of the chunks hashes[name.From:name.To] that are not stored yet. If it needs room, it evicts what
// the policy names first. Chunks that do not fit, or exceed the worker's share, are left out from the end, so that the longest prefix is
// stored. A chunk is stored in all its groups or not at all.
//
// For a worker the places are in t.Offsets, t.Indices and t.Groups; the worker name.Instance holds them until CommitStore. For an own
// Transfer they are t.Parts: no object is visible before Done, and if t.Parts is empty there is nothing to end. Error: ErrBusy.
func (s *Store) BeginStore(name hold.Transfer, requestID []byte, hashes []kv.Hash, t *Transfer) (Reserved, error) {
	t.begin(s)
	st := stage{store: s, name: name, hashes: hashes, skip: t.Skip, prompt: s.promptOf(name.By, requestID), ends: s.endOf(t.TTL)}
	if !t.Own {
		st.by = pool.Writer{Name: name.Name(requestID)}
	}
	if !st.run() {
		return st.out, ErrBusy
	}
	s.curves.stored(&name, requestID, hashes, st.taken)
	if len(st.taken) == 0 {
		return st.out, nil
	}
	if t.Own {
		s.lock()
		defer s.unlock()
		if s.mu.closed {
			return st.out, ErrBusy
		}
		s.ownLocked(t, name, requestID, st.taken)
		return st.out, nil
	}
	t.place(st.taken)
	h := s.newHold(name, requestID, st.taken)
	if h.Marked = t.Marked; t.Marked {
		s.mark(st.taken)
	}
	if t.Lasting {
		h.Deadline = h.Deadline.Add(hold.Forever)
	}
	s.lock()
	defer s.unlock()
	if s.mu.closed {
		return st.out, ErrBusy
	}
	s.mu.holds.Count(&name, -st.counted) // from here on h counts them
	s.mu.holds.Add(h)
	return st.out, nil
}

// BeginLoad lets the chunks hashes[name.From:name.To] of a shard be read. One pin of the session on each object becomes a hold. For a
// worker the places are in t.Offsets, and CommitLoad ends the hold. An own Transfer has t.Parts, and Done ends it. All chunks must be
// stored and pinned by the session, else nothing changes and the reason says why. LMCache's own workers send a commit after a refusal, too.
func (s *Store) BeginLoad(session []byte, name hold.Transfer, hashes []kv.Hash, t *Transfer) miss.Reason {
	t.begin(s)
	s.lock()
	defer s.unlock()
	var objects []heldObject
	why := miss.Busy
	if !s.busyLocked(name.By) {
		if objects, why = s.loadLocked(session, name, hashes); why != miss.None {
			s.mu.n.ReadFailures++
		}
	}
	switch {
	case why != miss.None && !t.Own:
		s.mu.holds.Owe(name, session, time.Now())
	case why != miss.None:
	case t.Own:
		s.ownLocked(t, name, session, objects)
	default:
		t.place(objects)
		s.mu.holds.Add(s.newHold(name, session, objects))
	}
	return why
}

// Done ends an own Transfer: the process must not touch its bytes any more. With ok, staged objects become visible, unless the worker was
// detached in between. hashes are as for CommitStore.
func (t *Transfer) Done(hashes []kv.Hash, ok bool) Committed {
	out := Committed{Found: true, Late: t.take(ok)}
	if t.hold.Transfer.Load {
		out.Chunks = len(t.hold.Slots)
		t.store.end(t.hold, false)
		return out
	}
	out.Chunks = t.store.end(t.hold, ok && !out.Late)
	t.store.computed(t.hold, out.Chunks)
	if out.Chunks > 0 {
		t.store.touchHeads(t.hold.Transfer, hashes)
	}
	return out
}

// take removes the Transfer's hold from the table. It reports whether the worker was detached meanwhile. The transfer's end is counted if
// that is so, or if `ok` says that the transfer succeeded.
func (t *Transfer) take(ok bool) (late bool) {
	s := t.store
	s.lock()
	defer s.unlock()
	late = t.hold.Late()
	s.mu.holds.Remove(t.hold)
	if ok || late {
		s.countEndLocked(t.hold)
	}
	return late
}
