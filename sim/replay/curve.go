// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"context"
	"fmt"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/store/evict"
	"github.com/kvasir-kv/kvasir/store/hitcurve"
)

// CurveOptions describes the pool for which EstimateCurve estimates.
type CurveOptions struct {
	Policy   string // one of evict.Names; default evict.Default
	Capacity int    // size of the pool in blocks
	Tiers    []hitcurve.Tier
	Bytes    int64 // bytes of a block; default 1
}

// EstimateCurve plays a trace in a pool, together with the estimator of hit rates that a server has. It returns the estimate at the
// end; the sizes in it are bytes. If after is not nil, it is called after each request. The error is ErrOptions, or ctx's.
func EstimateCurve(ctx context.Context, requests []workload.Request, o CurveOptions, after func(request int, c *hitcurve.Curves)) (hitcurve.Window, error) {
	p, err := numberPrompts(ctx, workload.Each(requests), maxHeldWords, maxDifferent)
	if err != nil {
		return hitcurve.Window{}, err
	}
	defer p.close()
	if o.Policy == "" {
		o.Policy = evict.Default
	}
	if o.Bytes == 0 {
		o.Bytes = 1
	}
	pool := int64(o.Capacity) * o.Bytes
	e, err := evict.New(o.Policy, pool)
	switch {
	case o.Capacity < 1 || o.Capacity > MaxCapacity:
		return hitcurve.Window{}, fmt.Errorf("%w: %d blocks are outside 1 to %d", ErrOptions, o.Capacity, MaxCapacity)
	case err != nil:
		return hitcurve.Window{}, fmt.Errorf("%w: policy %q: %w", ErrOptions, o.Policy, err)
	}
	h := hitcurve.Options{Policy: o.Policy, Bytes: pool, Tiers: o.Tiers}
	if lh, ok := e.(*evict.LeafHazard); ok {
		h.Teach = lh.Teach
	}
	c, cache := hitcurve.New(h), newPlayer(e, o.Capacity, p.blocks)
	var names []uint64
	err = p.play(ctx, nil, func(i int, blocks, _ []uint32) bool {
		names = names[:0]
		for _, b := range blocks {
			names = append(names, nameOf(b))
		}
		c.Lookup(&hitcurve.Lookup{Asked: len(blocks), Pool: cache.find(blocks), Chunks: names, Bytes: o.Bytes}, 0)
		c.Play()
		cache.store(blocks)
		if after != nil {
			after(i, c)
		}
		return true
	})
	if err != nil {
		return hitcurve.Window{}, err
	}
	windows := c.Estimate(0)
	return windows[len(windows)-1], nil
}
