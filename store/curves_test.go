// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"fmt"
	"math"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/evict"
	"github.com/kvasir-kv/kvasir/store/hitcurve"
	"github.com/kvasir-kv/kvasir/store/lease"
)

// request looks a prompt up and stores what is missing of prompt and answer. Hashes beyond those that are searched for are
// not known to the lookup.
func (b *bench) request(t *testing.T, id string, h []kv.Hash, answer int) (hit int) {
	t.Helper()
	asked := len(h) - answer
	got := b.store.Lookup([]byte(id), one, store.Prompt{Chunks: asked, Hashes: func(n int) []kv.Hash { return h[:n] }}, 1)
	if got.State == store.Pending {
		defer b.run()()
		got = b.store.Await(t.Context(), []byte(id), lease.Owner{})
	}
	if got.Hit < len(h) {
		tr := transfer(1, h, got.Hit, len(h), false)
		var p store.Transfer
		if _, err := b.store.BeginStore(tr, []byte(id), h, &p); err != nil {
			t.Fatal(err)
		}
		if len(p.Offsets) > 0 {
			for i, off := range p.Offsets {
				copy(b.at(off), content(h[got.Hit+p.Indices[i]], 0))
			}
			b.store.CommitStore(tr, []byte(id), h, true)
		}
	}
	b.store.EndSession([]byte(id), lease.Owner{})
	return got.Hit
}

// A pool that is a little too small for prompts that come in turns finds their common chunks; the store says that twice the memory finds all but the first
// round. Lookups that end at their first chunk name the others when they are stored.
func TestCurvesOfAStoreWhosePoolIsTooSmall(t *testing.T) {
	b := newBench(t, t.TempDir(), 12, store.Options{Curves: &hitcurve.Options{Policy: "lru"}})
	defer b.stop()
	if w := b.store.Curves(); len(w) != 3 || w[2].Asked != 0 || w[2].Ceiling != 0 {
		t.Errorf("before a lookup: %+v", w)
	}
	pool, distinct := 0, make(map[kv.Hash]bool)
	for i := range 40 {
		h := prompt(i%4, 4)
		pool += b.request(t, fmt.Sprint(i), h, 0)
		for _, chunk := range h {
			distinct[chunk] = true
		}
	}
	w, best, had := b.store.Curves()[2], 1-float64(len(distinct))/160, float64(pool)/160
	if w.Lookups != 40 || w.Asked != 160 || had > 0.3 || w.Pool != had || math.Abs(w.Ceiling-best) > 0.002 || w.Bytes != 160*chunkBytes {
		t.Errorf("%d chunks hit; %+v", pool, w)
	}
	if c := w.Curve; c[0].Rate > had || math.Abs(c[1].Rate-had) > 1e-9 || c[1].Bytes != 12*chunkBytes || math.Abs(c[2].Rate-best) > 0.002 || math.Abs(c[2].LRU-best) > 0.002 {
		t.Errorf("%+v", c)
	}
}

// An answer that the next turn's prompt has is no miss of a memory without end, and one that is stored again counts once.
func TestCurvesOfAnswers(t *testing.T) {
	b := newBench(t, t.TempDir(), 64, store.Options{Curves: &hitcurve.Options{Policy: "lru"}})
	defer b.stop()
	h := prompt(1, 12)
	b.request(t, "turn 1", h[:6], 2)
	b.request(t, "turn 1 once more", h[:6], 2)
	if hit := b.request(t, "turn 2", h[:10], 2); hit != 6 {
		t.Errorf("a hit of %d", hit)
	}
	w := b.store.Curves()[2] // 4, 4 and 8 chunks asked for, of which 4 and 2 are new
	if w.Asked != 16 || math.Abs(w.Ceiling-10.0/16) > 0.002 || math.Abs(w.Pool-10.0/16) > 1e-9 {
		t.Errorf("%+v", w)
	}
}

// What a tier gave is a hit, and none of the pool's. A pending lookup counts once, when it ends.
func TestCurvesOfATier(t *testing.T) {
	b := newTiered(t, 8, "", store.Options{Curves: &hitcurve.Options{Policy: "lru", Tiers: []hitcurve.Tier{{Name: "below"}}}})
	defer b.close()
	h := prompt(1, 4)
	keep(t, b.memory, one, h...)
	if hit := b.request(t, "from the tier", h, 0); hit != 4 {
		t.Errorf("a hit of %d", hit)
	}
	if hit := b.request(t, "from the pool", h, 0); hit != 4 {
		t.Errorf("a hit of %d", hit)
	}
	w := b.store.Curves()[2]
	if w.Lookups != 2 || w.Asked != 8 || w.Pool != 0.5 || w.Hit != 1 || w.Ceiling != 1 || len(w.Tiers) != 1 || w.Tiers[0].Rate != w.Ceiling {
		t.Errorf("%+v", w)
	}
}

// Chunks that the engine had itself are neither asked for nor found.
func TestCurvesLeaveOutWhatTheEngineHas(t *testing.T) {
	b := newBench(t, t.TempDir(), 64, store.Options{Curves: &hitcurve.Options{Policy: "lru"}})
	defer b.stop()
	h := prompt(1, 6)
	b.request(t, "first", h, 0)
	b.store.Lookup([]byte("second"), one, store.Prompt{Chunks: 6, From: 4, Hashes: func(n int) []kv.Hash { return h[:n] }}, 1)
	if w := b.store.Curves()[0]; w.Asked != 8 || math.Abs(w.Pool-2.0/8) > 1e-9 {
		t.Errorf("%+v", w)
	}
}

// The estimate of a store with leaf-hazard behind a watch learns from it while requests go on.
func TestCurvesLearnWhileRequestsGoOn(t *testing.T) {
	policy := evict.NewLifetimes().Watch(evict.NewLeafHazard())
	b := newBench(t, t.TempDir(), 64, store.Options{Policy: policy, Curves: &hitcurve.Options{Policy: "leaf-hazard"}})
	defer b.stop()
	end := b.run()
	stop := make(chan struct{})
	asked := make(chan struct{})
	go func() {
		defer close(asked)
		for {
			select {
			case <-stop:
				return
			default:
				b.store.Curves()
			}
		}
	}()
	for i := range 200 {
		b.request(t, fmt.Sprint(i), prompt(i%23, 4), 0)
	}
	close(stop)
	<-asked
	end()
	if w := b.store.Curves()[2]; w.Asked != 800 || w.Ceiling < 0.88 || w.Ceiling > 0.92 || w.Curve[2].Rate < w.Curve[1].Rate {
		t.Errorf("%+v", w)
	}
}

// BenchmarkLookupWithCurves is BenchmarkLookup with the estimate.
func BenchmarkLookupWithCurves(b *testing.B) { benchmarkLookup(b, &hitcurve.Options{Policy: "lru"}) }
