// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"bufio"
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/store/evict"
	"github.com/kvasir-kv/kvasir/store/hitcurve"
)

func conversationTrace(t testing.TB) []workload.Request {
	t.Helper()
	return publicTrace(t, "../../../shared/traces/conversation_trace.jsonl")
}

func publicTrace(t testing.TB, file string) []workload.Request {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Skip("the public trace is not there")
	}
	defer f.Close()
	requests, err := workload.ReadTrace(bufio.NewReaderSize(f, 1<<20), workload.TraceOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return requests
}

// prompts512 makes requests of blocks of 512 tokens.
func prompts512(of [][]int64) (out []workload.Request) {
	for _, blocks := range of {
		out = append(out, workload.Request{Input: 512 * len(blocks), Blocks: blocks, BlockTokens: 512})
	}
	return out
}

// agents are coding sessions: 24 at a time, of 4 to 120 steps, each step with all before it and a few new blocks. One in three
// begins with one of four long system prompts, and some steps are those of a sub-agent with a prompt of its own.
func agents(seed uint64, requests int) (out [][]int64) {
	r := rand.New(rand.NewPCG(seed, 1))
	next := int64(1000)
	fresh := func(prompt []int64, n int) []int64 {
		for range n {
			prompt = append(prompt, next)
			next++
		}
		return prompt
	}
	type session struct {
		prompt []int64
		left   int
	}
	begin := func() *session {
		var prompt []int64
		kind := int64(r.IntN(12))
		for i := range int64(4 + 4*(kind%4)) {
			prompt = append(prompt, 100*(kind%4)+i)
		}
		return &session{fresh(prompt, 1+r.IntN(6)), 4 + r.IntN(117)}
	}
	var live []*session
	for len(live) < 24 {
		live = append(live, begin())
	}
	for len(out) < requests {
		i := int(float64(len(live)) * math.Pow(r.Float64(), 1.7)) // some are often paused
		s := live[i]
		if r.IntN(8) == 0 {
			out = append(out, fresh(append([]int64{}, s.prompt[:min(4, len(s.prompt))]...), 3+r.IntN(10)))
			continue
		}
		s.prompt = fresh(s.prompt, r.IntN(4))
		out = append(out, append([]int64{}, s.prompt...))
		if s.left--; s.left == 0 || len(s.prompt) > 140 {
			live[i] = begin()
		}
	}
	return out
}

// documents are prompts with questions about documents. Some documents are asked about often.
func documents(seed uint64, requests int) (out [][]int64) {
	r := rand.New(rand.NewPCG(seed, 2))
	z := rand.NewZipf(r, 1.1, 4, 8000)
	next := int64(1 << 30)
	for range requests {
		d := int64(z.Uint64())
		prompt := []int64{1, 2, 3}
		for i := range 4 + d*7919%40 {
			prompt = append(prompt, 1000+d*64+i)
		}
		for range 1 + r.IntN(2) {
			prompt = append(prompt, next)
			next++
		}
		out = append(out, prompt)
	}
	return out
}

// quarterHits are the hits of a policy at the end of each quarter of a trace.
func quarterHits(t *testing.T, p *prompts, policy string, capacity int) (hits [4]int64) {
	t.Helper()
	e, err := evict.New(policy, int64(capacity))
	if err != nil {
		t.Fatal(err)
	}
	c, n, q := newPlayer(e, capacity, p.blocks), int64(0), 0
	err = p.play(t.Context(), nil, func(i int, blocks, _ []uint32) bool {
		n += int64(c.find(blocks))
		if c.store(blocks); i+1 == p.requests*(q+1)/4 {
			hits[q] = n
			q++
		}
		return true
	})
	if err != nil {
		t.Fatal(err)
	}
	return hits
}

// checkCurve compares the estimate at the end of each quarter of a trace with the hits of real caches of those sizes.
func checkCurve(t *testing.T, name string, requests []workload.Request, policy string, capacity int) {
	t.Helper()
	p := numbered(t, requests)
	var own, lru [len(hitcurve.Factors)][4]int64
	for i, f := range hitcurve.Factors {
		own[i] = quarterHits(t, p, policy, int(f*float64(capacity)))
		if lru[i] = own[i]; policy != "lru" {
			lru[i] = quarterHits(t, p, "lru", int(f*float64(capacity)))
		}
	}
	all := quarterHits(t, p, "lru", p.blocks+1)
	worst, worstLRU, worstCeiling, blocks, q := 0.0, 0.0, 0.0, 0, 0
	off := func(rate float64, hits int64) float64 { return 100 * math.Abs(rate-float64(hits)/float64(blocks)) }
	_, err := EstimateCurve(t.Context(), requests, CurveOptions{Policy: policy, Capacity: capacity}, func(i int, c *hitcurve.Curves) {
		if blocks += requests[i].Input / requests[i].BlockTokens; i+1 != len(requests)*(q+1)/4 {
			return
		}
		windows := c.Estimate(0)
		w := &windows[len(windows)-1]
		worstCeiling = max(worstCeiling, off(w.Ceiling, all[q]))
		for k, point := range w.Curve {
			worst, worstLRU = max(worst, off(point.Rate, own[k][q])), max(worstLRU, off(point.LRU, lru[k][q]))
		}
		q++
	})
	if err != nil || q != 4 {
		t.Fatalf("%d quarters, %v", q, err)
	}
	t.Logf("%s, %s, %d blocks: off by at most: ceiling %.2f, curve %.2f, lru %.2f points", name, policy, capacity, worstCeiling, worst, worstLRU)
	if worstCeiling > 1 || worst > 3 || worstLRU > 3 {
		t.Errorf("%s, %s, %d blocks: off by %.2f (ceiling), %.2f (curve), %.2f (lru) points; 1, 3 and 3 are allowed", name, policy, capacity, worstCeiling, worst, worstLRU)
	}
}

