package store

import (
	"time"

	"github.com/kvasir-kv/kvasir/kv"
)

// Copy is a transfer that this process carries out itself, on the pool's bytes.
// They stay in place until Done.
type Copy struct {
	Parts []Part

	store *Store
	hold  *hold
}

// Part is one object of a Copy.
type Part struct {
	Chunk int    // in the range
	Group int    // object group
	Bytes []byte // in the pool
}

// forever is later than any copy ends: this process ends its holds itself.
const forever = 100 * 365 * 24 * time.Hour

// ownLocked begins a Copy over slots that are held in the pool.
func (s *Store) ownLocked(name Transfer, requestID []byte, objects []object) *Copy {
	c := &Copy{store: s}
	s.mu.copies++
	name.own = s.mu.copies // no other commit can mean it
	for _, o := range objects {
		c.Parts = append(c.Parts, Part{Chunk: o.chunk, Group: o.group, Bytes: s.mu.pool.View(o.slot)})
	}
	c.hold = s.newHold(name, requestID, objects)
	s.mu.holds.add(c.hold)
	c.hold.deadline = c.hold.deadline.Add(forever)
	return c
}

// Stage takes places for the objects of the chunks hashes[name.From:name.To], of
// all groups, that are not yet kept; of a group's chunk for which skip answers
// true none is taken. Chunks are kept in all their groups or not at all, and what
// does not fit is left out from the end. Nothing is visible before Done. Without
// anything to copy the Copy is nil. Error: ErrBusy.
func (s *Store) Stage(name Transfer, requestID []byte, hashes []kv.Hash, skip func(group, chunk int) bool) (*Copy, Reserved, error) {
	st := stage{store: s, name: name, hashes: hashes, bytes: func(g int) int64 { return name.Shard.Groups.list[g].Bytes }, skip: skip}
	if !st.run() {
		return nil, st.out, ErrBusy
	}
	if len(st.taken) == 0 {
		return nil, st.out, nil
	}
	s.lock()
	defer s.unlock()
	if s.mu.closed {
		return nil, st.out, ErrBusy
	}
	return s.ownLocked(name, requestID, st.taken), st.out, nil
}

// Fetch is Load for this process: the session's pins of what a load of the range
// moves become the Copy's. With another reason than None the Copy is nil.
func (s *Store) Fetch(session []byte, name Transfer, hashes []kv.Hash) (*Copy, Reason) {
	s.lock()
	defer s.unlock()
	if s.busyLocked(&name) {
		return nil, Busy
	}
	objects, why := s.loadLocked(session, name, hashes)
	if why != None {
		s.mu.n.ReadFailures++
		return nil, why
	}
	return s.ownLocked(name, session, objects), None
}

// Done ends the Copy: nothing touches its bytes any more. With ok, what was
// staged becomes visible, unless the worker was detached in between. hashes are
// as for CommitStore.
func (c *Copy) Done(hashes []kv.Hash, ok bool) Committed {
	out := Committed{Found: true, Late: c.take(ok)}
	if c.hold.transfer.Load {
		out.Chunks = len(c.hold.slots)
		c.store.end(c.hold, false)
		return out
	}
	out.Chunks = c.store.end(c.hold, ok && !out.Late)
	if out.Chunks > 0 {
		c.store.touchHeads(c.hold.transfer, hashes)
	}
	return out
}

// take takes the Copy's hold out of the table. It reports whether the worker was
// detached meanwhile.
func (c *Copy) take(ok bool) (late bool) {
	s := c.store
	s.lock()
	defer s.unlock()
	late = c.hold.late()
	s.mu.holds.remove(c.hold)
	if ok || late {
		s.countEndLocked(c.hold)
	}
	return late
}
