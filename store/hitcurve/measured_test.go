// SPDX-License-Identifier: Apache-2.0

package hitcurve

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/store/evict"
)

// checkRates checks that all rates of a window are from 0 to 1, that the curve has the measured rate at the pool's size, and that no rate is above the ceiling.
func checkRates(t *testing.T, what string, w *Window) {
	t.Helper()
	if w.Asked == 0 {
		return
	}
	bad := func(v float64) bool { return !(v >= 0 && v <= w.Ceiling+1e-9) }
	if !(w.Ceiling <= 1) || bad(w.Pool) || bad(w.Hit) || w.Hit < w.Pool {
		t.Errorf("%s: %+v", what, w)
	}
	for _, p := range w.Curve {
		if bad(p.Rate) || bad(p.LRU) {
			t.Errorf("%s: %+v", what, w)
		}
	}
	if got := w.Curve[poolFactor].Rate; math.Abs(got-w.Pool) > 1e-9 {
		t.Errorf("%s: %.4f at the pool's size, %.4f measured", what, got, w.Pool)
	}
	for i, p := range w.Tiers {
		if bad(p.Rate) || p.Rate < w.Pool-1e-9 || i == len(w.Tiers)-1 && p.Rate < w.Hit-1e-9 {
			t.Errorf("%s: tier %s: %+v", what, p.Name, w)
		}
	}
}

// Whatever pool and tiers had of the prompts, the curve of every policy has it at the pool's size.
func TestCurveHasTheMeasuredRateAtThePoolsSize(t *testing.T) {
	for _, policy := range evict.Names {
		for seed := range uint64(24) {
			r := rand.New(rand.NewPCG(seed, 7))
			c := New(Options{Policy: policy, Bytes: 1 << r.IntN(20), Tiers: []Tier{{"disk", 1 << r.IntN(30)}, {"far", 1 << 30}}})
			names := uint64(1) << (1 + r.IntN(12))
			kept := r.Float64()
			for range 100 {
				chunks := make([]uint64, 1+r.IntN(20))
				for i := range chunks {
					chunks[i] = (r.Uint64N(names)<<8 | uint64(i)) * 0x9e3779b97f4a7c15
				}
				asked := len(chunks) + r.IntN(3)
				found := int(kept * float64(1+r.IntN(len(chunks))))
				below := r.IntN(found + 1)
				c.Lookup(&Lookup{Asked: asked, Pool: found - below, Below: below, Chunks: chunks, Bytes: 1 << r.IntN(6)}, 0)
			}
			for _, w := range c.Estimate(0) {
				checkRates(t, fmt.Sprint(policy, " ", seed), &w)
			}
		}
	}
}

// A pool that is full of what an earlier server, or an earlier hour, stored finds each prompt the first time that it is asked for.
func TestCurveOfHitsThatWereStoredBeforeTheWindow(t *testing.T) {
	c := New(Options{Policy: "leaf-hazard", Bytes: 1 << 20, Tiers: []Tier{{"disk", 1 << 30}}})
	r := rand.New(rand.NewPCG(1, 7))
	for range 500 {
		chunks := []uint64{r.Uint64(), r.Uint64(), r.Uint64(), r.Uint64()}
		c.Lookup(&Lookup{Asked: 4, Pool: 2, Below: 1, Chunks: chunks, Bytes: 1 << 10}, 0)
	}
	for _, w := range c.Estimate(0) {
		checkRates(t, "stored before", &w)
		if w.Ceiling < 0.75 || w.Curve[len(w.Curve)-1].Rate < 0.499 || w.Tiers[0].Rate < 0.75 {
			t.Errorf("%+v", w)
		}
	}
}

// A prompt that is asked for all the time and never kept, as of requests with skip_save or of tenants whose chunks expire, is no hit at the
// pool's size, although small caches would have it.
func TestCurveOfAPromptThatIsNeverKept(t *testing.T) {
	for _, chunks := range [][]uint64{{1 << 40, 2 << 40}, {0x123456789abcdef0}} {
		c := New(Options{Policy: "lru", Bytes: 1 << 20})
		for range 300 {
			c.Lookup(&Lookup{Asked: len(chunks), Chunks: chunks, Bytes: 1}, 0)
		}
		for _, w := range c.Estimate(0) {
			checkRates(t, "never kept", &w)
		}
	}
}

