// SPDX-License-Identifier: Apache-2.0

package coordinator_test

import (
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/kvasir-kv/kvasir/kv/coordinator"
)

// The layout of the benchmarks: full attention and a window of 1,024 tokens (the
// shape of gpt-oss, Gemma and Mistral), blocks of 16. interop/coordinator runs
// the original on the same layouts, prompts and stores under the same names.
const benchLayout = "full,bs=16 swa,bs=16,win=1024"

var benchSizes = []int{1 << 10, 8 << 10, 128 << 10, 1 << 20}

// benchShapes are stores: for each group, whether the store has block i of n.
var benchShapes = []struct {
	name string
	has  func(group, i, n int) bool
}{
	{"all", func(int, int, int) bool { return true }},
	{"tail", func(g, i, n int) bool { return g == 0 || i >= n-64 }},
	{"half", func(_, i, n int) bool { return i < n/2 }},
	{"holes", func(g, i, n int) bool { return g == 0 || i < n/2 || i%32 != 0 }},
	{"evicted", func(g, _, _ int) bool { return g == 0 }},
	{"none", func(int, int, int) bool { return false }},
}

func fillBench(c *coordinator.Coordinator, n int, has func(group, i, n int) bool) *coordinator.Runs {
	runs := coordinator.NewRuns(c)
	for g := range c.Groups() {
		for i := range n {
			if has(g, i, n) {
				runs.Add(g, i, i+1)
			}
		}
	}
	return runs
}

// BenchmarkFind is one lookup: the length of the hit and its masks.
func BenchmarkFind(b *testing.B) { benchHits(b, false) }

// BenchmarkDecide makes all decisions of one request: the hit, the load masks at its
// length, the store masks and the lookup masks of the prompt.
func BenchmarkDecide(b *testing.B) { benchHits(b, true) }

func benchHits(b *testing.B, masks bool) {
	c := mustNew(b, benchLayout, coordinator.Options{})
	for _, shape := range benchShapes {
		for _, tokens := range benchSizes {
			runs := fillBench(c, tokens/16, shape.has)
			b.Run(fmt.Sprintf("shape=%s/tokens=%d", shape.name, tokens), func(b *testing.B) {
				b.ReportAllocs()
				var d decision
				for b.Loop() {
					d.decide(b, c, runs, tokens, masks)
				}
			})
		}
	}
}

// decision has the buffers that one goroutine uses again.
type decision struct {
	hit   coordinator.Result
	masks []coordinator.Mask
}

func (d *decision) decide(tb testing.TB, c *coordinator.Coordinator, p coordinator.Presence, tokens int, masks bool) {
	units := tokens / 16
	err := c.Hit(&d.hit, p, coordinator.Query{Units: units, MaxTokens: tokens})
	if err == nil && masks {
		d.masks, err = c.LoadMask(d.masks[:0], units, d.hit.Tokens)
		if err == nil {
			d.masks, err = c.StoreMask(d.masks[:0], coordinator.StoreQuery{Tokens: tokens, Prompt: tokens, HasPrompt: true})
		}
		if err == nil {
			d.masks, err = c.LookupMask(d.masks[:0], tokens)
		}
	}
	if err != nil {
		tb.Fatal(err)
	}
}

// BenchmarkSets compares the kinds of set on one prompt. set=map looks up the
// same keys as the original, 32-byte hashes with their group.
func BenchmarkSets(b *testing.B) {
	c := mustNew(b, benchLayout, coordinator.Options{})
	for _, shape := range benchShapes {
		runs := fillBench(c, longUnits, shape.has)
		type key struct {
			group int
			hash  [32]byte
		}
		hashes := make([][32]byte, longUnits)
		held := map[key]struct{}{}
		for i := range hashes {
			binary.BigEndian.PutUint64(hashes[i][24:], uint64(i+1))
			for g := range 2 {
				if shape.has(g, i, longUnits) {
					held[key{g, hashes[i]}] = struct{}{}
				}
			}
		}
		scan := coordinator.Scan(func(g, u int) bool {
			_, ok := held[key{g, hashes[u]}]
			return ok
		})
		store := &fakeStore{has: func(g, u int) bool { return shape.has(g, u, longUnits) }}
		remote := coordinator.NewRemote(c, coordinator.RemoteOptions{PrefixShaped: true})
		for _, set := range []struct {
			name string
			p    coordinator.Presence
		}{{"runs", runs}, {"map", scan}, {"remote", remote}} {
			b.Run(fmt.Sprintf("shape=%s/set=%s", shape.name, set.name), func(b *testing.B) {
				b.ReportAllocs()
				var d decision
				for b.Loop() {
					remote.Reset(store)
					d.decide(b, c, set.p, longPrompt, true)
				}
			})
		}
	}
}

// BenchmarkChunks is a server's decision over four object groups, 256 tokens per
// chunk, windows present at the end only.
func BenchmarkChunks(b *testing.B) {
	for _, tokens := range benchSizes {
		k, err := coordinator.NewChunks(256, []coordinator.ChunkGroup{{Window: -1}, {Window: 1024}, {Window: 4096}, {Recurrent: true}})
		if err != nil {
			b.Fatal(err)
		}
		n := tokens / 256
		runs := fillBench(k.Coordinator(), n, func(g, i, n int) bool { return g == 0 || i >= n-16 })
		b.Run(fmt.Sprintf("tokens=%d", tokens), func(b *testing.B) {
			b.ReportAllocs()
			var r coordinator.Result
			var live []coordinator.Run
			for b.Loop() {
				if _, err := k.Hit(&r, runs, n); err != nil {
					b.Fatal(err)
				}
				live = k.Reusable(live[:0], 1, runs, 1, n)
			}
		})
	}
}

// Nothing is allocated once the caller's slices have grown, whatever the set,
// the layout and the shape.
func TestNoAllocations(t *testing.T) {
	layouts := []string{
		benchLayout, benchLayout + " ret=1024 eagle",
		"full,bs=64 swa,bs=16,win=100 swa,bs=32,win=300 mamba,bs=64 hash=16 eagle",
		"full,bs=64 mamba,bs=64 hash=16 partial",
		"full,bs=16 chunk,bs=16,chunk=8192",
	}
	for _, layout := range layouts {
		c := mustNew(t, layout, coordinator.Options{})
		for _, shape := range benchShapes {
			runs := fillBench(c, 512, shape.has)
			remote := coordinator.NewRemote(c, coordinator.RemoteOptions{})
			store := &fakeStore{has: func(g, u int) bool { return shape.has(g, u, 512) }}
			for i, p := range []coordinator.Presence{runs, remote} {
				var d decision
				run := func() {
					remote.Reset(store)
					d.decide(t, c, p, 8<<10, true)
				}
				run()
				if n := testing.AllocsPerRun(20, run); n != 0 {
					t.Errorf("%s, shape %s, set %d: %v allocations", layout, shape.name, i, n)
				}
			}
		}
	}
}
