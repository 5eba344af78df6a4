// SPDX-License-Identifier: Apache-2.0

package tiering_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store/tiering"
	"github.com/kvasir-kv/kvasir/tier"
)

const probeBytes = 10 // of each object

// places has the chunks below pool in the pool and those from there to tier in a tier, of each shard.
type places struct {
	pool, tier int
	bytes      int64 // of the tier's objects
	err        error // of the tier
	asked      []int // objects, by call of the tier
	chunks     map[kv.Hash]int
	failed     []error
	differ     int
}

func (p *places) InPool(keys []kv.Key, there []bool) {
	for i := range keys {
		there[i] = p.chunks[keys[i].Chunk] < p.pool
	}
}

func (p *places) InTier(_ context.Context, keys []kv.Key) ([]tier.Meta, error) {
	p.asked = append(p.asked, len(keys))
	metas := make([]tier.Meta, len(keys))
	for i := range keys {
		if p.chunks[keys[i].Chunk] < p.tier {
			metas[i].Len = p.bytes
		}
	}
	return metas, p.err
}

func (p *places) Failed(err error) { p.failed = append(p.failed, err) }
func (p *places) Differs(kv.Key)   { p.differ++ }

func newProbe(p *places, world, chunks int) *tiering.Probe {
	hashes := make([]kv.Hash, chunks)
	p.chunks = make(map[kv.Hash]int, chunks)
	for i := range hashes {
		hashes[i] = kv.Hash{byte(i), byte(i >> 8), 1}
		p.chunks[hashes[i]] = i
	}
	if p.bytes == 0 {
		p.bytes = probeBytes
	}
	return tiering.NewProbe(&object.Shard{World: world, Groups: object.FullAttention(16, probeBytes)}, hashes, 0, p)
}

// Each beginning of a hit is offered as soon as it is found, and the hit last. A tier is asked about more chunks each time, about 2,048
// objects at most, and about none that the pool has.
func TestProbeOffersBeginnings(t *testing.T) {
	f := func(p *places, world, chunks int, hits, asked []int) {
		t.Helper()
		var got []int
		newProbe(p, world, chunks).Find(t.Context(), func(hit int) bool { got = append(got, hit); return true })
		if !slices.Equal(got, hits) || !slices.Equal(p.asked, asked) || p.failed != nil || p.differ != 0 {
			t.Errorf("%d of %d chunks in the pool, %d below it, %d shards: hits %v, want %v; asked %v, want %v; %v, %d differ", p.pool, chunks, p.tier, world, got, hits, p.asked, asked, p.failed, p.differ)
		}
	}
	f(&places{tier: 1000}, 1, 1000, []int{16, 80, 336, 592, 848, 1000, 1000}, []int{16, 64, 256, 256, 256, 152})
	f(&places{tier: 100}, 1, 1000, []int{16, 80, 100}, []int{16, 64, 256})
	f(&places{tier: 100}, 64, 100, []int{16, 48, 80, 100, 100}, []int{1024, 2048, 2048, 1280})
	f(&places{tier: 4}, 4096, 3, []int{1, 2, 3, 3}, []int{4096, 4096, 4096})
	f(&places{pool: 40, tier: 60}, 2, 100, []int{16, 32, 48, 60}, []int{16, 104})
	f(&places{pool: 10}, 1, 10, []int{10, 10}, nil)
	f(&places{}, 1, 10, []int{0}, []int{10})
}

// A caller that takes no more of a hit is offered no more, and the tier is asked no more.
func TestProbeEndsWhenNoMoreIsTaken(t *testing.T) {
	for stop := range 3 {
		p, calls := &places{tier: 1000}, 0
		newProbe(p, 1, 1000).Find(t.Context(), func(int) bool { calls++; return calls <= stop })
		if calls != stop+1 || len(p.asked) != stop+1 {
			t.Errorf("%d calls and %d questions after the caller had enough at call %d", calls, len(p.asked), stop+1)
		}
	}
}

// A tier that fails, or has an object of another length, has nothing: the hit ends there, and both are reported. A tier whose question
// was given up has not failed.
func TestProbeReportsWhatATierGetsWrong(t *testing.T) {
	f := func(ctx context.Context, p *places, failed, differ int) {
		t.Helper()
		hit := -1
		newProbe(p, 1, 20).Find(ctx, func(h int) bool { hit = h; return true })
		if hit != 5 || len(p.failed) != failed || p.differ != differ {
			t.Errorf("hit %d, %v, %d differ", hit, p.failed, p.differ)
		}
	}
	given, cancel := context.WithCancel(t.Context())
	cancel()
	f(t.Context(), &places{pool: 5, tier: 20, err: errors.New("down")}, 1, 0)
	f(given, &places{pool: 5, tier: 20, err: context.Canceled}, 0, 0)
	f(t.Context(), &places{pool: 5, tier: 20, bytes: probeBytes - 1}, 0, 11)
}
