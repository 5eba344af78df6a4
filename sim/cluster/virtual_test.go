// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"context"
	"errors"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/sim/cluster"
	"github.com/kvasir-kv/kvasir/sim/costmodel"
)

const ms = time.Millisecond

func profile(t *testing.T) *costmodel.Profile {
	t.Helper()
	p, err := costmodel.Get(costmodel.A10Qwen)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func run(t *testing.T, list []workload.Request, o cluster.Options) *cluster.Result {
	t.Helper()
	r, err := cluster.Run(t.Context(), list, o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// equal returns n requests of equal size that arrive at once and share no prefix.
func equal(n, input, output int) []workload.Request {
	out := make([]workload.Request, n)
	for i := range out {
		out[i] = workload.Request{Input: input, Output: output, Conversation: i}
	}
	return out
}

func work(before, n int) (w costmodel.Work) {
	w.Add(before, n, true)
	return w
}

// One request alone, by hand: hop, P's step, hop, transfer, D's step over the last prompt token, hop.
func TestOneRequestByHand(t *testing.T) {
	p := profile(t)
	r := run(t, equal(1, 1000, 3), cluster.Options{Profile: p, Prefill: 1, Decode: 1})
	q := r.Records[0]
	hop, host := p.Hop(), p.Host(1000)
	link, wait := p.Transfer(63, 1)
	first := hop + host + p.Step(work(0, 1000)) + hop + host + link + wait + p.Step(work(999, 1)) + hop
	if q.First != first || q.Queued != hop+host || q.Loaded-q.Loading != link+wait {
		t.Errorf("the first token after %v, want %v: %+v", q.First, first, q)
	}
	want := []time.Duration{p.Step(work(1000, 1)), p.Step(work(1001, 1))}
	if !slices.Equal(q.Gaps, want) || q.Last != first+want[0]+want[1] || q.Output != 3 {
		t.Errorf("gaps %v, want %v", q.Gaps, want)
	}
	if r.MovedBytes != p.TransferBytes(63) {
		t.Errorf("%d bytes moved", r.MovedBytes)
	}

	both := run(t, equal(1, 1000, 3), cluster.Options{Profile: p, Decode: 1}).Records[0]
	if want := 2*hop + host + p.Step(work(0, 1000)); both.First != want || both.Prefill != -1 {
		t.Errorf("an engine that does both: %v, want %v", both.First, want)
	}
	handed := run(t, equal(1, 1000, 3), cluster.Options{Profile: p, Prefill: 1, Decode: 1, FirstToken: true}).Records[0]
	if want := first - p.Step(work(999, 1)); handed.First != want || handed.Output != 3 {
		t.Errorf("with P's first token: %v after %v, want %v", handed.Output, handed.First, want)
	}
	pushed := run(t, equal(1, 1000, 3), cluster.Options{Profile: p.NCCL(), Prefill: 1, Decode: 1, Transport: cluster.Push}).Records[0]
	n := p.NCCL()
	step := p.Step(work(0, 1000))
	if want := 3*hop + 2*host + step + n.Push(1000, step) + n.Setup() + n.Receive() + p.Step(work(999, 1)); pushed.First != want {
		t.Errorf("pushed: %v, want %v", pushed.First, want)
	}
	piped := run(t, equal(1, 1000, 3), cluster.Options{Profile: p, Prefill: 1, Decode: 1, Transport: cluster.Pipe}).Records[0]
	if want := 3*hop + 2*host + step + p.Pipe(1000) + p.Step(work(999, 1)); piped.First != want {
		t.Errorf("through a pipe: %v, want %v", piped.First, want)
	}
}

// When a load ends during a step of D, D notices it after that step, and the first token needs one more step.
func TestLoadsAlignWithSteps(t *testing.T) {
	p := profile(t)
	list := equal(2, 500, 60)
	list[1].Arrival = time.Second
	r := run(t, list, cluster.Options{Profile: p, Prefill: 1, Decode: 1})
	a, b := r.Records[0], r.Records[1]
	if b.Loaded >= a.Last {
		t.Fatal("the test needs D to be busy")
	}
	if b.Decoding == b.Loaded || b.Decoding-b.Loaded > 40*ms {
		t.Errorf("loaded at %v, decoding at %v: the step between is %v long", b.Loaded, b.Decoding, 30*ms)
	}
	if idle := a.Decoding - a.Loaded; idle != 0 {
		t.Errorf("an idle D begins %v after the load", idle)
	}
}

func TestSameRunSameResult(t *testing.T) {
	list := workload.Chats(200, workload.ChatOptions{Seed: 3})
	if err := workload.Arrive(list, 5, 1, 1); err != nil {
		t.Fatal(err)
	}
	p := profile(t)
	p.BlockTokens = 64
	o := cluster.Options{Profile: p, Prefill: 3, Decode: 2, Store: cluster.Store{Blocks: 1000, GBps: 10}}
	a, b := run(t, list, o), run(t, list, o)
	if !reflect.DeepEqual(a, b) {
		t.Error("two runs differ")
	}
}

// Two Ps that send to one D share its network; with two Ds they do not.
func TestLinksAreShared(t *testing.T) {
	f := func(decode int, shared bool) {
		t.Helper()
		p := profile(t)
		p.Constants.TransferGBps, p.Constants.SpacingMS = 0.01, 0
		r := run(t, equal(2, 400, 2), cluster.Options{Profile: p, Prefill: 2, Decode: decode})
		a, b := r.Records[0], r.Records[1]
		if a.Prefill == b.Prefill {
			t.Fatal("both requests are at one P")
		}
		if overlap := min(a.Loaded, b.Loaded) > max(a.Loading, b.Loading)+p.Hop(); overlap == shared {
			t.Errorf("%d D: one loads %v to %v, the other %v to %v", decode, a.Loading, a.Loaded, b.Loading, b.Loaded)
		}
	}
	f(1, true)
	f(2, false)
}

// P keeps its blocks until D has the KV: with room for one prompt the next one waits for that.
func TestPKeepsBlocksUntilTheyAreSent(t *testing.T) {
	p := profile(t)
	p.Blocks, p.Constants.TransferGBps = 70, 0.01
	r := run(t, equal(2, 1000, 2), cluster.Options{Profile: p, Prefill: 1, Decode: 2})
	if a, b := r.Records[0], r.Records[1]; b.Started < a.Loaded {
		t.Errorf("the second prompt begins at %v, the first is sent at %v", b.Started, a.Loaded)
	}
}

// A D without room for all requests preempts and computes again, and each request gets all of its tokens.
func TestPreemption(t *testing.T) {
	p := profile(t)
	p.Blocks = 40
	r := run(t, equal(6, 90, 200), cluster.Options{Profile: p, Prefill: 1, Decode: 1})
	if r.Preemptions == 0 {
		t.Error("nothing was preempted")
	}
	for i, q := range r.Records {
		if len(q.Gaps) != 199 || q.Output != 200 || q.Error != "" {
			t.Errorf("request %d: %d tokens, %q", i, q.Output, q.Error)
		}
	}
}

// An engine does not compute blocks again that are in its own memory. No engine computes blocks again that are in the store.
func TestPrefixCacheAndStore(t *testing.T) {
	p := profile(t)
	p.BlockTokens = 64
	prompt := func(at time.Duration) workload.Request {
		return workload.Request{Arrival: at, Input: 1024, Output: 2, Blocks: []int64{1, 2}, BlockTokens: 512}
	}
	list := []workload.Request{prompt(0), prompt(time.Minute), prompt(2 * time.Minute)}
	f := func(o cluster.Options, want ...int) {
		t.Helper()
		o.Profile = p
		for i, q := range run(t, list, o).Records {
			if q.Cached != want[i] {
				t.Errorf("request %d: %d tokens cached, want %d", i, q.Cached, want[i])
			}
			if compute := q.Prefilled - q.Started; (compute < 180*ms) != (want[i] > 0) || want[i] > 900 && compute > 60*ms {
				t.Errorf("request %d with %d cached tokens computes for %v", i, want[i], compute)
			}
		}
	}
	f(cluster.Options{Decode: 1}, 0, 960, 960)
	f(cluster.Options{Decode: 1, NoPrefixCache: true}, 0, 0, 0)
	f(cluster.Options{Prefill: 1, Decode: 1}, 0, 960, 960)
	f(cluster.Options{Decode: 1, NoPrefixCache: true, Store: cluster.Store{Blocks: 100, GBps: 10}}, 0, 960, 960)
	f(cluster.Options{Decode: 1, NoPrefixCache: true, Store: cluster.Store{Blocks: 5, GBps: 10}}, 0, 5*64, 5*64)
}

// As in SGLang, no request decodes while prompts wait, and prompts never share a step with decoding.
func TestPrefillAlone(t *testing.T) {
	p := profile(t)
	list := equal(4, 2048, 50)
	for i := range list {
		list[i].Arrival = time.Duration(i) * time.Second
	}
	alone := run(t, list, cluster.Options{Profile: p, Decode: 1, PrefillAlone: true})
	mixed := run(t, list, cluster.Options{Profile: p, Decode: 1})
	whole := p.Step(work(0, 2048))
	if longest := slices.Max(alone.Records[0].Gaps); longest < whole {
		t.Errorf("no gap spans a prompt's %v: %v", whole, longest)
	}
	if alone.Records[1].Prefilled-alone.Records[1].Started != whole {
		t.Errorf("a prompt takes %v, alone %v", alone.Records[1].Prefilled-alone.Records[1].Started, whole)
	}
	if mixed.Records[1].Prefilled-mixed.Records[1].Started <= whole {
		t.Error("vLLM's chunk shares its step with decoding")
	}
}

// A client of limited concurrency sends the next request when one has ended.
func TestConcurrency(t *testing.T) {
	r := run(t, equal(5, 100, 10), cluster.Options{Profile: profile(t), Prefill: 1, Decode: 1, Concurrency: 2})
	for i := range r.Records {
		open := 0
		for _, q := range r.Records {
			if q.Sent <= r.Records[i].Sent && q.Last > r.Records[i].Sent {
				open++
			}
		}
		if open > 2 {
			t.Errorf("%d requests are open when request %d is sent", open, i)
		}
	}
}

// A request that fits nowhere fails alone.
func TestRequestThatDoesNotFit(t *testing.T) {
	p := profile(t)
	p.Blocks = 20
	list := append(equal(1, 5000, 5), equal(2, 100, 5)...)
	list = append(list, equal(1, 300, 100)...) // it fits P, and not D
	r := run(t, list, cluster.Options{Profile: p, Prefill: 1, Decode: 1})
	if f := r.Figures(); f.Completed != 2 || f.Failed != 2 || f.Output != 10 {
		t.Errorf("%+v", f)
	}
	if !strings.Contains(r.Records[0].Error, "5000") || !strings.Contains(r.Records[3].Error, "300") {
		t.Errorf("%q, %q", r.Records[0].Error, r.Records[3].Error)
	}
}

func TestOptions(t *testing.T) {
	f := func(want string, o cluster.Options) {
		t.Helper()
		if _, err := cluster.Run(t.Context(), equal(1, 1, 1), o); !errors.Is(err, cluster.ErrOptions) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	p := profile(t)
	f("no profile", cluster.Options{Decode: 1})
	f("0 decode engines", cluster.Options{Profile: p, Prefill: 1})
	f("-1 prefill", cluster.Options{Profile: p, Prefill: -1, Decode: 1})
	f("store", cluster.Options{Profile: p, Decode: 1, Store: cluster.Store{Blocks: 1}})
	f("PrefillAlone", cluster.Options{Profile: p, Prefill: 1, Decode: 1, PrefillAlone: true})
	f("concurrency", cluster.Options{Profile: p, Decode: 1, Concurrency: -1})
}

func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	o := cluster.Options{Profile: profile(t), Prefill: 1, Decode: 1, Progress: func(done, _ int) {
		if done >= 10 {
			cancel()
		}
	}}
	list := equal(2000, 100, 20)
	r, err := cluster.Run(ctx, list, o)
	if !errors.Is(err, context.Canceled) || r == nil {
		t.Fatalf("%v, %v", r, err)
	}
	if n := r.Figures().Completed; n < 10 || n == len(list) {
		t.Errorf("%d requests in a result that was cut", n)
	}
}

// Figures of records whose values are worked out by hand; percentiles as numpy has them.
func TestFigures(t *testing.T) {
	r := cluster.Result{
		Duration: 2 * time.Second,
		Records: []cluster.Record{
			{Input: 10, Output: 3, Sent: 100 * ms, First: 200 * ms, Last: 230 * ms, Gaps: []time.Duration{10 * ms, 20 * ms}},
			{Input: 20, Output: 2, Sent: 100 * ms, First: 400 * ms, Last: 460 * ms, Gaps: []time.Duration{60 * ms}},
			{Input: 5, Output: 1, Sent: 0, First: 50 * ms, Last: 50 * ms},
			{Input: 7, Error: "no room"},
		},
	}
	f := r.Figures()
	near := func(name string, got, want float64) {
		t.Helper()
		if math.Abs(got-want) > 1e-9 {
			t.Errorf("%s %v, want %v", name, got, want)
		}
	}
	if f.Completed != 3 || f.Failed != 1 || f.Input != 35 || f.Output != 6 {
		t.Errorf("%+v", f)
	}
	near("request throughput", f.RequestThroughput, 1.5)
	near("total throughput", f.TotalThroughput, 20.5)
	near("mean TTFT", f.MeanTTFT, 150)
	near("median TTFT", f.MedianTTFT, 100)
	near("P99 TTFT", f.P99TTFT, 296)
	near("mean TPOT", f.MeanTPOT, 37.5) // 15 and 60: a request of one token has none
	near("P95 TPOT", f.P95TPOT, 57.75)
	near("mean ITL", f.MeanITL, 30)
	near("median ITL", f.MedianITL, 20)
	near("percentile", cluster.Percentile([]float64{1, 2, 3, 4}, 25), 1.75)
}
