// SPDX-License-Identifier: Apache-2.0

package tier

import (
	"cmp"
	"container/heap"
	"context"
	"errors"
	"slices"

	"github.com/kvasir-kv/kvasir/kv"
)

// Ranking is a Tier that can list its most recently used objects. If it does not know when objects were used, it lists the most recently
// written ones.
type Ranking interface {
	// Hottest calls f for n objects at most, the hottest first, until f returns false. It takes
	// memory for n names.
	Hottest(ctx context.Context, n int, f func(kv.Key, Meta) bool) error
}

// Hottest calls t.Hottest. It returns ErrNoList if t is no Ranking.
func Hottest(ctx context.Context, t Tier, n int, f func(kv.Key, Meta) bool) error {
	if r, ok := t.(Ranking); ok {
		return r.Hottest(ctx, n, f)
	}
	return ErrNoList
}

// Hot collects the n hottest of the names that are added to it.
type Hot struct {
	n    int
	heap hotHeap // coldest first
}

// NewHot returns a Hot for n names.
func NewHot(n int) *Hot { return &Hot{n: n} }

// Add adds a name. A larger heat is hotter; of two equal heats the one added first is hotter.
func (h *Hot) Add(k kv.Key, heat int64) {
	x := hot{k, heat, h.heap.added}
	h.heap.added++
	if len(h.heap.list) < h.n {
		heap.Push(&h.heap, x)
	} else if h.n > 0 && colder(h.heap.list[0], x) {
		h.heap.list[0] = x
		heap.Fix(&h.heap, 0)
	}
}

// Each looks the names up in t, 256 at a time, and calls f for those that are in t, the hottest
// first, until f returns false.
func (h *Hot) Each(ctx context.Context, t Tier, f func(kv.Key, Meta) bool) error {
	list := slices.Clone(h.heap.list)
	slices.SortFunc(list, func(a, b hot) int { return cmp.Or(cmp.Compare(b.heat, a.heat), cmp.Compare(a.number, b.number)) })
	for some := range slices.Chunk(list, 256) {
		keys, metas := make([]kv.Key, len(some)), make([]Meta, len(some))
		for i := range some {
			keys[i] = some[i].key
		}
		if err := t.Stat(ctx, keys, metas); err != nil {
			return err
		}
		for i := range some {
			if metas[i].Len > 0 && !f(keys[i], metas[i]) {
				return nil
			}
		}
	}
	return nil
}

type hot struct {
	key    kv.Key
	heat   int64
	number int
}

func colder(a, b hot) bool { return a.heat < b.heat || a.heat == b.heat && a.number > b.number }

type hotHeap struct {
	list  []hot
	added int
}

func (h *hotHeap) Len() int           { return len(h.list) }
func (h *hotHeap) Less(i, j int) bool { return colder(h.list[i], h.list[j]) }
func (h *hotHeap) Swap(i, j int)      { h.list[i], h.list[j] = h.list[j], h.list[i] }
func (h *hotHeap) Push(x any)         { h.list = append(h.list, x.(hot)) }
func (h *hotHeap) Pop() any {
	last := len(h.list) - 1
	x := h.list[last]
	h.list = h.list[:last]
	return x
}

// Hottest implements Ranking.
func (b *Bounding) Hottest(ctx context.Context, n int, f func(kv.Key, Meta) bool) error {
	return Hottest(ctx, b.of, n, f)
}

// Hottest implements Ranking.
func (c *Counting) Hottest(ctx context.Context, n int, f func(kv.Key, Meta) bool) error {
	return Hottest(ctx, c.of, n, f)
}

// Hottest implements Ranking.
func (a *Admitting) Hottest(ctx context.Context, n int, f func(kv.Key, Meta) bool) error {
	return Hottest(ctx, a.Tier, n, f)
}

// Hottest implements Ranking.
func (r *Remembering) Hottest(ctx context.Context, n int, f func(kv.Key, Meta) bool) error {
	return Hottest(ctx, r.of, n, f)
}

// Hottest implements Ranking. It ranks one tier after the other.
func (r *Routing) Hottest(ctx context.Context, n int, f func(kv.Key, Meta) bool) error {
	return eachHottest(ctx, r.tiers, n, f)
}

// Hottest implements Ranking. It ranks one tier after the other. It may name an object that several
// tiers have more than once.
func (c *Cascading) Hottest(ctx context.Context, n int, f func(kv.Key, Meta) bool) error {
	return eachHottest(ctx, c.tiers, n, f)
}

// eachHottest calls Hottest of each tier in turn, until f was called for n objects or returned false. It leaves out a tier that fails, and
// returns an error if no tier is a Ranking.
func eachHottest(ctx context.Context, tiers []Tier, n int, f func(kv.Key, Meta) bool) error {
	able, more := false, true
	var errs []error
	for _, t := range tiers {
		if !more || n <= 0 || ctx.Err() != nil {
			break
		}
		err := Hottest(ctx, t, n, func(k kv.Key, m Meta) bool {
			n--
			more = f(k, m)
			return more
		})
		switch {
		case err == nil:
			able = true
		case !errors.Is(err, ErrNoList):
			errs = append(errs, err)
		}
	}
	switch {
	case able:
		return ctx.Err()
	case len(errs) > 0:
		return errors.Join(errs...)
	}
	return cmp.Or(ctx.Err(), ErrNoList)
}
