// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"context"
	"encoding/json"
	"errors"
	"iter"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/bench"
	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/sim/cluster"
)

// heap returns the bytes of the heap that are in use.
func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// A run over a stream of requests equals a run over a list, by every transport, with bytes, a store, a limit on concurrency, and requests that fit nowhere.
func TestStreamIsRun(t *testing.T) {
	list := chats(t, 150)
	list[40].Input, list[40].Blocks = 1<<20, nil
	list[7].Arrival = list[6].Arrival
	f := func(name string, o cluster.Options) {
		t.Helper()
		want := run(t, list, o)
		figures := want.Figures()
		for _, records := range []bool{true, false} {
			o.Records, o.Total = records, len(list)
			ended := make([]cluster.Record, len(list))
			good := 0
			slos := []bench.SLO{{Metric: "ttft", Millis: 400}}
			o.Ended = func(number int, q *cluster.Record) {
				if ended[number] = *q; q.Meets(slos) {
					good++
				}
			}
			got, err := cluster.Stream(t.Context(), workload.Each(list), o)
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(ended, want.Records) || got.Figures() != figures || got.Cached() != want.Cached() || got.Unfinished != 0 {
				t.Errorf("%s: other requests: %+v, want %+v", name, got.Figures(), figures)
			}
			if m := want.Measure(bench.Options{SLOs: slos}); float64(good)/want.Duration.Seconds() != *m.RequestGoodput || good == 0 || good == len(list) {
				t.Errorf("%s: %d good requests, goodput %v", name, good, *m.RequestGoodput)
			}
			kept := slices.Clone(want.Records)
			for i := range kept {
				kept[i].Gaps = nil
			}
			if records != (got.Records != nil) || records && !reflect.DeepEqual(got.Records, kept) {
				t.Errorf("%s: %d records", name, len(got.Records))
			}
			a, b := *got, *want
			a.Records, b.Records = nil, nil
			x, err1 := json.Marshal(a)
			y, err2 := json.Marshal(b)
			if errors.Join(err1, err2) != nil || string(x) != string(y) || a.Duration != b.Duration {
				t.Errorf("%s: %s in %v, want %s in %v", name, x, a.Duration, y, b.Duration)
			}
		}
	}
	p := small(t, 300)
	f("pull", cluster.Options{Profile: p, Prefill: 2, Decode: 1})
	f("push", cluster.Options{Profile: p.NCCL(), Prefill: 1, Decode: 1, Transport: cluster.Push})
	f("store", cluster.Options{Profile: p, Decode: 2, Store: cluster.Store{Blocks: 500, GBps: 10, Latency: ms}})
	f("alone", cluster.Options{Profile: p, Decode: 2, PrefillAlone: true})
	f("concurrency", cluster.Options{Profile: p, Prefill: 1, Decode: 1, Concurrency: 3})
	f("bytes", cluster.Options{Profile: p, Prefill: 1, Decode: 1, Store: cluster.Store{Blocks: 200, GBps: 10}, Bytes: &cluster.Bytes{Dir: t.TempDir(), Corrupt: 3}})
}

// A list that is not in the order of its arrivals is played in that order; its records stay where its requests are.
func TestRunOfAnUnsortedList(t *testing.T) {
	list := chats(t, 60)
	o := cluster.Options{Profile: small(t, 300), Prefill: 1, Decode: 1}
	want := run(t, list, o)
	slices.Reverse(list)
	got := run(t, list, o)
	slices.Reverse(got.Records)
	if !reflect.DeepEqual(got.Records, want.Records) {
		t.Error("other records")
	}
	if _, err := cluster.Stream(t.Context(), workload.Each(list), o); !errors.Is(err, cluster.ErrOptions) || !strings.Contains(err.Error(), "request 2 comes at") {
		t.Error(err)
	}
}

