// SPDX-License-Identifier: Apache-2.0

package evict

import "github.com/kvasir-kv/kvasir/internal/container"

// ARC keeps slots that were used once, and slots that were used more often, in two LRUs. It learns how much room each needs: a chunk that
// comes back soon after its eviction shows that the LRU it was evicted from was too small. Sizes are in bytes. After N. Megiddo and D.
// Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003.
type ARC struct {
	capacity int64 // bytes of the pool
	target   int64 // bytes for slots that were used once
	parts    [2]arcPart
	entries  container.PagedSlice[arcEntry] // by slot
}

const (
	usedOnce  = 0
	usedOften = 1
)

type arcPart struct {
	order  LRU
	weight int64
	ghosts ghostQueue
}

type arcEntry struct {
	id     uint64
	weight int64
	part   uint8 // 1 + the part; 0: not in the policy
}

// NewARC returns an empty ARC for a pool of poolBytes bytes.
func NewARC(poolBytes int64) *ARC {
	a := &ARC{capacity: poolBytes}
	for i := range a.parts {
		a.parts[i].order.init()
		a.parts[i].ghosts.limit = poolBytes
	}
	return a
}

// Add implements Policy.
func (a *ARC) Add(slot uint32, id, _ uint64, weight int64) {
	part := usedOnce
	once, often := a.parts[usedOnce].ghosts.weight, a.parts[usedOften].ghosts.weight
	switch {
	case a.parts[usedOnce].ghosts.take(id):
		a.target = min(a.target+steps(weight, often, once), a.capacity)
		part = usedOften
	case a.parts[usedOften].ghosts.take(id):
		a.target = max(a.target-steps(weight, once, often), 0)
		part = usedOften
	}
	a.entries.Grow(int(slot) + 1)
	*a.entries.At(int(slot)) = arcEntry{id: id, weight: weight, part: uint8(part) + 1}
	a.parts[part].weight += weight
	a.parts[part].order.Add(slot, id, 0, weight)
}

// steps returns by how many bytes the target changes when content of `weight` bytes comes back whose ghost the part that should grow had.
// right are the bytes of that part's ghosts, other those of the other part's. It is `weight`, or more if right is less than other.
func steps(weight, other, right int64) int64 {
	if right > 0 && other > right {
		return int64(float64(weight) * float64(other) / float64(right))
	}
	return weight
}

func (a *ARC) entry(slot uint32) *arcEntry {
	if int(slot) >= a.entries.Len() {
		return nil
	}
	if e := a.entries.At(int(slot)); e.part != 0 {
		return e
	}
	return nil
}

// Use implements Policy.
func (a *ARC) Use(slot uint32) {
	e := a.entry(slot)
	if e == nil {
		return
	}
	if from := &a.parts[e.part-1]; e.part-1 == usedOnce {
		from.order.Remove(slot)
		from.weight -= e.weight
		e.part = usedOften + 1
		a.parts[usedOften].weight += e.weight
		a.parts[usedOften].order.Add(slot, e.id, 0, e.weight)
		return
	}
	a.parts[usedOften].order.Use(slot)
}

// Remove implements Policy. It remembers the slot's id as a ghost.
func (a *ARC) Remove(slot uint32) {
	e := a.entry(slot)
	if e == nil {
		return
	}
	p := &a.parts[e.part-1]
	p.order.Remove(slot)
	p.weight -= e.weight
	p.ghosts.add(e.id, e.weight)
	*e = arcEntry{}
}

// Victim implements Policy.
func (a *ARC) Victim(busy func(slot uint32) bool) (slot uint32, ok, more bool) {
	first := usedOften
	if a.parts[usedOnce].weight > a.target {
		first = usedOnce
	}
	if slot, ok, more = a.parts[first].order.Victim(busy); ok || more {
		return slot, ok, more
	}
	return a.parts[1-first].order.Victim(busy)
}

// Ascend implements Policy. Slots that were used once come first.
func (a *ARC) Ascend(f func(slot uint32) bool) {
	more := true
	for i := range a.parts {
		if more {
			a.parts[i].order.Ascend(func(slot uint32) bool {
				more = f(slot)
				return more
			})
		}
	}
}
