// SPDX-License-Identifier: Apache-2.0

package evict

import "math"

// Shadow is leaf-hazard for a sampled cache of another size. It evicts by the classes and indices that the LeafHazard of a whole cache has
// learned. A sample could not learn them, because the class of a prompt depends on all of its chunks. It is not safe for concurrent use.
type Shadow struct {
	leaves
	from *Lessons
}

// Lessons are the classes and indices that Shadows take from a LeafHazard. Teach fills them in. With the zero Lessons a Shadow works as
// leaf-lru.
type Lessons struct {
	Ends []PromptEnd // classes of prompts since the last Teach; the owner of the Shadows passes each to Mark
	Mask uint64      // set by the owner: a fork whose id has one of these bits is left out

	clock uint64
	index *[classes][buckets]float64 // nil: none yet
}

// PromptEnd is the class of a prompt: all its chunks are as likely to be used again as its last one, except that chunks up to a fork have
// the class of that fork.
type PromptEnd struct {
	ID    uint64 // id of the prompt's last chunk or, with Fork, of one chunk
	Fork  bool   // the class is that of this chunk alone, which is a fork or before one
	class uint8
}

// Teacher is a policy that teaches Shadows.
type Teacher interface {
	// Teach fills in l: the classes of the prompts since its last call (the first call gives none). With `whole` it also copies the
	// indices, 36 KiB.
	Teach(l *Lessons, whole bool)
}

// maxEnds bounds the prompts that wait for Teach; later ones are dropped.
const maxEnds = 1 << 12

// unmarked is the class of slots whose class is not known. They are evicted last for the next unmarkedLife additions to the whole cache,
// and first after that.
const (
	unmarked     = classes
	unmarkedLife = 1 << 12
)

// noteEnd records the class of a prompt for the next Teach, unless maxEnds wait for it already.
func (h *LeafHazard) noteEnd(n *node) {
	if h.ends != nil && len(*h.ends) < maxEnds {
		*h.ends = append(*h.ends, PromptEnd{ID: n.id, class: n.class})
	}
}

// noteFork records the class of a fork for the fork and for the slots before it, up to the next fork or mostWaiting slots.
func (h *LeafHazard) noteFork(fork *node) {
	if h.ends == nil {
		return
	}
	n := fork
	for range mostWaiting {
		if n == nil || n != fork && n.forkUses > 0 || len(*h.ends) >= maxEnds {
			return
		}
		if n.id&h.endsMask == 0 {
			*h.ends = append(*h.ends, PromptEnd{n.id, true, fork.class})
		}
		n = h.up(n)
	}
}

// Teach implements Teacher.
func (h *LeafHazard) Teach(l *Lessons, whole bool) {
	h.settle()
	l.clock, h.endsMask = h.clock, l.Mask
	if whole {
		if l.index == nil {
			l.index = new([classes][buckets]float64)
		}
		*l.index = h.index
	}
	l.Ends = l.Ends[:0]
	if h.ends == nil {
		h.ends = new([]PromptEnd)
	}
	l.Ends, *h.ends = *h.ends, l.Ends
}

// NewShadow returns an empty Shadow that learns from l.
func NewShadow(l *Lessons) *Shadow {
	s := &Shadow{from: l}
	s.init(classes + 1)
	s.ended = func(_ uint32, n *node) { n.class = unmarked }
	return s
}

// Mark gives a slot the class `of` of a prompt that has the slot.
func (s *Shadow) Mark(slot uint32, of PromptEnd) {
	s.settle()
	n := s.node(slot)
	if n == nil {
		return
	}
	n.marked = s.clock
	if !of.Fork && n.forkUses > 0 {
		return
	}
	s.setClass(slot, n, of.class)
}

// Share records that a prompt used a slot. forks says that the prompt continued after it differently than the prompt before: the slot is
// then a fork.
func (s *Shadow) Share(slot uint32, forks bool) {
	s.settle()
	if n := s.node(slot); n != nil && (forks || n.forkUses > 0) {
		n.forkUses = min(n.forkUses+1, maxForkUses)
		s.setClass(slot, n, forkClassOf(n.forkUses))
	}
}

func (s *Shadow) setClass(slot uint32, n *node, class uint8) {
	if n.class == class {
		return
	}
	inRing := n.older != 0
	s.leave(n)
	n.class = class
	if inRing {
		s.enter(slot+s.first, n, false)
	}
}

// Add implements Policy.
func (s *Shadow) Add(slot uint32, id, parent uint64, weight int64) {
	s.clock = max(s.clock, s.from.clock)
	s.leaves.Add(slot, id, parent, weight)
}

// Use implements Policy.
func (s *Shadow) Use(slot uint32) {
	s.clock = max(s.clock, s.from.clock)
	s.leaves.Use(slot)
}

// Victim implements Policy.
func (s *Shadow) Victim(busy func(slot uint32) bool) (slot uint32, ok, more bool) {
	return s.victim(busy, s.least)
}

// least is as LeafHazard.least, with the indices of the lessons.
func (s *Shadow) least() (place uint32, leaf *node) {
	best := math.Inf(1)
	for c := range classes + 1 {
		i, n := s.oldest(c)
		if n == nil {
			continue
		}
		if v := s.value(c, s.clock-n.last); v < best || v == best && n.last < leaf.last {
			best, place, leaf = v, i, n
		}
		if j, m := s.newest(c); j != i {
			if v := s.value(c, s.clock-m.last); v < best {
				best, place, leaf = v, j, m
			}
		}
	}
	return place, leaf
}

// value returns the index of a leaf of a class that was not used for `age` additions.
func (s *Shadow) value(class int, age uint64) float64 {
	switch {
	case class == unmarked && age <= unmarkedLife:
		return math.MaxFloat64
	case class == unmarked || s.from.index == nil:
		return 0
	}
	return s.from.index[class][bucketOf(age)]
}
