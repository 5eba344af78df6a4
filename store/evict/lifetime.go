// SPDX-License-Identifier: Apache-2.0

package evict

import (
	"time"

	"github.com/kvasir-kv/kvasir/internal/container"
	"github.com/kvasir-kv/kvasir/internal/histogram"
)

// lifetimeSample is the sampling rate: one chunk in 64, chosen by its id, is watched.
const lifetimeSample = 64

// lifetimeSeconds are the bounds of the histograms' buckets, those of LMCache.
var lifetimeSeconds = []int64{1, 5, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400}

// Lifetimes watches a sample of the chunks of eviction policies. It measures, in milliseconds, how long they live, how long they were
// unused before their eviction, and the time between two uses. Methods are safe for concurrent use.
type Lifetimes struct {
	life, idle, gap *histogram.Histogram
	every           uint64
}

// NewLifetimes returns empty Lifetimes.
func NewLifetimes() *Lifetimes {
	bounds := make([]int64, len(lifetimeSeconds))
	for i, s := range lifetimeSeconds {
		bounds[i] = s * 1000
	}
	return &Lifetimes{
		life: histogram.New(1e-3, bounds...), idle: histogram.New(1e-3, bounds...), gap: histogram.New(1e-3, bounds...), every: lifetimeSample,
	}
}

// LifetimeStats is the figures, under LMCache's names.
type LifetimeStats struct {
	Life histogram.Counts `histogram:"lmcache_mp_l1_chunk_lifetime_seconds" always:"l1_tag=_default" help:"From the store of a chunk, or its way up from a tier, to its eviction. Of one chunk in 64, as the other two."`
	Idle histogram.Counts `histogram:"lmcache_mp_l1_chunk_idle_before_evict_seconds" always:"l1_tag=_default" help:"From the last use of a chunk to its eviction. Short: the pool is too small for the working set."`
	Gap  histogram.Counts `histogram:"lmcache_mp_l1_chunk_reuse_gap_seconds" always:"l1_tag=_default" help:"Between two uses of a chunk in the pool: that it was stored again, or given back by who had found it."`
}

// Stats returns a snapshot.
func (h *Lifetimes) Stats() LifetimeStats {
	return LifetimeStats{h.life.Counts(), h.idle.Counts(), h.gap.Counts()}
}

// Watch returns a policy that works as p and measures. Like p it is not safe for concurrent use. It takes 4 bytes for each slot, and 32 for
// each chunk that is watched.
func (h *Lifetimes) Watch(p Policy) Policy { return &sampledPolicy{Policy: p, of: h} }

type sampledPolicy struct {
	Policy
	of     *Lifetimes
	places container.PagedSlice[uint32] // by slot: 1 + the index in chunks; 0: not watched
	chunks []watchedChunk
	spare  []uint32 // indices that are free
	victim uint32   // 1 + the slot that Victim returned last
}

type watchedChunk struct{ added, used time.Time }

// Add implements evict.Policy.
func (w *sampledPolicy) Add(slot uint32, id, parent uint64, weight int64) {
	w.forget(slot)
	if id%w.of.every == 0 {
		now := time.Now()
		if len(w.spare) == 0 {
			w.spare = append(w.spare, uint32(len(w.chunks)))
			w.chunks = append(w.chunks, watchedChunk{})
		}
		at := w.spare[len(w.spare)-1]
		w.spare = w.spare[:len(w.spare)-1]
		w.chunks[at] = watchedChunk{now, now}
		w.places.Grow(int(slot) + 1)
		*w.places.At(int(slot)) = at + 1
	}
	w.Policy.Add(slot, id, parent, weight)
}

// Teach implements Teacher. It does nothing if the policy is no Teacher.
func (w *sampledPolicy) Teach(l *Lessons, whole bool) {
	if t, ok := w.Policy.(Teacher); ok {
		t.Teach(l, whole)
	}
}

// place returns the entry of w.places for a slot that is watched, or nil.
func (w *sampledPolicy) place(slot uint32) *uint32 {
	if int(slot) >= w.places.Len() {
		return nil
	}
	if p := w.places.At(int(slot)); *p != 0 {
		return p
	}
	return nil
}

// forget ends the watch of a slot, and returns the times that were recorded.
func (w *sampledPolicy) forget(slot uint32) (c watchedChunk, ok bool) {
	p := w.place(slot)
	if p == nil {
		return c, false
	}
	c = w.chunks[*p-1]
	w.spare = append(w.spare, *p-1)
	*p = 0
	return c, true
}

// Use implements evict.Policy.
func (w *sampledPolicy) Use(slot uint32) {
	if p := w.place(slot); p != nil {
		c, now := &w.chunks[*p-1], time.Now()
		w.of.gap.Observe(now.Sub(c.used).Milliseconds())
		c.used = now
	}
	w.Policy.Use(slot)
}

// Victim implements evict.Policy.
func (w *sampledPolicy) Victim(busy func(slot uint32) bool) (slot uint32, ok, more bool) {
	slot, ok, more = w.Policy.Victim(busy)
	w.victim = 0
	if ok {
		w.victim = slot + 1
	}
	return slot, ok, more
}

// Remove implements evict.Policy. A slot that Victim returned just before counts as evicted; other slots are removed for other reasons and
// not measured.
func (w *sampledPolicy) Remove(slot uint32) {
	if c, ok := w.forget(slot); ok && w.victim == slot+1 {
		now := time.Now()
		w.of.life.Observe(now.Sub(c.added).Milliseconds())
		w.of.idle.Observe(now.Sub(c.used).Milliseconds())
	}
	if w.victim == slot+1 {
		w.victim = 0
	}
	w.Policy.Remove(slot)
}
