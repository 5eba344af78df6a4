// SPDX-License-Identifier: Apache-2.0

package hitcurve

import (
	"context"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/store/evict"
)

// A sketch is within one percent of the truth from nothing to 300,000 names, and the sketch of a union is the union of sketches.
func TestSketchCounts(t *testing.T) {
	for seed := range uint64(4) {
		r := rand.New(rand.NewPCG(seed, 0))
		var a, b sketch
		if got := a.count(); got != 0 {
			t.Errorf("nothing: %v", got)
		}
		n := 0
		for _, to := range []int{1, 10, 1000, 30_000, 300_000} {
			for ; n < to; n++ {
				id := r.Uint64()
				a.add(id)
				if a.add(id); n%2 == 0 {
					b.add(id)
				}
			}
			if got := a.count(); math.Abs(got-float64(n)) > 0.012*float64(n)+0.5 {
				t.Errorf("seed %d: %d names, %.1f estimated", seed, n, got)
			}
		}
		before := a.count()
		a.merge(&b)
		if a.count() != before {
			t.Errorf("the union with a part has %v, %v before", a.count(), before)
		}
	}
}

func TestSketchCornerCases(t *testing.T) {
	var s sketch
	s.add(0)
	s.add(math.MaxUint64)
	if got := s.count(); math.Abs(got-2) > 0.01 {
		t.Errorf("two names: %v", got)
	}
	for i := range s {
		s[i] = 64 - registerBits + 1
	}
	if got := s.count(); !(got > 1e15) {
		t.Errorf("all registers full: %v", got)
	}
}

// The windows take at most 1 MiB.
func TestWindowsAreBounded(t *testing.T) {
	const stretches = 1 + shorts + mids + 1 + longs
	if got := stretches * (len(sketch{}) + len(smallSketch{})); got > 1<<20 {
		t.Errorf("%d bytes of sketches", got)
	}
}

// A window has what came within it, and forgets it afterwards.
func TestWindowsForget(t *testing.T) {
	c := New(Options{Policy: "lru", Bytes: 100})
	asked := func(now time.Duration) (out [3]uint64) {
		for i, w := range c.Estimate(now) {
			out[i] = w.Asked
		}
		return out
	}
	look := func(now time.Duration) { c.Lookup(&Lookup{Asked: 1, Chunks: []uint64{uint64(now)}, Bytes: 1}, now) }
	f := func(now time.Duration, short, mid, long uint64) {
		t.Helper()
		if got := asked(now); got != [3]uint64{short, mid, long} {
			t.Errorf("at %v: %v, want %d %d %d", now, got, short, mid, long)
		}
	}
	f(0, 0, 0, 0)
	look(time.Minute)
	f(15*time.Minute, 1, 1, 1)
	f(21*time.Minute, 0, 1, 1)
	look(50 * time.Minute)
	f(61*time.Minute, 1, 2, 2)
	f(76*time.Minute, 0, 1, 2)
	f(23*time.Hour, 0, 0, 2)
	look(24 * time.Hour)
	f(24*time.Hour, 1, 1, 3)
	f(29*time.Hour, 0, 0, 1)
	f(60*time.Hour, 0, 0, 0)
	look(61 * time.Hour)
	f(61*time.Hour, 1, 1, 1)
	look(5 * time.Hour) // the clock went back: all begins anew
	f(5*time.Hour, 1, 1, 1)
	f(1000*time.Hour, 0, 0, 0)
}

// A lookup that comes after a later one, as goroutines may, forgets nothing.
func TestWindowsOutOfOrder(t *testing.T) {
	c := New(Options{Policy: "lru", Bytes: 100})
	for _, now := range []time.Duration{time.Minute, time.Minute - 1, 20 * time.Minute, 20*time.Minute - time.Second} {
		c.Lookup(&Lookup{Asked: 1}, now)
	}
	if got := c.Estimate(20*time.Minute - time.Minute)[2].Lookups; got != 4 {
		t.Errorf("%d lookups, want 4", got)
	}
}

