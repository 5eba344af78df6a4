// SPDX-License-Identifier: Apache-2.0

package scheduler_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/kv/coordinator"
	"github.com/kvasir-kv/kvasir/mooncake/scheduler"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

func newScheduler(t *testing.T, o scheduler.Options) *scheduler.Scheduler {
	t.Helper()
	s, err := scheduler.New(o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func request(id string, tokens int, p *wire.KVTransferParams) *scheduler.Request {
	return &scheduler.Request{ID: id, PromptTokens: tokens, MaxTokens: 8, Params: p}
}

func build(t *testing.T, s *scheduler.Scheduler) *wire.Metadata {
	t.Helper()
	m, err := s.Build()
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func update(t *testing.T, s *scheduler.Scheduler, o scheduler.WorkerOutput) scheduler.Update {
	t.Helper()
	u, err := s.Update(o)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func noError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// pulled returns a scheduler whose request r waits for a pull of blocks 1 to 3.
func pulled(t *testing.T, o scheduler.Options) (*scheduler.Scheduler, *scheduler.Request) {
	t.Helper()
	s, r := newScheduler(t, o), request("r", 40, wire.RemotePrefill("http://p:1", "e", "x"))
	m, err := s.Match(r, 8)
	if err != nil || m != (scheduler.Matched{Tokens: 32, Async: true}) {
		t.Fatalf("%+v, %v", m, err)
	}
	blocks := [][]int{{1, 2, 3}}
	noError(t, s.Allocated(r, blocks, 32))
	blocks[0][0] = 99 // the caller's
	got := build(t, s)
	want := []wire.PullMeta{{RequestID: "r", Blocks: [][]int{{1, 2, 3}}, TransferID: "x", EngineID: "e", BootstrapAddr: "http://p:1"}}
	if fmt.Sprint(got.Pulls) != fmt.Sprint(want) {
		t.Fatalf("%+v", got)
	}
	got.Pulls[0].Blocks[0][0] = 99 // the worker's
	if m, err := s.Match(r, 8); err != nil || m.Tokens != 0 {
		t.Fatalf("a second pull: %+v, %v", m, err)
	}
	return s, r
}

// An aborted request without remote_engine_id: the original fails at every step
// from then on.
func TestAbortedWithoutEngine(t *testing.T) {
	for _, release := range []wire.Release{33, 0} {
		faithful, s := release != 0, newScheduler(t, scheduler.Options{Release: release})
		r := request("r", 4, mustParams(t, `{"do_remote_prefill":true,"transfer_id":"x"}`))
		f, err := s.Finish(r, scheduler.Aborted, nil)
		if f.KeepBlocks || faithful != (err == nil) || !faithful && !errors.Is(err, wire.ErrInvalid) {
			t.Fatalf("faithful %v: %+v, %v", faithful, f, err)
		}
		for range 3 {
			if _, err := s.Build(); faithful != errors.Is(err, wire.ErrMissing) {
				t.Fatalf("faithful %v: %v", faithful, err)
			}
		}
	}
}

// A request lacks a key in its params: vLLM lets it wait for a load that no worker
// starts.
func TestMissingKey(t *testing.T) {
	const params = `{"do_remote_prefill":true,"transfer_id":"x","remote_bootstrap_addr":null,"remote_engine_id":"e"}`
	s := newScheduler(t, scheduler.Options{})
	r := request("r", 4, mustParams(t, params))
	m, err := s.Match(r, 0)
	if !errors.Is(err, wire.ErrInvalid) || m.Async || !strings.Contains(err.Error(), "Got invalid KVTransferParams: "+params) ||
		!strings.Contains(err.Error(), `remote_bootstrap_addr is "null"`) {
		t.Fatalf("%+v, %v", m, err)
	}
	if m, err := s.Match(r, 0); err != nil || m.Async { // told once
		t.Fatalf("%+v, %v", m, err)
	}
	noError(t, s.Allocated(r, [][]int{{1}}, 0))
	if got := build(t, s); len(got.Pulls) > 0 || s.Stats().Refused != 1 {
		t.Fatalf("%+v", got)
	}
	s = newScheduler(t, scheduler.Options{Release: 33})
	r = request("r", 4, mustParams(t, `{"do_remote_prefill":true}`))
	if m, err := s.Match(r, 0); err != nil || !m.Async {
		t.Fatalf("%+v, %v", m, err)
	}
	noError(t, s.Allocated(r, [][]int{{1}}, 4))
	if got := build(t, s); len(got.Pulls) > 0 {
		t.Fatalf("%+v", got)
	}
}

// A pull that fails, by request or by block, is reported when all workers are done.
func TestFailedPull(t *testing.T) {
	f := func(bad scheduler.WorkerOutput, want string) {
		t.Helper()
		s, _ := pulled(t, scheduler.Options{Workers: 2})
		if u := update(t, s, bad); fmt.Sprint(u) != "{[] [] []}" {
			t.Fatalf("%+v", u)
		}
		update(t, s, scheduler.WorkerOutput{Worker: 1, Received: []string{"r"}})
		if u := update(t, s, scheduler.WorkerOutput{Received: []string{"r"}}); fmt.Sprint(u) != want || s.Len() != 0 {
			t.Fatalf("%+v: %+v, want %s", bad, u, want)
		}
	}
	f(scheduler.WorkerOutput{Failed: []string{"r"}}, "{[] [r] []}")
	f(scheduler.WorkerOutput{FailedBlocks: []int{7, 3}}, "{[] [r] []}")
	f(scheduler.WorkerOutput{FailedBlocks: []int{7, 99}, Failed: []string{"other"}}, "{[r] [] []}")
	f(scheduler.WorkerOutput{Worker: 1, Received: []string{"r"}}, "{[r] [] []}")
}

// A request that ends during its pull keeps its blocks until no worker writes into them.
// A request that ends before the workers know of it pulls nothing.
func TestAbortedPull(t *testing.T) {
	s, r := pulled(t, scheduler.Options{})
	r.Params.Set("do_remote_decode", true) // and had nothing to send either
	f, err := s.Finish(r, scheduler.LengthCapped, [][]int{{1, 2, 3}})
	if err != nil || !f.KeepBlocks {
		t.Fatalf("%+v, %v", f, err)
	}
	if m := build(t, s); len(m.Sends) > 0 || fmt.Sprint(m.NotProcessed, m.Aborted) != "[x] [r]" {
		t.Fatalf("%+v", m)
	}
	again := request("r", 40, wire.RemotePrefill("http://p:1", "e", "y"))
	if _, err := s.Match(again, 0); !errors.Is(err, wire.ErrBusy) {
		t.Fatalf("an id in a pull: %v", err)
	}
	if u := update(t, s, scheduler.WorkerOutput{Received: []string{"r"}}); fmt.Sprint(u) != "{[] [] [r]}" {
		t.Fatalf("%+v", u)
	}

	s = newScheduler(t, scheduler.Options{})
	r = request("r", 40, wire.RemotePrefill("http://p:1", "e", "x"))
	noError(t, s.Allocated(r, [][]int{{1}}, 40))
	if f, err := s.Finish(r, scheduler.Aborted, [][]int{{1}}); err != nil || f.KeepBlocks {
		t.Fatalf("%+v, %v", f, err)
	}
	if m := build(t, s); len(m.Pulls) != 1 || m.Pulls[0].Blocks != nil || m.Pulls[0].TransferID != "x" || s.Len() != 0 {
		t.Fatalf("%+v", m)
	}
}

// P's side: announced, kept for D, freed; or withdrawn.
func TestSend(t *testing.T) {
	for id, pairing := range map[string]*scheduler.Pairing{"x": nil, "r": scheduler.RequestIDs("10.0.0.7", 8998)} {
		s := newScheduler(t, scheduler.Options{Pairing: pairing, Role: wire.Producer})
		r := request("r", 40, wire.RemoteDecode("x"))
		noError(t, s.Allocated(r, [][]int{{1, 2}}, 0))
		if m := build(t, s); fmt.Sprint(m.Sends) != "[{r "+id+" []}]" || m.Sends[0].Blocks != nil {
			t.Fatalf("%+v", m)
		}
		f, err := s.Finish(r, scheduler.LengthCapped, [][]int{{1, 2}})
		if err != nil || !f.KeepBlocks || (f.Params != nil) != (pairing != nil) {
			t.Fatalf("%+v, %v", f, err)
		}
		if u := update(t, s, scheduler.WorkerOutput{Sent: []string{"r"}}); len(u.Freed) > 0 { // they do not know yet
			t.Fatalf("%+v", u)
		}
		if m := build(t, s); fmt.Sprint(m.Sends) != "[{r "+id+" [[1 2]]}]" {
			t.Fatalf("%+v", m)
		}
		if n := s.Stats(); n.Sending != 1 || n.Delayed != 1 {
			t.Fatalf("%+v", n)
		}
		if u := update(t, s, scheduler.WorkerOutput{Sent: []string{"r"}}); fmt.Sprint(u) != "{[] [] [r]}" || s.Len() != 0 {
			t.Fatalf("%+v", u)
		}

		r = request("r", 40, wire.RemoteDecode("x"))
		noError(t, s.Allocated(r, [][]int{{1, 2}}, 0))
		f, err = s.Finish(r, scheduler.Aborted, [][]int{{1, 2}})
		if err != nil || f.KeepBlocks {
			t.Fatalf("%+v, %v", f, err)
		}
		if m := build(t, s); len(m.Sends) > 0 || fmt.Sprint(m.NotProcessed) != "["+id+"]" || s.Len() != 0 {
			t.Fatalf("%+v", m)
		}
	}
}

// 0.13 answers params also where nothing is sent, and keeps a consumer's table for
// ever.
func TestRequestIDsMisuse(t *testing.T) {
	s := newScheduler(t, scheduler.Options{Pairing: scheduler.RequestIDs("10.0.0.7", 8998)})
	r := request("r", 40, wire.RemoteDecode(""))
	if f, err := s.Finish(r, scheduler.LengthCapped, [][]int{{}}); err != nil || f.KeepBlocks || f.Params != nil {
		t.Fatalf("%+v, %v", f, err)
	}
	s = newScheduler(t, scheduler.Options{Pairing: scheduler.RequestIDs("", 0), Role: wire.Consumer})
	if err := s.Allocated(request("r", 40, wire.RemoteDecode("")), nil, 0); !errors.Is(err, wire.ErrRole) || !strings.Contains(err.Error(), "kv_consumer") {
		t.Fatal(err)
	}
	build(t, s)
	if s.Len() != 0 {
		t.Fatal(s.Len())
	}
}

// The number of transfers is bounded. D learns which transfers P has no room for.
func TestBounded(t *testing.T) {
	s := newScheduler(t, scheduler.Options{MaxTransfers: 2})
	for i := range 5 {
		id := fmt.Sprint(i)
		if err := s.Allocated(request("d"+id, 40, wire.RemotePrefill("http://p:1", "e", id)), [][]int{{i}}, 40); (i >= 2) != errors.Is(err, wire.ErrFull) {
			t.Fatal(i, err)
		}
		if err := s.Allocated(request("p"+id, 40, wire.RemoteDecode("x"+id)), nil, 0); (i >= 2) != errors.Is(err, wire.ErrFull) {
			t.Fatal(i, err)
		}
	}
	if m := build(t, s); len(m.Pulls) != 2 || len(m.Sends) != 2 || fmt.Sprint(m.NotProcessed) != "[x2 x3]" {
		t.Fatalf("%+v", m)
	}
	if err := s.Allocated(request("other", 40, wire.RemoteDecode("x0")), nil, 0); !errors.Is(err, wire.ErrBusy) {
		t.Fatal(err)
	}
	if m := build(t, s); len(m.NotProcessed) > 0 {
		t.Fatalf("another request's transfer is given up: %+v", m)
	}
}

func TestSchedulerOptions(t *testing.T) {
	f := func(o scheduler.Options) {
		t.Helper()
		if _, err := scheduler.New(o); err == nil {
			t.Errorf("%+v is accepted", o)
		}
	}
	full := scheduler.CacheGroup{Group: coordinator.Group{Kind: coordinator.Full, Block: 16}}
	f(scheduler.Options{Release: 24})
	f(scheduler.Options{Role: 3})
	f(scheduler.Options{Pairing: scheduler.RequestIDs("", 0)})
	f(scheduler.Options{Pairing: scheduler.RequestIDs("h", 70000)})
	f(scheduler.Options{Pairing: scheduler.RequestIDs("h", 1), Groups: []scheduler.CacheGroup{full, full}})
	f(scheduler.Options{Groups: []scheduler.CacheGroup{{}}})
	f(scheduler.Options{Groups: make([]scheduler.CacheGroup, 5000)})
	f(scheduler.Options{Workers: -1})
	f(scheduler.Options{MaxTransfers: -1})
	s := newScheduler(t, scheduler.Options{Groups: []scheduler.CacheGroup{full, full}})
	err := s.Allocated(request("r", 40, wire.RemotePrefill("http://p:1", "e", "x")), [][]int{{1}, {2}, {3}}, 40)
	if !errors.Is(err, wire.ErrGroups) || !strings.Contains(err.Error(), "Expected 2 KV cache groups, got 3.") {
		t.Fatal(err)
	}
	if _, err := s.Update(scheduler.WorkerOutput{Worker: 1}); !errors.Is(err, wire.ErrRange) {
		t.Fatal(err)
	}
	if _, err := wire.ParseRole("kv_sender"); err == nil {
		t.Fatal("a role of no name")
	}
}

// Every count has a metric.
func TestSchedulerMetrics(t *testing.T) {
	s, _ := pulled(t, scheduler.Options{})
	var page strings.Builder
	noError(t, metrics.Write(&page, s.Stats()))
	if got := page.String(); strings.Count(got, "# TYPE ") != 14 || !strings.Contains(got, "\nkvasir_mooncake_scheduler_pulls_total 1\n") ||
		!strings.Contains(got, "\nkvasir_mooncake_scheduler_receiving 1\n") {
		t.Fatalf("%s", got)
	}
}

func mustParams(t testing.TB, s string) *wire.KVTransferParams {
	t.Helper()
	p, err := wire.ParseKVTransferParams([]byte(s))
	if err != nil {
		t.Fatal(err)
	}
	return p
}
