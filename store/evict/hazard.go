// SPDX-License-Identifier: Apache-2.0

package evict

import (
	"math"
	"math/bits"
)

// LeafHazard evicts the leaf, a slot without a resident successor, that is the least likely
// to be used again soon. The likelihood depends on the prompt that used the slot last: which turn
// of a conversation it was, how long, how much of it was new, and how long ago that is. A fork, from which prompts went
// on differently, and what is before it have a class of their own. LeafHazard learns
// while it runs: a probe watches each end of a prompt, also after its eviction,
// until a longer prompt or the same one comes, and each fork until its next use.
//
// The index of a leaf is the best ratio, over all times to come, of the chance that it is used until
// then to the time that it takes up room: Gittins' index of a job that may end. A chance of reuse
// right now would not do: people think before they answer, so what was just used has the least.
// The index first rises with age, where people think, and falls later. So within a class the least is at one of two places:
// the leaf that was not used for longest, or the one that was used last.
//
// Time is counted in slots added. Without parents it works as an LRU.
type LeafHazard struct {
	leaves
	probes probes

	events  [classes][buckets]float64 // reuses, by age
	passed  [classes][buckets]float64 // time that probes were watched, by age
	index   [classes][buckets]float64
	learnt  int // probes begun
	refresh int // the class whose index is next

	ends     *[]PromptEnd // for Teach; nil: none are noted
	endsMask uint64       // of the last Lessons

	watched [classes][buckets]watched // probes that are of that age now
	spent   [classes][buckets]float64 // passed and watched when the class's index was computed

	seen, expected [classes][spans]float64 // reuses by age, smoothed: those of the class; those of average prompts in its place
	factors        [spans]factors

	families [2]family // ends of prompts, forks
}

// family is the sum over its classes of events and spent.
type family struct{ events, spent [buckets]float64 }

const (
	turns   = 3  // classes of conversation turns
	lengths = 3  // classes of prompt lengths: below 7 slots, below 63, more
	sizes   = 8  // of what was new: 0 (the same prompt again), 1, 2 to 3, 4 to 7 and so on
	forks   = 5  // classes of forks, by their uses: 1, 2 to 3, 4 to 7 and so on
	buckets = 64 // of ages, two to each power of two

	forkClass   = turns * lengths * sizes // the first class of forks
	classes     = forkClass + forks
	maxForkUses = 1<<forks - 1

	// sameUse is an age below which uses are one: lookup, load and store of one request.
	sameUse = 8

	// halfLife is how many probes are begun until what was seen counts half.
	halfLife = 1 << 14
)

// watched are probes of one age: their number and the sum of when they began.
type watched struct{ n, began int64 }

// NewLeafHazard returns an empty LeafHazard.
func NewLeafHazard() *LeafHazard {
	h := new(LeafHazard)
	h.init(classes)
	h.probes.init()
	for g := range h.factors {
		h.factors[g].init()
	}
	h.ended, h.joined = h.endOfPrompt, h.continued
	return h
}

// Use implements Policy.
func (h *LeafHazard) Use(slot uint32) {
	h.all.Use(slot)
	n := h.node(slot)
	if n == nil {
		return
	}
	if n.probe != 0 && h.clock-h.probes.at(n.probe).began >= sameUse { // the same prompt again, or a fork
		h.observe(n.probe, true)
		leaf := n.older != 0 || n.state == busy
		h.leave(n)
		if n.forkUses > 0 {
			h.useFork(n)
		} else {
			n.class, n.marked = h.classOf(n, 0), h.clock
			h.noteEnd(n)
		}
		h.watch(slot+h.first, n)
		if leaf {
			h.enter(slot+h.first, n, false)
		}
	}
	h.use(n, slot+h.first)
}

// Remove implements Policy. The probe of a prompt's end goes on.
func (h *LeafHazard) Remove(slot uint32) {
	h.all.Remove(slot)
	n := h.node(slot)
	if n == nil {
		return
	}
	if n.probe != 0 {
		h.probes.evicted(n.id, n.probe)
	}
	h.remove(slot, n)
}

// Victim implements Policy.
func (h *LeafHazard) Victim(busy func(slot uint32) bool) (slot uint32, ok, more bool) {
	return h.victim(busy, h.least)
}

// least returns the leaf of the lowest index, of several the one not used for longest.
func (h *LeafHazard) least() (place uint32, leaf *node) {
	best := math.Inf(1)
	for c := range classes {
		i, n := h.oldest(c)
		if n == nil {
			continue
		}
		if v := h.index[c][bucketOf(h.clock-n.last)]; v < best || v == best && n.last < leaf.last {
			best, place, leaf = v, i, n
		}
		if j, m := h.newest(c); j != i {
			if v := h.index[c][bucketOf(h.clock-m.last)]; v < best {
				best, place, leaf = v, j, m
			}
		}
	}
	return place, leaf
}

// continued closes the probe of a prompt's end that a longer prompt continues, and finds forks.
func (h *LeafHazard) continued(parent, _ *node) {
	switch {
	case parent.probe != 0 && parent.forkUses > 0: // Use began a probe for this use
	case parent.probe != 0:
		// A class of size 0 says that Use began this probe, and counted this use already.
		h.observe(parent.probe, parent.class%sizes != 0)
	case parent.state == linked:
		h.useFork(parent)
		h.watch(h.at[parent.id], parent)
	}
}

// useFork counts a use of a fork, which gives it its class.
func (h *LeafHazard) useFork(n *node) {
	n.forkUses = min(n.forkUses+1, maxForkUses)
	n.class, n.marked = forkClassOf(n.forkUses), h.clock
	h.noteFork(n)
}

func forkClassOf(uses uint8) uint8 { return forkClass + uint8(bits.Len8(uses)) - 1 }

func familyOf(class int) int {
	if class >= forkClass {
		return 1
	}
	return 0
}

// endOfPrompt gives the end of a prompt its class and a probe.
func (h *LeafHazard) endOfPrompt(place uint32, end *node) {
	size, turn, known := 0, 0, false
	n := end
	count := 0
	for ; n != nil && n.state == waiting && count <= mostWaiting; n = h.up(n) {
		if i := h.probes.ghosts[n.id]; i != 0 { // an evicted prompt comes back
			uses := h.probes.at(i).forkUses
			if !known && uses == 0 {
				known, size, turn = true, count, int(h.probes.at(i).turn)+min(count, 1)
			}
			h.observe(i, true)
			if uses > 0 {
				n.forkUses = uses
				h.useFork(n)
				h.watch(h.at[n.id], n)
			}
		}
		count++
		if !known {
			size = count
		}
	}
	end.depth = uint32(count) - 1
	if n != nil {
		end.depth += n.depth + 1
	}
	if !known && n != nil && n.tip {
		turn = int(n.turn) + 1
	}
	end.tip, end.turn = true, uint8(min(turn, turns-1))
	if end.forkUses > 0 {
		return
	}
	end.class = h.classOf(end, size)
	h.noteEnd(end)
	h.watch(place, end)
}

// classOf returns the class of a prompt that ends with n, of which the last size slots were new.
func (h *LeafHazard) classOf(n *node, size int) uint8 {
	return (n.turn*lengths+uint8(min(bits.Len32(n.depth+1)/3, lengths-1)))*sizes + uint8(min(bits.Len(uint(size)), sizes-1))
}