// The sample stays bounded where a model's chunks are much smaller than those of the first model, and small caches keep what they have where a
// model's chunks are larger than they are.
func TestSampleIsBoundedWithChunksOfSeveralSizes(t *testing.T) {
	const large, small = 16 << 20, 4 << 10
	c := New(Options{Policy: "leaf-hazard", Bytes: 8 << 30, Tiers: []Tier{{"disk", 64 << 30}}, Teach: func(*evict.Lessons, bool) {}})
	r := rand.New(rand.NewPCG(2, 7))
	look := func(n int, bytes int64) {
		chunks := make([]uint64, n)
		for i := range chunks {
			chunks[i] = r.Uint64()
		}
		c.Lookup(&Lookup{Asked: n, Chunks: chunks, Bytes: bytes}, 0)
		c.Play()
	}
	look(100, large)
	most := 0
	for range 40 {
		look(8000, small)
		sum := 0
		for _, cache := range c.caches.lru {
			sum += len(cache.at)
		}
		most = max(most, sum)
	}
	if most > 2*maxSampled {
		t.Errorf("%d sampled chunks, want %d at most", most, maxSampled)
	}
	few := c.caches.lru[0]
	before := len(few.at)
	few.play(0, []sampled{{id: 1 << 50}}, few.capacity+1, 1<<30)
	if len(few.at) != before || before == 0 {
		t.Errorf("%d chunks, %d before one came that is larger than the cache", len(few.at), before)
	}
	for _, w := range c.Estimate(0) {
		checkRates(t, "several sizes", &w)
	}
}

// Tiers of any size: their sum does not pass the largest number.
func TestTiersOfAnySize(t *testing.T) {
	o := Options{Policy: "lru", Bytes: 1 << 30, Tiers: []Tier{{"disk", math.MaxInt64}, {"far", math.MaxInt64}}}
	sizes, _ := o.sizes()
	for _, s := range sizes {
		if s <= 0 {
			t.Errorf("sizes %v", sizes)
		}
	}
	plain := Options{Policy: "lru", Bytes: 1 << 30}
	if got, want := o.rate(1<<10), plain.rate(1<<10); got < want {
		t.Errorf("one chunk in %d is sampled, %d without tiers", got, want)
	}
	c := New(o)
	for i := range 64 {
		c.Lookup(&Lookup{Asked: 1, Chunks: []uint64{uint64(i%8+1) << 40}, Bytes: 1 << 10}, time.Duration(i))
	}
	for _, w := range c.Estimate(0) {
		checkRates(t, "large tiers", &w)
	}
}

// Chunks that engines have themselves are not asked for: however many there are, what is asked for again could have been found.
func TestCeilingBesideChunksOfTheEngine(t *testing.T) {
	c := New(Options{Policy: "lru", Bytes: 1 << 20})
	r := rand.New(rand.NewPCG(3, 7))
	document := make([]uint64, 100)
	for i := range document {
		document[i] = r.Uint64()
	}
	for range 10 {
		chunks := make([]uint64, 900)
		for i := range chunks {
			chunks[i] = r.Uint64()
		}
		c.Lookup(&Lookup{Asked: 100, Chunks: append(chunks, document...), From: 900, Bytes: 1}, 0)
	}
	if w := c.Estimate(0)[0]; math.Abs(w.Ceiling-0.9) > 0.01 || math.Abs(w.Distinct-100) > 2 {
		t.Errorf("%+v", w)
	}
}

// Prompts that come again and again, each with the same answer, which was evicted in between, beside prompts that never come again: the answers
// are stored each time and are no more distinct chunks than they are.
func TestCeilingBesideAnswersThatAreStoredAgain(t *testing.T) {
	c := New(Options{Policy: "lru", Bytes: 1 << 20})
	r := rand.New(rand.NewPCG(4, 7))
	fill := func() []uint64 {
		chunks := make([]uint64, 15)
		for i := range chunks {
			chunks[i] = r.Uint64()
		}
		return chunks
	}
	request := func(chunks []uint64) {
		c.Lookup(&Lookup{Asked: 10, Chunks: chunks[:1], Bytes: 1}, 0)
		c.Stored(chunks, 1, 10, 1, 0)
	}
	var again [10][]uint64
	for i := range again {
		again[i] = fill()
	}
	for i := range 1000 {
		request(again[i%len(again)])
		request(fill())
	}
	if w, want := c.Estimate(0)[0], 1-10100.0/20000; math.Abs(w.Ceiling-want) > 0.01 {
		t.Errorf("ceiling %.3f, want %.3f", w.Ceiling, want)
	}
	var s smallSketch
	for range 20_000 {
		s.add(r.Uint64())
	}
	if got := s.count(); math.Abs(got-20_000) > 0.06*20_000 {
		t.Errorf("%.0f of 20,000 names", got)
	}
}
