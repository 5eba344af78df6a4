// SPDX-License-Identifier: Apache-2.0

package sweep_test

import (
	"bytes"
	"context"
	"encoding/csv"
	"encoding/xml"
	"errors"
	"io"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/bench"
	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/sim/costmodel"
	"github.com/kvasir-kv/kvasir/sim/sweep"
)

func options(t *testing.T) sweep.Options {
	t.Helper()
	p, err := costmodel.Get(costmodel.A10Qwen)
	if err != nil {
		t.Fatal(err)
	}
	return sweep.Options{Profile: p, Requests: workload.Each(workload.Chats(40, workload.ChatOptions{Seed: 1})), SLOs: []bench.SLO{{Metric: "ttft", Millis: 3000}}}
}

// Every combination is run, in order, and each quantity has its effect.
func TestSweep(t *testing.T) {
	o := options(t)
	o.Engines = []sweep.Engines{{1, 1}, {3, 1}}
	o.Cache = []int{0, 100000}
	o.Link = []float64{0.2, 10}
	o.Rate = []float64{0.5, 4}
	got, err := sweep.Run(t.Context(), o)
	if err != nil || len(got) != 16 {
		t.Fatalf("%d points, %v", len(got), err)
	}
	find := func(prefill, cache int, link, rate float64) sweep.Point {
		t.Helper()
		for _, p := range got {
			if p.Prefill == prefill && p.Cache == cache && p.Link == link && p.Rate == rate {
				return p
			}
		}
		t.Fatal("a combination is missing")
		return sweep.Point{}
	}
	base := find(1, 0, 10, 4)
	if more := find(3, 0, 10, 4); more.Figures.MeanTTFT >= base.Figures.MeanTTFT || more.Goodput <= base.Goodput {
		t.Errorf("three P: TTFT %v, goodput %v; one: %v, %v", more.Figures.MeanTTFT, more.Goodput, base.Figures.MeanTTFT, base.Goodput)
	}
	if slow := find(1, 0, 0.2, 0.5); slow.Figures.MeanTTFT <= find(1, 0, 10, 0.5).Figures.MeanTTFT {
		t.Errorf("a slow network does not cost: %v", slow.Figures.MeanTTFT)
	}
	if with := find(3, 100000, 10, 4); with.Cached <= find(3, 0, 10, 4).Cached {
		t.Errorf("with a store for three P %v of the prompts are cached", with.Cached)
	}
	if base.Goodput > base.Figures.RequestThroughput || base.GoodPerGPU != base.Goodput/2 {
		t.Errorf("%+v", base)
	}
}

func TestOutputs(t *testing.T) {
	o := options(t)
	o.Engines = []sweep.Engines{{0, 2}, {1, 1}}
	o.Rate = []float64{1, 2, 4}
	got, err := sweep.Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	var table, text, plot bytes.Buffer
	if err := errors.Join(sweep.Print(&table, got), sweep.WriteCSV(&text, got), sweep.WriteSVG(&plot, got)); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(table.String(), "\n"); n != 7 || !strings.Contains(table.String(), "2 regular") {
		t.Errorf("%d lines:\n%s", n, table.String())
	}
	rows, err := csv.NewReader(&text).ReadAll()
	if err != nil || len(rows) != 7 || rows[0][0] != "prefill" || rows[4][0] != "1" {
		t.Errorf("%v, %v", rows, err)
	}
	lines := strings.Count(plot.String(), `<g class="s`)
	for dec := xml.NewDecoder(&plot); ; {
		if _, err := dec.Token(); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if lines != 2*3 {
		t.Errorf("%d lines are drawn, for two deployments in three panels", lines)
	}
	if err := sweep.WriteSVG(io.Discard, nil); err != nil {
		t.Error(err)
	}
}

func TestRefused(t *testing.T) {
	f := func(want string, change func(*sweep.Options)) {
		t.Helper()
		o := options(t)
		change(&o)
		if _, err := sweep.Run(t.Context(), o); !errors.Is(err, sweep.ErrOptions) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	f("a profile", func(o *sweep.Options) { o.Profile = nil })
	f("requests are needed", func(o *sweep.Options) { o.Requests = nil })
	f("requests are needed", func(o *sweep.Options) { o.Requests = workload.Each(nil) })
	f("-1 requests", func(o *sweep.Options) { o.Rate = []float64{-1} })
	f("would arrive after", func(o *sweep.Options) { o.Rate = []float64{1e-300} })
	f("1e-300 GB/s", func(o *sweep.Options) { o.Link = []float64{1e-300} })
	f("0 GB/s", func(o *sweep.Options) { o.Link = []float64{0} })
	f("step of 0", func(o *sweep.Options) { o.Budget = []int{0} })
	f("at most", func(o *sweep.Options) { o.Rate, o.Cache = make([]float64, 1000), make([]int, 1000) })
}

// An interrupted sweep keeps the points that it has.
func TestInterrupted(t *testing.T) {
	o := options(t)
	o.Rate = []float64{1, 2, 3, 4}
	ctx, cancel := context.WithCancel(t.Context())
	o.Progress = func(done, _ int) {
		if done == 2 {
			cancel()
		}
	}
	got, err := sweep.Run(ctx, o)
	if !errors.Is(err, context.Canceled) || len(got) != 2 {
		t.Errorf("%d points, %v", len(got), err)
	}
}

// A sweep takes memory that does not grow with its requests: here 6,000 for each of two runs, whose names of blocks and records would take
// 8 MB. An error of the requests is the sweep's, also in a later pass.
func TestSweepTakesBoundedMemory(t *testing.T) {
	const n, length = 6000, 50
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	broken := errors.New("line 7 is bad")
	before, most, read, last := int64(0), int64(0), 0, 1<<30
	o := options(t)
	o.Profile.BlockTokens = 16
	o.Rate = []float64{0, 1}
	o.Requests = func(yield func(workload.Request, error) bool) {
		for i := range n {
			q := workload.Request{Arrival: time.Duration(i) * time.Second, Input: 16 * length, Output: 2, BlockTokens: 16}
			for k := range int64(length) {
				q.Blocks = append(q.Blocks, int64(i%40)<<32|k)
			}
			switch read++; {
			case read == last:
				yield(q, broken)
				return
			case read == n+n/10:
				before = heap()
			case read > n+n/10 && read%1000 == 0:
				most = max(most, heap()-before)
			}
			if !yield(q, nil) {
				return
			}
		}
	}
	got, err := sweep.Run(t.Context(), o)
	if err != nil || len(got) != 2 || read != 3*n || got[1].Figures.Completed != n {
		t.Fatalf("%d requests were read: %+v, %v", read, got, err)
	}
	if most > 1<<20 {
		t.Errorf("%d bytes of heap more than at the tenth part of the first run, 1 MiB is allowed", most)
	}
	for want, at := range []int{5, n + 500, 2*n + 500} {
		read, last = 0, at
		if got, err = sweep.Run(t.Context(), o); !errors.Is(err, broken) || errors.Is(err, sweep.ErrOptions) || len(got) != max(0, want-1) {
			t.Errorf("an error in pass %d: %d points, %v", want+1, len(got), err)
		}
	}
}
