// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"bytes"
	"context"
	"encoding/csv"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"iter"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/sim/costmodel"
	"github.com/kvasir-kv/kvasir/sim/fleet"
	"github.com/kvasir-kv/kvasir/sim/replay"
)

func profile(t *testing.T, block int) *costmodel.Profile {
	t.Helper()
	p, err := costmodel.Get(costmodel.H100Llama)
	if err != nil {
		t.Fatal(err)
	}
	p.BlockTokens = block
	return p
}

// chatList returns the requests of n conversations per node, at a rate per second and node.
func chatList(n, nodes int, rate float64) ([]workload.Request, error) {
	list := workload.Chats(n*nodes, workload.ChatOptions{Seed: 1, Open: 12 * nodes})
	return list, workload.Arrive(list, rate*float64(nodes), 1, 1)
}

// chats returns made as a function of the number of nodes, as fleet.Options takes it.
func chats(n int, rate float64) func(int) iter.Seq2[workload.Request, error] {
	return func(nodes int) iter.Seq2[workload.Request, error] {
		list, err := chatList(n, nodes, rate)
		if err != nil {
			return func(yield func(workload.Request, error) bool) { yield(workload.Request{}, err) }
		}
		return workload.Each(list)
	}
}

// atRate returns the requests of a list with arrivals at a rate.
func atRate(t *testing.T, list []workload.Request, rate float64) iter.Seq2[workload.Request, error] {
	t.Helper()
	span, err := fleet.SpanOf(t.Context(), workload.Each(list))
	if err != nil || span.Requests != len(list) {
		t.Fatal(span, err)
	}
	return fleet.AtRate(workload.Each(list), span, rate)
}

func run(t *testing.T, o fleet.Options) []fleet.Point {
	t.Helper()
	got, err := fleet.Run(t.Context(), o)
	if err != nil || len(got) != len(o.Nodes) {
		t.Fatalf("%d points, %v", len(got), err)
	}
	return got
}

// When requests are far apart and the store has room for all blocks, the fleet hits as much as one cache with room
// for all, whatever the number of nodes and their RAM.
func TestFleetIsOneCache(t *testing.T) {
	list, _ := chatList(300, 1, 1)
	for i := range list {
		list[i].Arrival = time.Duration(i) * time.Minute
	}
	hits, blocks := 0, 0
	c := replay.NewCache[int64](0)
	for i := range list {
		q := &list[i]
		full, n := q.Input/q.BlockTokens, 0
		for n < (q.Input-1)/q.BlockTokens && c.Has(q.Blocks[n]) {
			n++
		}
		hits, blocks = hits+n, blocks+full
		c.PutRun(full, func(k int) int64 { return q.Blocks[k] })
	}
	for _, pool := range []int{20, 200, 1 << 20} {
		for _, route := range []fleet.Route{fleet.Even, fleet.Sticky} {
			o := fleet.Options{Profile: profile(t, 512), Nodes: []int{1, 3, 16}, Pool: pool, Route: route}
			o.Store.Latency = time.Millisecond
			o.Requests = func(int) iter.Seq2[workload.Request, error] { return workload.Each(list) }
			for _, p := range run(t, o) {
				if got := p.RAMBlocks + p.StoreBlocks; got != hits || p.Blocks != blocks || p.LateBlocks != 0 || p.Doubled != 0 || p.Skipped != 0 || p.Hit != p.Ceiling {
					t.Errorf("%d nodes of %d blocks, %s: %d hits of %d, one cache has %d of %d: %+v", p.Nodes, pool, route, got, p.Blocks, hits, blocks, p)
				}
				if p.Gets < p.StoreBlocks || p.Alone > p.Hit || p.Alone*float64(p.Blocks) < float64(p.RAMBlocks)-0.5 && p.Nodes == 1 {
					t.Errorf("%+v", p)
				}
			}
		}
	}
}

// When the fleet needs more than the store's bandwidth, the bandwidth is the bottleneck: the traffic is at most
// the bandwidth, and the store has fewer hits.
func TestBandwidthBinds(t *testing.T) {
	o := fleet.Options{Profile: profile(t, 512), Nodes: []int{1, 64}, Pool: 100, Requests: chats(60, 1)}
	free := run(t, o)
	if free[1].Binds != "" || free[1].LateBlocks > 0 {
		t.Fatalf("without a limit: %+v", free[1])
	}
	o.Store.ReadGBps = free[1].ReadGBps / 4
	slow := run(t, o)
	if slow[0].Binds != "" || slow[1].Binds != "reads" || slow[1].ReadGBps > o.Store.ReadGBps*1.0001 || slow[1].Hit >= free[1].Hit || slow[1].LateBlocks == 0 || slow[1].Hit < slow[1].Alone/2 {
		t.Errorf("with a quarter of %v GB/s: %+v", free[1].ReadGBps, slow)
	}
	if slow[1].RAMBlocks == 0 || slow[1].MeanTTFT <= free[1].MeanTTFT {
		t.Errorf("%+v", slow[1])
	}
	o.Store.ReadGBps, o.Store.WriteGBps = 0, free[1].WriteGBps/4
	if p := run(t, o)[1]; p.Binds != "writes" || p.WriteGBps > o.Store.WriteGBps*1.0001 || p.Hit >= free[1].Hit {
		t.Errorf("writes: %+v", p)
	}
	o.Store.WriteGBps, o.NodeGBps = 0, free[1].ReadGBps/64/4 // of each node: then the nodes' networks bind, not the store's
	if p := run(t, o)[1]; p.Binds != "" || p.Hit >= free[1].Hit {
		t.Errorf("networks of nodes: %+v", p)
	}
}