// Every minute of two days is in the windows of the next 15 minutes, hour and day.
func TestNothingIsLostBetweenStretches(t *testing.T) {
	c := New(Options{Policy: "lru", Bytes: 100})
	every := 7
	if testkit.Race {
		every = 71
	}
	for minute := range 48 * 60 {
		now := time.Duration(minute) * time.Minute
		c.Lookup(&Lookup{Asked: 1}, now)
		if minute%every != 0 {
			continue
		}
		for i, w := range c.Estimate(now) {
			least, most := []int{15, 60, 24 * 60}[i], []int{20, 75, 28 * 60}[i]
			if got := int(w.Asked); got < min(least, minute+1) || got > most+1 {
				t.Fatalf("minute %d: window %d has %d minutes", minute, i, got)
			}
		}
	}
}

// Chunks that are named when they are stored, and those of an answer, change the ceiling.
func TestStoredChunksCount(t *testing.T) {
	c := New(Options{Policy: "lru", Bytes: 1 << 20})
	prompt := make([]uint64, 100)
	r := rand.New(rand.NewPCG(1, 1))
	for i := range prompt {
		prompt[i] = r.Uint64()
	}
	ceiling := func() float64 { return c.Estimate(0)[2].Ceiling }
	f := func(what string, want float64) {
		t.Helper()
		if got := ceiling(); math.Abs(got-want) > 0.003 {
			t.Errorf("%s: ceiling %.3f, want %.3f", what, got, want)
		}
	}
	c.Lookup(&Lookup{Asked: 80, Chunks: prompt[:1], Bytes: 1}, 0)
	f("a prompt that is not stored", 0)
	c.Stored(prompt, 1, 80, 1, 0) // 79 of its prompt, 20 of its answer
	f("stored", 0)
	c.Lookup(&Lookup{Asked: 100, Pool: 100, Chunks: prompt, Bytes: 1}, 0)
	f("the next turn finds prompt and answer", 100.0/180)
	c.Lookup(&Lookup{Asked: 20, Chunks: prompt[:1], Bytes: 1}, 0)
	f("a prompt whose other chunks are never named", 101.0/200)
}

// What the pool had is a point of the curve, whatever the sample says.
func TestCurveGoesThroughWhatWasMeasured(t *testing.T) {
	c := New(Options{Policy: "leaf-hazard", Bytes: 1000})
	r := rand.New(rand.NewPCG(2, 2))
	names := make([]uint64, 4000)
	for i := range names {
		names[i] = r.Uint64()
	}
	pool := 0
	for i := range 20000 {
		id := names[r.IntN(len(names))]
		hit := 0
		if i%5 == 0 {
			hit = 1
		}
		pool += hit
		c.Lookup(&Lookup{Asked: 1, Pool: hit, Chunks: []uint64{id}, Bytes: 1}, 0)
	}
	w := c.Estimate(0)[2]
	if want := float64(pool) / 20000; math.Abs(w.Curve[poolFactor].Rate-want) > 1e-9 || w.Pool != want {
		t.Errorf("%.4f at the pool's size, %.4f measured", w.Curve[poolFactor].Rate, want)
	}
	for i, p := range w.Curve[1:] {
		if p.Rate < w.Curve[i].Rate-1e-9 || p.Rate > w.Ceiling {
			t.Errorf("not rising to the ceiling: %+v", w)
		}
	}
}

// Rates stay between 0 and 1 for pools of every size, chunks larger than the pool, and every policy.
func TestRatesAreRates(t *testing.T) {
	for _, policy := range append([]string{"unknown"}, evict.Names...) {
		for _, pool := range []int64{1, 10, 1000, 1 << 40} {
			c := New(Options{Policy: policy, Bytes: pool, Tiers: []Tier{{"a", 5}, {"b", 0}}})
			r := rand.New(rand.NewPCG(3, 3))
			for range 400 {
				chunks := make([]uint64, 1+r.IntN(9))
				for i := range chunks {
					chunks[i] = r.Uint64N(300) * 0x9e3779b97f4a7c15
				}
				c.Lookup(&Lookup{Asked: len(chunks), Pool: r.IntN(len(chunks)), Chunks: chunks, Bytes: 3}, 0)
			}
			for _, w := range c.Estimate(0) {
				rates := []float64{w.Pool, w.Hit, w.Ceiling}
				for _, p := range w.Curve {
					rates = append(rates, p.Rate, p.LRU)
				}
				for _, p := range w.Tiers {
					rates = append(rates, p.Rate)
				}
				for _, rate := range rates {
					if !(rate >= 0 && rate <= 1) {
						t.Errorf("%s, a pool of %d: %+v", policy, pool, w)
					}
				}
			}
		}
	}
}

