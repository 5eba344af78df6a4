// SPDX-License-Identifier: Apache-2.0

package evict

import "github.com/kvasir-kv/kvasir/internal/container"

// tree is the prefix tree of the resident slots: it knows which slot continues which. Its leaves are in rings, one for each class, in the
// order of their last use.
//
// A prompt's slots are added tail first, so a slot is added before its parent. Added slots wait until settle links them.
type tree struct {
	nodes   container.PagedSlice[node] // place 0 is not used; then one anchor for each class; then the slots
	first   uint32                     // the place of slot 0
	at      map[uint64]uint32          // place of each id
	waiting []uint32                   // slots that settle must link, at most mostWaiting
	lost    map[uint64]uint32          // ids that settle did not find, and the places of the slots that continue them; at most mostLost
	clock   uint64                     // slots added so far

	// settle calls ended for the last slot of a prompt, and ended sets the slot's class; it may be nil.
	ended func(place uint32, n *node)
	// settle calls joined when child continues parent; it may be nil.
	joined func(parent, child *node)
}

// node is what the tree knows of a slot, or the anchor of a ring.
type node struct {
	id, parent   uint64
	last         uint64 // the clock at its last use
	marked       uint64 // the clock when it got its class
	up           uint32 // place of its parent; 0: not known
	kids         int32
	depth        uint32 // number of chunks before it in its prompt, as far as known
	older, newer uint32 // places in the ring; 0: in none
	probe        uint32 // 1 + the probe that watches it
	class        uint8
	turn         uint8
	state        nodeState
	tip          bool  // a prompt ended here
	forkUses     uint8 // for a fork: uses since it became one, at most maxForkUses; 0: no fork
}

type nodeState uint8

const (
	gone    nodeState = iota
	waiting           // for settle
	linked
	busy // a leaf that Victim found busy: in no ring until its next use
)

// mostWaiting bounds the slots that one settle links. When as many wait, add first calls settle.
const mostWaiting = 512

// mostLost bounds the slots that are remembered because they were added long before their parents. Beyond it all are forgotten: these slots
// stay without a parent.
const mostLost = 1 << 12

// maxClimb is how many leaves enter looks at for a place in a ring. If the right place is farther, the leaf gets the one where the search
// ended.
const maxClimb = 32

func (t *tree) init(classes int) {
	t.first, t.at, t.lost = uint32(classes)+1, make(map[uint64]uint32), make(map[uint64]uint32)
	t.nodes.Grow(int(t.first))
	for c := range uint32(classes) {
		*t.place(1 + c) = node{older: 1 + c, newer: 1 + c}
	}
}

func (t *tree) place(i uint32) *node { return t.nodes.At(int(i)) }

// node returns the node of a slot, nil if there is none.
func (t *tree) node(slot uint32) *node {
	if int(slot)+int(t.first) >= t.nodes.Len() {
		return nil
	}
	if n := t.place(slot + t.first); n.state != gone {
		return n
	}
	return nil
}

// up returns the parent of n, nil if it is not resident.
func (t *tree) up(n *node) *node {
	if n.up == 0 {
		return nil
	}
	if p := t.place(n.up); p.state != gone && p.id == n.parent {
		return p
	}
	return nil
}

func (t *tree) add(slot uint32, id, parent uint64) {
	if len(t.waiting) >= mostWaiting {
		t.settle()
	}
	i := slot + t.first
	t.nodes.Grow(int(i) + 1)
	t.clock++
	*t.place(i) = node{id: id, parent: parent, last: t.clock, state: waiting}
	t.at[id] = i
	t.waiting = append(t.waiting, slot)
	if child := t.lost[id]; child != 0 { // the head of a long prompt was added after its tail
		delete(t.lost, id)
		if n := t.place(child); n.state != gone && n.parent == id && n.up == 0 && child != i {
			n.up = i
			t.place(i).kids++
		}
	}
}

