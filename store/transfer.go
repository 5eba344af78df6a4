// SPDX-License-Identifier: Apache-2.0

package store

import (
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// Transfer has the parameters of BeginStore and BeginLoad, and their results. One value may be used for many transfers of workers; a
// transfer of this process needs its own until Done.
type Transfer struct {
	// Own means that this process moves the bytes itself, until Done. Else a worker does, until its commit.
	Own bool
	// Lasting means that the worker's hold of a store has no deadline: it ends with its commit, or once the worker's process has
	// ended (Detach, EndQuarantine).
	Lasting bool
	// Marked asks to mark the places of a worker, so that a commit whose bytes did not reach the pool is noticed (Committed.Unwritten).
	Marked bool
	// Skip says of which chunks of a group a store takes no place; nil wants all.
	Skip func(group, chunk int) bool
	// TTL is how long what a store stores is served, from BeginStore on; 0: without an end. What is there already, and the chunks before
	// the range, live at least as long afterwards.
	TTL time.Duration

	// Of a worker's: where the objects are, and which.
	Offsets []int64 // bytes from the pool's start
	Indices []int   // positions of their chunks in the range
	Groups  []int   // their object groups

	// Of an own one: the objects. They stay in place until Done.
	Parts []Part

	store *Store
	hold  *hold.Hold
}

// Part is one object of an own Transfer.
type Part struct {
	Chunk int    // in the range
	Group int    // object group
	Bytes []byte // in the pool
}

func (t *Transfer) begin(s *Store) {
	t.Offsets, t.Indices, t.Groups, t.Parts = t.Offsets[:0], t.Indices[:0], t.Groups[:0], nil
	t.store, t.hold = s, nil
}

// place notes where a worker's objects are.
func (t *Transfer) place(objects []heldObject) {
	for _, o := range objects {
		t.Offsets = append(t.Offsets, o.offset)
		t.Indices = append(t.Indices, o.chunk)
		t.Groups = append(t.Groups, o.group)
	}
}

// ownLocked begins an own Transfer over slots that are held in the pool.
func (s *Store) ownLocked(t *Transfer, name hold.Transfer, requestID []byte, objects []heldObject) {
	for _, o := range objects {
		t.Parts = append(t.Parts, Part{Chunk: o.chunk, Group: o.group, Bytes: s.mu.pool.View(o.slot)})
	}
	t.hold = s.newHold(name, requestID, objects)
	s.mu.holds.AddOwn(t.hold)
}

// BeginStore takes places for the objects of the chunks hashes[name.From:name.To] that are not yet kept, evicting
// what is to go first where needed. What does not fit, or passes the worker's share, is left out from the
// end, so that the longest prefix is kept; chunks are kept in all their groups or not at all.
//
// For a worker the places are t.Offsets, of the objects t.Indices and t.Groups: the worker name.Instance
// holds them until CommitStore. For an own Transfer they are t.Parts; nothing of them is visible before Done,
// and without any there is nothing to end. Error: ErrBusy.
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
	s.mu.holds.Count(&name, -st.counted) // h counts them from here on
	s.mu.holds.Add(h)
	return st.out, nil
}

// BeginLoad lets the chunks hashes[name.From:name.To] of a shard be read: the pins of a session of that
// id, one reader each, become a hold. For a worker CommitLoad ends it, and t.Offsets are the places; an own Transfer is
// ended by Done, and has t.Parts. All chunks must be kept and pinned by the session, else nothing changes and the
// reason says why; stock workers send a commit after that, too.
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

// Done ends an own Transfer: nothing touches its bytes any more. With ok, what was
// staged becomes visible, unless the worker was detached in between. hashes are
// as for CommitStore.
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

// take takes the Transfer's hold out of the table. It reports whether the worker was
// detached meanwhile.
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