// endless returns n requests of 50 blocks, two a second, and makes each one when it is read.
func endless(n int, each func(i int)) iter.Seq2[workload.Request, error] {
	return func(yield func(workload.Request, error) bool) {
		for i := range n {
			q := workload.Request{Arrival: time.Duration(i) * 500 * ms, Input: 16 * 50, Output: 3, BlockTokens: 16}
			for k := range int64(50) {
				q.Blocks = append(q.Blocks, int64(i%40)<<32|k)
			}
			if each(i); !yield(q, nil) {
				return
			}
		}
	}
}

// A run takes memory that does not grow with its length: here 6,000 requests that would take 8 MB, and 400 with
// tokens that would take 4 MB.
func TestStreamTakesBoundedMemory(t *testing.T) {
	f := func(name string, n int, allowed int64, o cluster.Options) {
		t.Helper()
		o.Profile = small(t, 2000)
		before, most := int64(0), int64(0)
		got, err := cluster.Stream(t.Context(), endless(n, func(i int) {
			switch {
			case i == n/10:
				before = heap()
			case i > n/10 && i%(n/10) == 0:
				most = max(most, heap()-before)
			}
		}), o)
		if err != nil || got.Figures().Completed != n {
			t.Fatalf("%s: %+v, %v", name, got, err)
		}
		if most > allowed {
			t.Errorf("%s: %d bytes of heap more than at its tenth part, %d are allowed", name, most, allowed)
		}
	}
	f("P and D", 6000, 1<<20, cluster.Options{Prefill: 1, Decode: 1})
	f("store", 6000, 1<<20, cluster.Options{Decode: 1, Store: cluster.Store{Blocks: 1000, GBps: 10}})
	// The store keeps notes of 4,096 lookups and 65,536 evicted objects.
	f("bytes", 400, 2<<20, cluster.Options{Prefill: 1, Decode: 1, Store: cluster.Store{Blocks: 1000, GBps: 10}, Bytes: &cluster.Bytes{Dir: t.TempDir()}})
}

// A run ends with the result so far when the requests give an error or the context ends.
func TestStreamThatEndsEarly(t *testing.T) {
	broken := errors.New("line 7 is bad")
	o := cluster.Options{Profile: small(t, 2000), Prefill: 1, Decode: 1, Total: 500}
	for _, at := range []int{0, 100} {
		got, err := cluster.Stream(t.Context(), func(yield func(workload.Request, error) bool) {
			for q := range endless(at, func(int) {}) {
				if !yield(q, nil) {
					return
				}
			}
			yield(workload.Request{}, broken)
		}, o)
		if !errors.Is(err, broken) || got == nil || got.Unfinished < 500-at || got.Figures().Completed+got.Figures().Failed != 500 {
			t.Errorf("%+v, %v", got, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	got, err := cluster.Stream(ctx, endless(100_000, func(i int) {
		if i == 400 {
			cancel()
		}
	}), o)
	if f := got.Figures(); !errors.Is(err, context.Canceled) || f.Completed < 300 || f.Completed > 5000 {
		t.Errorf("%+v, %v", f, err)
	}
	if got, err := cluster.Stream(t.Context(), endless(0, nil), cluster.Options{Profile: small(t, 100), Decode: 1, Records: true}); err != nil || got.Figures() != (cluster.Figures{}) || got.Records == nil {
		t.Errorf("no requests: %+v, %v", got, err)
	}
}

// A trace whose times count from 1970 gives an error that says what to do.
func TestTimesThatAreTooLate(t *testing.T) {
	list := equal(3, 100, 2)
	list[2].Arrival = 1_700_000_000 * time.Second
	r, err := cluster.Run(t.Context(), list, cluster.Options{Profile: small(t, 100), Decode: 1})
	if !errors.Is(err, cluster.ErrOptions) || !strings.Contains(err.Error(), "request 3 comes at 472222h13m20s, 320255h58m") || !strings.Contains(err.Error(), "let the times begin near 0") || r.Figures().Completed != 2 {
		t.Errorf("%v", err)
	}
}