// Conversations that stay on their node hit its RAM, and read less.
func TestSticky(t *testing.T) {
	o := fleet.Options{Profile: profile(t, 512), Nodes: []int{8}, Pool: 1000, Requests: chats(200, 1)}
	even := run(t, o)[0]
	o.Route = fleet.Sticky
	sticky := run(t, o)[0]
	if sticky.RAMBlocks <= even.RAMBlocks || sticky.Gets >= even.Gets {
		t.Errorf("even %+v, sticky %+v", even, sticky)
	}
}

// A small store evicts blocks. A block that is evicted after its lookup is not read.
func TestSmallStore(t *testing.T) {
	o := fleet.Options{Profile: profile(t, 512), Nodes: []int{4}, Pool: 30, Requests: chats(200, 2)}
	all := run(t, o)[0]
	o.Store.Blocks = 200
	if few := run(t, o)[0]; few.Hit >= all.Hit || few.Puts <= all.Puts || few.StoreBlocks == 0 {
		t.Errorf("%+v, with room for all %+v", few, all)
	}
}

// One run is like another.
func TestSame(t *testing.T) {
	o := fleet.Options{Profile: profile(t, 512), Nodes: []int{1, 5, 32}, Pool: 100, Route: fleet.Sticky, Requests: chats(50, 2)}
	o.Store = fleet.Store{ReadGBps: 1, WriteGBps: 1, Latency: time.Millisecond}
	a, b := run(t, o), run(t, o)
	for i := range a {
		if a[i] != b[i] {
			t.Errorf("%+v, then %+v", a[i], b[i])
		}
	}
}

