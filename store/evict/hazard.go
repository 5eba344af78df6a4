// SPDX-License-Identifier: Apache-2.0

package evict

import (
	"math"
	"math/bits"
)

// LeafHazard evicts the leaf, a slot without a resident successor, that is the least likely
// to be used again soon. The likelihood depends on the prompt that used the slot last: which turn
// of a conversation it was, how long, how much of it was new, and how long ago that is. LeafHazard learns it
// while it runs, from the ends of prompts: a probe watches each of them, also after its eviction,
// until a longer prompt or the same one comes.
//
// The index of a leaf is the best ratio, over all times to come, of the chance that it is used until
// then to the time that it takes up room: Gittins' index of a job that may end. A chance of reuse
// right now would not do: people think before they answer, so what was just used has the least.
// Within a class the oldest leaf goes first; between classes, the one of the lowest index.
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

	ends *[]PromptEnd // for Teach; nil: none are noted

	watched [classes][buckets]watched // probes that are of that age now
	spent   [classes][buckets]float64 // passed and watched when the class's index was computed

	allEvents, allSpent [buckets]float64 // the sums of events and spent
}

const (
	turns   = 3 // classes of conversation turns
	lengths = 3 // classes of prompt lengths: below 7 slots, below 63, more
	sizes   = 8 // of what was new: 0 (the same prompt again), 1, 2 to 3, 4 to 7 and so on
	classes = turns * lengths * sizes
	buckets = 64 // of ages, two to each power of two

	// sameUse is an age below which uses are one: lookup, load and store of one request.
	sameUse = 8

	// prior is how many expected reuses a class needs to see before it counts half on its own.
	prior = 1

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
	if n.probe != 0 && h.clock-h.probes.at(n.probe).began >= sameUse { // the same prompt again
		h.observe(n.probe, true)
		h.leave(n)
		n.class, n.marked = h.classOf(n, 0), h.clock
		h.noteEnd(n)
		h.watch(slot+h.first, n)
		h.enter(slot+h.first, n, false)
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
		if i, n := h.oldest(c); n != nil {
			if v := h.index[c][bucketOf(h.clock-n.last)]; v < best || v == best && n.last < leaf.last {
				best, place, leaf = v, i, n
			}
		}
	}
	return place, leaf
}

// continued closes the probe of a prompt's end that a longer prompt continues.
func (h *LeafHazard) continued(parent, _ *node) {
	if parent.probe != 0 {
		// Its use, if it was a use, began a probe of the same prompt.
		h.observe(parent.probe, parent.class%sizes != 0)
	}
}

// endOfPrompt gives the end of a prompt its class and a probe.
func (h *LeafHazard) endOfPrompt(place uint32, end *node) {
	size, turn, known := 0, 0, false
	n := end
	count := 0
	for ; n != nil && n.state == waiting && count <= mostWaiting; n = h.up(n) {
		if i := h.probes.ghosts[n.id]; i != 0 { // an evicted prompt comes back
			if !known {
				known, size, turn = true, count, int(h.probes.at(i).turn)+min(count, 1)
			}
			h.observe(i, true)
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
	end.class = h.classOf(end, size)
	h.noteEnd(end)
	h.watch(place, end)
}

// classOf returns the class of a prompt that ends with n, of which the last size slots were new.
func (h *LeafHazard) classOf(n *node, size int) uint8 {
	return (n.turn*lengths+uint8(min(bits.Len32(n.depth+1)/3, lengths-1)))*sizes + uint8(min(bits.Len(uint(size)), sizes-1))
}
