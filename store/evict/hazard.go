// SPDX-License-Identifier: Apache-2.0

package evict

import (
	"math"
	"math/bits"
)

// LeafHazard evicts the leaf (a slot without a resident successor) that is the least likely to be used again soon. The likelihood depends
// on the last prompt that used the slot: its turn in the conversation, its length, how much of it was new, and how long ago it was. A fork
// (a slot after which prompts continued differently), and the slots before it, have classes of their own. LeafHazard learns while it runs.
// A probe watches each end of a prompt, also after its eviction, until the same or a longer prompt comes. A probe watches each fork until
// its next use.
//
// The index of a leaf is the best ratio, over all future times, of the chance that it is used until then to the time that it takes up room:
// Gittins' index of a job that may end. The chance of reuse right now would not do, because people think before they answer: a leaf that
// was just used has the smallest chance. Where people think, the index first rises with age, and falls later. So the lowest index of a
// class is that of the leaf that was not used for longest, or of the leaf that was used last.
//
// Time is counted in added slots. If no slot has a parent, LeafHazard works as an LRU.
type LeafHazard struct {
	leaves
	probes probes

	events  [classes][buckets]float64 // number of reuses, by age
	passed  [classes][buckets]float64 // total time that probes were watched, by age
	index   [classes][buckets]float64
	learnt  int // number of probes that were begun
	refresh int // the class whose index is computed next

	ends     *[]PromptEnd // for Teach; nil: none are recorded
	endsMask uint64       // Mask of the last Lessons

	watched [classes][buckets]watched // running probes of that age
	spent   [classes][buckets]float64 // passed and watched together, when the class's index was computed

	seen, expected [classes][spans]float64 // reuses by age, smoothed: those of the class, and those that average prompts would have had in its place
	factors        [spans]factors

	families [2]family // ends of prompts; forks
}

// family has, by age, the events and spent of all its classes together.
type family struct{ events, spent [buckets]float64 }

const (
	turns   = 3  // classes of conversation turns
	lengths = 3  // classes of prompt lengths: below 4 slots, below 32, more
	sizes   = 8  // classes by number of new slots: 0 (the same prompt again), 1, 2 to 3, 4 to 7 and so on
	forks   = 5  // classes of forks by number of uses: 1, 2 to 3, 4 to 7 and so on
	buckets = 64 // classes of ages, two for each power of two

	forkClass   = turns * lengths * sizes // the first class of forks
	classes     = forkClass + forks
	maxForkUses = 1<<forks - 1 // uses of a fork are counted up to this

	// sameUse is an age below which several uses count as one: the lookup, load and store of one request.
	sameUse = 8

	// halfLife is the number of new probes after which earlier observations count half as much as before.
	halfLife = 1 << 14
)

// watched is the running probes of one age: their number, and the sum of the clock at their beginnings.
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

// least returns the leaf with the lowest index. Of several it returns the one that was not used for longest.
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

// continued ends the probe of a prompt's end when a longer prompt continues it. It also finds forks.
func (h *LeafHazard) continued(parent, _ *node) {
	switch {
	case parent.probe != 0 && parent.forkUses > 0: // Use began a probe for this use
	case parent.probe != 0:
		// A class of size 0 means that Use began this probe, and has counted this use.
		h.observe(parent.probe, parent.class%sizes != 0)
	case parent.state == linked:
		h.useFork(parent)
		h.watch(h.at[parent.id], parent)
	}
}

// useFork counts one more use of a fork, and gives the fork the class for that count.
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

// endOfPrompt sets the class of a prompt's end, and begins a probe of it. A probe whose prompt was evicted and now comes back ends with a
// use.
func (h *LeafHazard) endOfPrompt(place uint32, end *node) {
	size, turn, known := 0, 0, false
	n := end
	count := 0
	for ; n != nil && n.state == waiting && count <= mostWaiting; n = h.up(n) {
		if i := h.probes.ghosts[n.id]; i != 0 { // a prompt that was evicted comes back
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

// classOf returns the class of a prompt that ends with n and of which the last `size` slots were new.
func (h *LeafHazard) classOf(n *node, size int) uint8 {
	return (n.turn*lengths+uint8(min(bits.Len32(n.depth+1)/3, lengths-1)))*sizes + uint8(min(bits.Len(uint(size)), sizes-1))
}