// Sampled caches stay within their bound, and lookups do not wait for a reader that never plays.
func TestSampleIsBounded(t *testing.T) {
	c := New(Options{Policy: "leaf-hazard", Bytes: 1 << 40, Tiers: []Tier{{"disk", 1 << 44}}, Teach: func(*evict.Lessons, bool) {}})
	r := rand.New(rand.NewPCG(4, 4))
	chunks := make([]uint64, 1<<14)
	for range 20 {
		for i := range chunks {
			chunks[i] = r.Uint64()
		}
		c.Lookup(&Lookup{Asked: len(chunks), Chunks: chunks, Bytes: 1 << 20}, 0)
	}
	if len(c.mu.queue) > maxQueued {
		t.Errorf("%d chunks are queued", len(c.mu.queue))
	}
	for range 12 {
		for i := range chunks {
			chunks[i] = r.Uint64()
		}
		c.Lookup(&Lookup{Asked: len(chunks), Chunks: chunks, Bytes: 1 << 20}, 0)
		c.Play()
	}
	sum := func(of []*cache) (n int) {
		for _, cache := range of {
			n += len(cache.slots)
		}
		return n
	}
	if own, lru := sum(c.caches.own), sum(c.caches.lru); own == 0 || own > maxSampled || lru > maxSampled {
		t.Errorf("%d and %d sampled chunks", own, lru)
	}
	if n := len(c.caches.seen[0]) + len(c.caches.seen[1]); n > 2*maxSeen || len(c.caches.waiting.of) > maxEnds {
		t.Errorf("%d names, %d prompts are remembered", n, len(c.caches.waiting.of))
	}
}

// Run plays what lookups of many goroutines sample.
func TestRunPlays(t *testing.T) {
	c := New(Options{Policy: "lru", Bytes: 64})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { c.Run(ctx) })
	for g := range uint64(4) {
		wg.Go(func() {
			for i := range uint64(200) {
				c.Lookup(&Lookup{Asked: 1, Chunks: []uint64{(g<<32 | i) * 0x9e3779b97f4a7c15}, Bytes: 1}, 0)
				if i%10 == 0 || !testkit.Race {
					c.Estimate(0)
				}
			}
		})
	}
	testkit.Eventually(t, "all lookups are played", func() bool {
		c.playing.Lock()
		defer c.playing.Unlock()
		return len(c.caches.seen[0]) > 100
	})
	cancel()
	wg.Wait()
}

// A sample that takes too long is halved, and its caches with it; the curve stays.
func TestThinHalvesTheSample(t *testing.T) {
	c := New(Options{Policy: "leaf-hazard", Bytes: 1000})
	r := rand.New(rand.NewPCG(5, 5))
	names := make([]uint64, 500)
	for i := range names {
		names[i] = r.Uint64()
	}
	look := func() {
		for range 3000 {
			c.Lookup(&Lookup{Asked: 1, Pool: 1, Chunks: []uint64{names[r.IntN(len(names))]}, Bytes: 1}, 0)
		}
		c.Play()
	}
	look()
	rate, before := c.mu.rate, len(c.caches.lru[poolFactor].at)
	c.thin()
	after := len(c.caches.lru[poolFactor].at)
	look()
	if c.mu.rate != 2*rate || after > before*2/3 || after < before/3 || c.caches.lru[poolFactor].capacity != int64(1000/c.mu.rate) {
		t.Errorf("rate %d, %d chunks of %d, capacity %d", c.mu.rate, after, before, c.caches.lru[poolFactor].capacity)
	}
	if got := c.caches.lru[poolFactor].used; got != int64(len(c.caches.lru[poolFactor].at)) {
		t.Errorf("%d bytes used by %d chunks", got, len(c.caches.lru[poolFactor].at))
	}
	if w := c.Estimate(0)[2]; w.Curve[poolFactor].Rate < 0.9 {
		t.Errorf("%+v", w)
	}
}
