// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/bench/workload"
)

// numbered returns the result of numberPrompts for requests in memory.
func numbered(t testing.TB, requests []workload.Request) *prompts {
	t.Helper()
	p, err := numberPrompts(t.Context(), workload.Each(requests), maxHeldWords, maxDifferent)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.close)
	return p
}

// meter is a context that measures the heap in each 64th call of Err.
type meter struct {
	context.Context
	asked int
	most  uint64
}

func (m *meter) Err() error {
	if m.asked++; m.asked%64 == 0 {
		runtime.GC()
		var now runtime.MemStats
		runtime.ReadMemStats(&now)
		m.most = max(m.most, now.HeapAlloc)
	}
	return m.Context.Err()
}

// repeating returns requests whose prompts repeat, and makes each one when it is read.
func repeating(requests, prompts, length int) iter.Seq2[workload.Request, error] {
	return func(yield func(workload.Request, error) bool) {
		r := rand.New(rand.NewPCG(1, 2))
		for range requests {
			q := workload.Request{Input: 16 * length, BlockTokens: 16}
			which := int64(r.IntN(prompts))
			for k := range length {
				q.Blocks = append(q.Blocks, which<<32|int64(k))
			}
			if !yield(q, nil) {
				return
			}
		}
	}
}

// Policies and the optimum play a trace in memory that does not grow with its length: here 3 million blocks of prompts, which
// would take 24 MB, at a cache that has room for all and at a small one. No file is left.
func TestComparingTakesBoundedMemory(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	const requests, distinct, length = 60_000, 60, 50
	runtime.GC()
	var before runtime.MemStats
	runtime.ReadMemStats(&before)
	m := &meter{Context: t.Context()}
	r, err := CompareStream(m, repeating(requests, distinct, length), PolicyOptions{Capacities: []int{500, 5000}, Policies: []string{"lru"}, held: 4 * pageWords})
	if err != nil || r.Blocks != requests*length || r.Best != requests*length-distinct*length || r.Rows[3].HitBlocks != r.Best || r.Rows[2].HitBlocks != r.Best {
		t.Fatalf("%+v, %v", r, err)
	}
	if r.Rows[1].HitBlocks <= r.Rows[0].HitBlocks {
		t.Errorf("the optimum has %d hits, lru %d", r.Rows[1].HitBlocks, r.Rows[0].HitBlocks)
	}
	if used := int64(m.most) - int64(before.HeapAlloc); m.asked < 500 || used > 8<<20 {
		t.Errorf("looked %d times: %d bytes of heap, 8 MiB are allowed", m.asked, used)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("files are left: %v, %v", left, err)
	}
}

// A tape returns the values that were put into it, from memory and from a file. The next uses are those that a plain search finds.
func TestTapeAndNextUses(t *testing.T) {
	for _, held := range []int{1, 3 * pageWords, maxHeldWords} {
		r := rand.New(rand.NewPCG(7, uint64(held)))
		var requests []workload.Request
		var want [][]uint32
		number := map[string]uint32{}
		for range 40_000 {
			q, path, line := workload.Request{BlockTokens: 10, Input: r.IntN(10)}, "", []uint32{}
			for range r.IntN(12) {
				name := int64(r.IntN(3))
				q.Blocks, q.Input = append(q.Blocks, name), q.Input+10
				if path += fmt.Sprint(name); number[path] == 0 {
					number[path] = uint32(len(number) + 1)
				}
				line = append(line, number[path])
			}
			requests, want = append(requests, q), append(want, line)
		}
		t.Setenv("TMPDIR", t.TempDir())
		p, err := numberPrompts(t.Context(), workload.Each(requests), held, maxDifferent)
		if err != nil || p.requests != len(want) || p.blocks != len(number) {
			t.Fatal(p, err)
		}
		next, err := p.nextUses(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		uses, later := make([][]uint32, len(want)), map[uint32]uint32{}
		for i := len(want) - 1; i >= 0; i-- {
			uses[i] = []uint32{}
			for _, b := range want[i] {
				if later[b] == 0 {
					later[b] = never
				}
				uses[i] = append(uses[i], later[b])
				later[b] = uint32(i + 1)
			}
		}
		n := 0
		if err := p.play(t.Context(), next, func(i int, blocks, also []uint32) bool {
			if n++; !slices.Equal(blocks, want[i]) || !slices.Equal(also, uses[i]) {
				t.Errorf("held %d, request %d: blocks %v, want %v; uses %v, want %v", held, i, blocks, want[i], also, uses[i])
			}
			return !t.Failed()
		}); err != nil || n != len(want) {
			t.Errorf("held %d: %d requests of %d, %v", held, n, len(want), err)
		}
		if inFile := p.tape.file != nil; inFile != (held < maxHeldWords) {
			t.Errorf("held %d: there is a file: %v", held, inFile)
		}
		p.close()
		next.close()
	}
}

// Too many different blocks, an unusable folder for files, and an end of the context while the trace is read give clear errors.
func TestLongTracesThatCannotBePlayed(t *testing.T) {
	f := func(want string, o PolicyOptions, requests iter.Seq2[workload.Request, error]) {
		t.Helper()
		o.Capacities = []int{10}
		if r, err := CompareStream(t.Context(), requests, o); err == nil || r != nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v, %v, want %q", r, err, want)
		}
	}
	f("more than 99 different blocks: play fewer requests", PolicyOptions{different: 99}, repeating(50, 50, 10))
	broken := errors.New("line 7 is bad")
	f("line 7 is bad", PolicyOptions{}, func(yield func(workload.Request, error) bool) { yield(workload.Request{}, broken) })
	t.Setenv("TMPDIR", filepath.Join(t.TempDir(), "absent"))
	f("needs a temporary file", PolicyOptions{held: 1}, repeating(4000, 5, 50))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := CompareStream(ctx, repeating(10, 1, 1), PolicyOptions{Capacities: []int{1}}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