// At each quarter of a trace the ceiling is within one point, and the curves are within three points, of the hits of real caches.
func TestCurveIsThatOfRealCaches(t *testing.T) {
	checkCurve(t, "agents", prompts512(agents(1, 6000)), "leaf-hazard", 1500)
	checkCurve(t, "documents", prompts512(documents(1, 6000)), "leaf-hazard", 1500)
	checkCurve(t, "documents", prompts512(documents(1, 6000)), "lru", 500)
	checkCurve(t, "documents", prompts512(documents(1, 6000)), "arc", 1000)
}

// The same on the public trace.
func TestCurveOfConversationTrace(t *testing.T) {
	requests := conversationTrace(t)
	checkCurve(t, "conversation", requests, "leaf-hazard", 4000)
}

// With a tier below, the hits are those of a pool as large as both. With an unlimited tier they reach the ceiling.
func TestCurveOfTiers(t *testing.T) {
	requests := prompts512(documents(2, 3000))
	p := numbered(t, requests)
	w, err := EstimateCurve(t.Context(), requests, CurveOptions{Policy: "lru", Capacity: 500, Bytes: 100, Tiers: []hitcurve.Tier{
		{Name: "disk", Bytes: 5500 * 100}, {Name: "s3"}, {Name: "behind", Bytes: 1},
	}}, nil)
	if err != nil || len(w.Tiers) != 3 {
		t.Fatalf("%+v, %v", w, err)
	}
	hits, err := playPolicy(t.Context(), p, "lru", 6000)
	if want := float64(hits) / float64(p.all); err != nil || math.Abs(w.Tiers[0].Rate-want) > 0.03 || w.Tiers[0].Bytes != 550000 {
		t.Errorf("disk: %+v, want %.3f, %v", w.Tiers[0], want, err)
	}
	if w.Tiers[1].Rate != w.Ceiling || w.Tiers[2].Rate != w.Ceiling || w.Curve[1].Bytes != 50000 {
		t.Errorf("without end: %+v of %+v", w.Tiers, w)
	}
}

func TestCurveRefuses(t *testing.T) {
	requests := prompts512(documents(3, 10))
	f := func(o CurveOptions) {
		t.Helper()
		if _, err := EstimateCurve(t.Context(), requests, o, nil); !errors.Is(err, ErrOptions) {
			t.Errorf("%+v: %v", o, err)
		}
	}
	f(CurveOptions{})
	f(CurveOptions{Capacity: -1})
	f(CurveOptions{Capacity: MaxCapacity + 1})
	f(CurveOptions{Capacity: 10, Policy: "x"})
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := EstimateCurve(ended, requests, CurveOptions{Capacity: 10}, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("an ended context: %v", err)
	}
}

// cpuTime is the processor time of this thread: other work of the machine is not in it.
func cpuTime() time.Duration {
	const thisThread = 1 // RUSAGE_THREAD
	var u syscall.Rusage
	_ = syscall.Getrusage(thisThread, &u) // fails for wrong arguments only
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkCurves reports the processor time per chunk in a lookup, and in Play in the background.
func BenchmarkCurves(b *testing.B) {
	p := numbered(b, prompts512(agents(1, 6000)))
	names := make([][]uint64, p.requests)
	err := p.play(b.Context(), nil, func(i int, blocks, _ []uint32) bool {
		for _, x := range blocks {
			names[i] = append(names[i], nameOf(x))
		}
		return true
	})
	if err != nil {
		b.Fatal(err)
	}
	var lookups, plays time.Duration
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	b.ReportAllocs()
	for b.Loop() {
		c := hitcurve.New(hitcurve.Options{Policy: "leaf-hazard", Bytes: 10000})
		c.Estimate(0) // allocates the window
		for i := 0; i < len(names); i += 256 {
			began := cpuTime()
			for _, prompt := range names[i:min(i+256, len(names))] {
				c.Lookup(&hitcurve.Lookup{Asked: len(prompt), Chunks: prompt, Bytes: 1}, 0)
			}
			between := cpuTime()
			c.Play()
			lookups, plays = lookups+between-began, plays+cpuTime()-between
		}
	}
	all := float64(b.N) * float64(p.all)
	b.ReportMetric(float64(lookups)/all, "ns/chunk-looked-up")
	b.ReportMetric(float64(plays)/all, "ns/chunk-in-background")
}