// settle links the slots that were added, and puts the ends of prompts into their rings.
func (t *tree) settle() {
	if len(t.waiting) == 0 {
		return
	}
	for _, slot := range t.waiting {
		n := t.node(slot)
		if n == nil || n.state != waiting || n.up != 0 || n.parent == 0 {
			continue
		}
		i := t.at[n.parent]
		if i == slot+t.first {
			continue
		}
		if i == 0 {
			if len(t.lost) >= mostLost {
				clear(t.lost)
			}
			t.lost[n.parent] = slot + t.first
			continue
		}
		p := t.place(i)
		n.up = i
		p.kids++
		t.leave(p)
		if p.state == busy {
			p.state = linked
		}
		if t.joined != nil {
			t.joined(p, n)
		}
	}
	for _, slot := range t.waiting {
		if n := t.node(slot); n != nil && n.state == waiting && n.kids == 0 {
			if t.ended != nil {
				t.ended(slot+t.first, n)
			}
			t.mark(n)
			t.enter(slot+t.first, n, false)
		}
	}
	for _, slot := range t.waiting { // slots that are left continue themselves: their ids collide
		if n := t.node(slot); n != nil && n.state == waiting {
			n.state = linked
		}
	}
	t.waiting = t.waiting[:0]
}

// mark gives the class of a prompt's end to all slots that were added with it.
func (t *tree) mark(end *node) {
	n, depth := end, end.depth
	for range mostWaiting + 1 {
		if n == nil || n.state != waiting {
			return
		}
		n.state, n.depth = linked, depth
		if n.forkUses == 0 {
			n.class, n.marked = end.class, t.clock
		}
		depth = max(depth, 1) - 1
		n = t.up(n)
	}
}

// use records a use of the slot n at place i.
func (t *tree) use(n *node, i uint32) {
	n.last = t.clock
	if n.older != 0 || n.state == busy {
		t.leave(n)
		t.enter(i, n, false)
	}
}

// remove removes a slot. If its parent becomes a leaf, the parent gets the class of this slot, which continued it last.
func (t *tree) remove(slot uint32, n *node) {
	t.leave(n)
	if t.at[n.id] == slot+t.first {
		delete(t.at, n.id)
	}
	if p := t.up(n); p != nil && p.kids > 0 {
		p.kids--
		if n.marked > p.marked && p.forkUses == 0 {
			p.class, p.marked = n.class, n.marked
		}
		if p.kids == 0 && p.state == linked {
			t.enter(n.up, p, true)
		}
	}
	*n = node{}
}

// enter puts a leaf into the ring of its class: as the newest or, with `old`, at the place of its last use, which it seeks among the oldest.
func (t *tree) enter(i uint32, n *node, old bool) {
	anchor := 1 + uint32(n.class)
	older := t.place(anchor).older
	if old {
		older = anchor
		for range maxClimb {
			next := t.place(older).newer
			if next == anchor || t.place(next).last >= n.last {
				break
			}
			older = next
		}
	}
	newer := t.place(older).newer
	n.older, n.newer, n.state = older, newer, linked
	t.place(older).newer, t.place(newer).older = i, i
}

// leave takes a node out of its ring, if it is in one.
func (t *tree) leave(n *node) {
	if n.older != 0 {
		t.place(n.older).newer, t.place(n.newer).older = n.newer, n.older
		n.older, n.newer = 0, 0
	}
}

// oldest returns the leaf of a class that was not used for longest.
func (t *tree) oldest(class int) (i uint32, n *node) {
	anchor := 1 + uint32(class)
	if i = t.place(anchor).newer; i == anchor {
		return 0, nil
	}
	return i, t.place(i)
}

// newest returns the leaf of a class that was used last.
func (t *tree) newest(class int) (i uint32, n *node) {
	anchor := 1 + uint32(class)
	if i = t.place(anchor).older; i == anchor {
		return 0, nil
	}
	return i, t.place(i)
}