func TestOutputs(t *testing.T) {
	o := fleet.Options{Profile: profile(t, 512), Nodes: []int{1, 2, 32}, Pool: 100, Requests: chats(20, 1)}
	o.Store.ReadGBps = 0.5
	done := 0
	o.Progress = func(n, total int) { done = n*10 + total }
	points := run(t, o)
	var table, text, plot bytes.Buffer
	if err := errors.Join(fleet.Print(&table, points), fleet.WriteCSV(&text, points), fleet.WriteSVG(&plot, points)); err != nil {
		t.Fatal(err)
	}
	if done != 33 || strings.Count(table.String(), "\n") != 5 || !strings.Contains(table.String(), "binds from 32 nodes on (reads)") {
		t.Errorf("%d: %s", done, table.String())
	}
	rows, err := csv.NewReader(&text).ReadAll()
	if err != nil || len(rows) != 4 || rows[3][0] != "32" || rows[3][len(rows[3])-1] != "reads" {
		t.Errorf("%v, %v", rows, err)
	}
	var fields map[string]any
	b, _ := json.Marshal(points[2])
	if err := json.Unmarshal(b, &fields); err != nil || len(fields) != len(rows[0]) {
		t.Errorf("%d columns, %d fields: %v", len(rows[0]), len(fields), err)
	}
	for _, name := range rows[0] {
		if _, ok := fields[name]; !ok {
			t.Errorf("column %s is no field", name)
		}
	}
	for dec := xml.NewDecoder(bytes.NewReader(plot.Bytes())); ; {
		if _, err := dec.Token(); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if n := strings.Count(plot.String(), `<g class="s`); n != 6 {
		t.Errorf("%d curves", n)
	}
	table.Reset()
	if err := fleet.Print(&table, points[:1]); err != nil || !strings.Contains(table.String(), "does not bind") {
		t.Error(table.String(), err)
	}
}

func TestRefused(t *testing.T) {
	_, err := fleet.Run(t.Context(), fleet.Options{Nodes: []int{2, 1, 0}, Route: "home", NodeGBps: -1})
	if !errors.Is(err, fleet.ErrOptions) {
		t.Fatal(err)
	}
	for _, want := range []string{"Profile", "Requests", "Nodes 0", "do not ascend", "Pool", "NodeGBps", "Route"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%s is not in %v", want, err)
		}
	}
	o := fleet.Options{Profile: profile(t, 16), Nodes: []int{1}, Pool: 1, Requests: chats(5, 1)}
	if _, err := fleet.Run(t.Context(), o); !errors.Is(err, fleet.ErrOptions) {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	o.Profile = profile(t, 512)
	if got, err := fleet.Run(ctx, o); !errors.Is(err, context.Canceled) || len(got) > 0 {
		t.Errorf("%v, %v", got, err)
	}
}

func TestAtRate(t *testing.T) {
	f := func(list []workload.Request, want ...time.Duration) {
		t.Helper()
		n := 0
		for q, err := range atRate(t, list, 2) {
			if err != nil || n >= len(want) || q.Arrival != want[n] {
				t.Errorf("request %d comes at %v, %v, want %v", n, q.Arrival, err, want)
			}
			n++
		}
		if n != len(want) {
			t.Errorf("%d requests of %d", n, len(want))
		}
	}
	f([]workload.Request{{Arrival: 0}, {Arrival: time.Second}, {Arrival: 4 * time.Second}, {Arrival: 8 * time.Second}}, 0, time.Second/4, time.Second, 2*time.Second)
	f([]workload.Request{{Arrival: time.Hour}, {Arrival: time.Hour + time.Second}, {Arrival: time.Hour + 2*time.Second}}, 0, 3*time.Second/4, 3*time.Second/2)
	f(make([]workload.Request, 4), 0, time.Second/2, time.Second, 3*time.Second/2)
	f(nil)
}

// A fleet plays a trace in memory that does not grow with its length: here 60,000 requests, made three times while they are asked for,
// whose names of blocks would take 24 MB. An error of the trace is the run's.
func TestFleetTakesBoundedMemory(t *testing.T) {
	const requests, length = 60_000, 50
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before, most, read := heap(), int64(0), 0
	broken := errors.New("line 7 is bad")
	var end error
	o := fleet.Options{Profile: profile(t, 16), Nodes: []int{4}, Pool: 500, Requests: func(int) iter.Seq2[workload.Request, error] {
		return func(yield func(workload.Request, error) bool) {
			for i := range requests {
				q := workload.Request{Arrival: time.Duration(i) * 50 * time.Millisecond, Input: 16 * length, BlockTokens: 16}
				for k := range int64(length) {
					q.Blocks = append(q.Blocks, int64(i%40)<<32|k)
				}
				if read++; read%10_000 == 0 {
					most = max(most, heap()-before)
				}
				if !yield(q, nil) {
					return
				}
			}
			if end != nil {
				yield(workload.Request{}, end)
			}
		}
	}}
	if p := run(t, o)[0]; p.Requests != requests || read != 3*requests || p.Hit > p.Ceiling {
		t.Errorf("%d requests were read: %+v", read, p)
	}
	if most > 6<<20 {
		t.Errorf("%d bytes of heap, 6 MiB are allowed", most)
	}
	end = broken
	if got, err := fleet.Run(t.Context(), o); !errors.Is(err, broken) || len(got) > 0 {
		t.Errorf("%v, %v", got, err)
	}
}

// A production trace, if the file is there: each fleet hits as much as one cache, until
// the store's bandwidth is the bottleneck.
func TestProductionTrace(t *testing.T) {
	f, err := os.Open("../../../shared/traces/conversation_trace.jsonl")
	if err != nil {
		t.Skip("no production trace beside the repository")
	}
	defer f.Close()
	list, err := workload.ReadTrace(f, workload.TraceOptions{Max: 3000})
	if err != nil {
		t.Fatal(err)
	}
	o := fleet.Options{Profile: profile(t, 512), Nodes: []int{1, 8, 64}, Pool: 1600}
	o.Store = fleet.Store{ReadGBps: 20, WriteGBps: 20, Latency: time.Millisecond}
	o.Requests = func(nodes int) iter.Seq2[workload.Request, error] { return atRate(t, list, 0.5*float64(nodes)) }
	got := run(t, o)
	for _, p := range got[:2] {
		if p.Binds != "" || p.Hit < 0.97*p.Ceiling || p.Alone > 0.7*p.Hit {
			t.Errorf("%+v", p)
		}
	}
	if p := got[2]; p.Binds != "writes" || p.Hit > 0.9*p.Ceiling {
		t.Errorf("%+v", p)
	}
}

// On networks that are almost infinitely slow, engines compute the blocks instead of waiting, times are positive, and shares are
// between 0 and 1.
func TestNetworksOnWhichNothingComes(t *testing.T) {
	for _, gbps := range []float64{1e-300, 1e-9, 1e-3} {
		o := fleet.Options{Profile: profile(t, 512), Nodes: []int{1, 3}, Pool: 40, NodeGBps: gbps, Requests: chats(60, 1)}
		o.Store = fleet.Store{ReadGBps: gbps, WriteGBps: gbps, Latency: time.Millisecond}
		for _, p := range run(t, o) {
			for what, v := range map[string]float64{"hit": p.Hit, "alone": p.Alone, "ceiling": p.Ceiling, "reads": p.ReadBusy, "writes": p.WriteBusy, "engines": p.EngineBusy} {
				if !(v >= 0 && v <= 1) {
					t.Errorf("%v GB/s: %s %v in %+v", gbps, what, v, p)
				}
			}
			if !(p.Seconds > 0) || !(p.MeanTTFT > 0) || !(p.P99TTFT > 0) || p.ReadGBps < 0 || p.WriteGBps < 0 || p.Hit > p.Ceiling {
				t.Errorf("%v GB/s: %+v", gbps, p)
			}
		}
	}
}
