// SPDX-License-Identifier: Apache-2.0

package evict

import "github.com/kvasir-kv/kvasir/internal/container"

// probe watches the node at the end of a prompt, or at a fork, until that node is used again.
type probe struct {
	id           uint64
	place        uint32 // place of the node that it watches, until the node is evicted
	began        uint64 // the clock at its beginning
	older, newer uint32 // in the queue of its age, or of the free probes
	class, turn  uint8
	forkUses     uint8 // uses of the node that it watches, if that is a fork
	age          uint8 // bucket of its age
	ghost        bool  // the node that it watches was evicted
}

// maxProbes bounds the running probes: 4 MB. A further one ends the probe that has been watched for longest.
const maxProbes = 1 << 16

// maxAging is how many probes one call of grow moves to the age that they have reached. Later calls move the others.
const maxAging = 256

// probes has the probes in queues by age, the oldest first. Places 1 to `buckets` are the anchors of the queues.
type probes struct {
	all    container.PagedSlice[probe]
	used   int               // number of places that were ever used
	free   []uint32          // places that are free again
	ghosts map[uint64]uint32 // ids of evicted content, and the places of their probes
}

func (p *probes) init() {
	p.ghosts = make(map[uint64]uint32)
	p.all.Grow(buckets + 1)
	for i := uint32(1); i <= buckets; i++ {
		*p.at(i) = probe{older: i, newer: i}
	}
	p.used = buckets + 1
}

func (p *probes) at(i uint32) *probe { return p.all.At(int(i)) }

// evicted records that the slot of a probe was evicted.
func (p *probes) evicted(id uint64, i uint32) {
	if old := p.ghosts[id]; old != 0 {
		p.at(old).ghost = false // the two ids collide; no lookup will find the old one
	}
	p.ghosts[id] = i
	p.at(i).ghost, p.at(i).place = true, 0
}

func (p *probes) link(i uint32, age uint8) {
	q := p.at(i)
	anchor := 1 + uint32(age)
	q.age, q.older, q.newer = age, p.at(anchor).older, anchor
	p.at(q.older).newer, p.at(anchor).older = i, i
}

func (p *probes) unlink(i uint32) {
	q := p.at(i)
	p.at(q.older).newer, p.at(q.newer).older = q.newer, q.older
}

// forksPerIndex is after how many probes of forks one index is computed again: a prompt may pass several forks.
const forksPerIndex = 4

// watch begins a probe of a prompt's end or of a fork.
func (h *LeafHazard) watch(place uint32, end *node) {
	p := &h.probes
	h.grow()
	if len(p.free) == 0 && p.used > maxProbes {
		h.dropOldest()
	}
	var i uint32
	if last := len(p.free) - 1; last >= 0 {
		i, p.free = p.free[last], p.free[:last]
	} else {
		i = uint32(p.used)
		p.used++
		p.all.Grow(p.used)
	}
	*p.at(i) = probe{id: end.id, place: place, began: h.clock, class: end.class, turn: end.turn, forkUses: end.forkUses}
	p.link(i, 0)
	h.open(p.at(i), 1)
	end.probe = i
	if h.learnt++; h.learnt%halfLife == 0 {
		h.fade()
	}
	if end.forkUses > 0 && h.learnt%forksPerIndex != 0 {
		return
	}
	h.reindex(h.refresh)
	h.refresh = (h.refresh + 1) % classes
}

// observe ends the probe at place i. With `used` the slot that it watched was used again, which counts as a reuse at the probe's age.
// Without, it is not known whether the slot will be used again, and only the time that it was watched counts.
func (h *LeafHazard) observe(i uint32, used bool) {
	p := &h.probes
	q := p.at(i)
	age := h.clock - q.began
	b := bucketOf(age)
	h.pass(q, int(q.age), b)
	h.time(q, b, float64(age)-lower[b])
	if used {
		h.events[q.class][b]++
		h.families[familyOf(int(q.class))].events[b]++
	}
	if q.ghost {
		delete(p.ghosts, q.id)
	} else if q.place != 0 {
		h.place(q.place).probe = 0
	}
	h.open(q, -1)
	p.unlink(i)
	p.free = append(p.free, i)
}

// grow moves probes to the queue of the age that they have reached, maxAging at most.
func (h *LeafHazard) grow() {
	p, moves := &h.probes, 0
	for b := buckets - 2; b >= 0; b-- {
		for anchor := 1 + uint32(b); moves < maxAging; moves++ {
			i := p.at(anchor).newer
			if i == anchor {
				break
			}
			q := p.at(i)
			now := bucketOf(h.clock - q.began)
			if now <= b {
				break
			}
			h.pass(q, b, now)
			h.open(q, -1)
			p.unlink(i)
			p.link(i, uint8(now))
			h.open(q, 1)
		}
	}
}

// pass counts the time for which a probe was watched, from the beginning of bucket `from` to that of bucket `to`.
func (h *LeafHazard) pass(q *probe, from, to int) {
	for b := from; b < to; b++ {
		h.time(q, b, lower[b+1]-lower[b])
	}
}

// open adds n probes (1 or -1) to the running probes of q's class and age.
func (h *LeafHazard) open(q *probe, n int64) {
	o := &h.watched[q.class][q.age]
	o.n += n
	o.began += n * int64(q.began)
}

// spentIn returns for how long all probes of class c were watched in the age bucket b, running probes included.
func (h *LeafHazard) spentIn(c, b int) float64 {
	o := &h.watched[c][b]
	return h.passed[c][b] + max(0, float64(o.n*int64(h.clock)-o.began)-float64(o.n)*lower[b])
}

// time adds the time t, for which q was watched in the age bucket b, to the figures of q's class.
func (h *LeafHazard) time(q *probe, b int, t float64) {
	h.passed[q.class][b] += t
}

// dropOldest ends the probe that has been watched for longest, as one without a use.
func (h *LeafHazard) dropOldest() {
	for anchor := uint32(buckets); anchor > 0; anchor-- {
		if i := h.probes.at(anchor).newer; i != anchor {
			h.observe(i, false)
			return
		}
	}
}

// fade halves the observations, so that newer prompts count more.
func (h *LeafHazard) fade() {
	for b := range buckets {
		for f := range h.families {
			h.families[f].events[b] /= 2
		}
		for c := range classes {
			h.events[c][b] /= 2
			h.passed[c][b] /= 2
		}
	}
}
