// SPDX-License-Identifier: Apache-2.0

package scheduler_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvasir-kv/kvasir/kv/coordinator"
	"github.com/kvasir-kv/kvasir/mooncake/scheduler"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// simRequest is a request of the simulated engine.
type simRequest struct {
	scheduler.Request
	blocks [][]int
	waits  bool // for a pull
	kept   bool // has ended, its blocks wait for Update
	pulls  bool // an accepted pull: exactly one PullMeta must follow
	told   int  // PullMetas seen
	ended  bool
}

// simTransfer is a transfer in the hands of the simulated workers.
type simTransfer struct {
	id     string
	pull   bool
	blocks []int
	left   []int // workers that have not reported
	failed bool
}

// sim is an engine around a Scheduler. Every block has one owner; a block in a
// transfer must not be freed before every worker has reported.
type sim struct {
	t         *rapid.T
	s         *scheduler.Scheduler
	o         scheduler.Options
	live      map[string]*simRequest // not ended, or with blocks kept
	ids, next int
	owner     map[int]string
	flying    []*simTransfer
	settled   map[string]int  // by transfer id: ready sends and not-processed notes
	asked     map[string]int  // requests that may be sent under it
	expected  map[string]bool // one was to be sent, or not processed
	announced map[string]bool
}

func (m *sim) pick(name string, ok func(*simRequest) bool) *simRequest {
	var ids []string
	for _, id := range slices.Sorted(maps.Keys(m.live)) {
		if ok(m.live[id]) {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	return m.live[rapid.SampledFrom(ids).Draw(m.t, name)]
}

func (m *sim) newRequest() {
	m.ids++
	r := &simRequest{Request: scheduler.Request{ID: fmt.Sprint("r", m.ids), PromptTokens: rapid.IntRange(0, 100).Draw(m.t, "prompt"), MaxTokens: 8}}
	tid := fmt.Sprint("x", rapid.IntRange(m.ids/2, m.ids).Draw(m.t, "tid")) // sometimes another one's
	switch rapid.SampledFrom([]string{"none", "empty", "D", "D", "D", "P", "P", "P", "both", "broken"}).Draw(m.t, "params") {
	case "empty":
		r.Params = new(wire.KVTransferParams)
	case "D", "both":
		r.Params = wire.RemotePrefill("http://h:1", "e", tid)
		if m.o.Pairing != nil {
			r.Params = wire.RemotePrefillAt("h", 9000)
		}
		if m.ids%7 == 0 {
			r.Params.Set("do_remote_decode", true)
		}
	case "P":
		r.Params = wire.RemoteDecode(tid)
	case "broken":
		keys := []string{"do_remote_prefill", "do_remote_decode", "transfer_id", "remote_engine_id", "remote_bootstrap_addr", "remote_host", "remote_port"}
		r.Params = new(wire.KVTransferParams)
		for _, key := range keys {
			switch v := rapid.IntRange(0, 5).Draw(m.t, key); v {
			case 0:
			case 1:
				r.Params.Set(key, nil)
			case 2:
				r.Params.Set(key, "")
			case 3:
				r.Params.Set(key, v)
			default:
				r.Params.Set(key, tid)
			}
		}
	}
	if tid, _ := r.Params.TransferID(); r.Params.DoRemoteDecode() {
		m.asked[tid]++
		m.asked[r.ID]++ // with RequestIDs
	}
	before := r.PromptTokens
	if m.s.NewRequest(&r.Request) && (r.PromptTokens != before-1 || r.MaxTokens != 1 || m.s.NewRequest(&r.Request)) {
		m.t.Fatalf("truncated from %d: %+v", before, r.Request)
	}
	m.live[r.ID] = r
}

// grow gives r blocks of its own.
func (m *sim) grow(r *simRequest) {
	r.blocks = make([][]int, max(1, len(m.o.Groups)))
	for g := range r.blocks {
		for range rapid.IntRange(0, 6).Draw(m.t, "blocks") {
			m.next++
			r.blocks[g] = append(r.blocks[g], m.next)
			m.owner[m.next] = r.ID
		}
	}
}

func (m *sim) free(r *simRequest) {
	for _, list := range r.blocks {
		for _, b := range list {
			if m.owner[b] != r.ID {
				m.t.Fatalf("%s frees block %d of %q", r.ID, b, m.owner[b])
			}
			for _, f := range m.flying {
				if slices.Contains(f.blocks, b) {
					m.t.Fatalf("%s frees block %d, which is in a transfer (pull %v)", r.ID, b, f.pull)
				}
			}
			delete(m.owner, b)
		}
	}
	r.blocks = nil
}

func (m *sim) schedule() {
	r := m.pick("scheduled", func(r *simRequest) bool { return !r.waits && !r.ended })
	if r == nil {
		return
	}
	m.free(r) // as after a preemption
	wanted := r.Params.DoRemotePrefill()
	match, err := m.s.Match(&r.Request, rapid.IntRange(0, 40).Draw(m.t, "computed"))
	if match.Async != (match.Tokens > 0) || match.Tokens > r.PromptTokens || err != nil && match.Async {
		m.t.Fatalf("%s: %+v of %d tokens, %v", r.ID, match, r.PromptTokens, err)
	}
	if err != nil && (r.Params.DoRemotePrefill() || !wanted) {
		m.t.Fatalf("%s is refused without an end: %v", r.ID, err)
	}
	if rapid.IntRange(0, 5).Draw(m.t, "short") == 0 { // of blocks
		return
	}
	wanted = r.Params.DoRemotePrefill()
	m.grow(r)
	lists := r.blocks
	if rapid.IntRange(0, 20).Draw(m.t, "misfit") == 0 {
		lists = append(slices.Clone(lists), nil, nil)
	}
	err = m.s.Allocated(&r.Request, lists, match.Tokens)
	r.pulls = r.pulls || wanted && (err == nil || errors.Is(err, wire.ErrShape) || errors.Is(err, wire.ErrGroups)) // P is to free
	r.waits = match.Async && err == nil
	if wanted && r.Params.DoRemotePrefill() {
		m.t.Fatalf("%s would pull twice", r.ID)
	}
}

func (m *sim) finish() {
	r := m.pick("finished", func(r *simRequest) bool { return !r.ended })
	if r == nil {
		return
	}
	m.end(r, rapid.SampledFrom([]scheduler.RequestStatus{scheduler.LengthCapped, scheduler.LengthCapped, scheduler.Stopped, scheduler.Aborted}).Draw(m.t, "status"))
}

func (m *sim) end(r *simRequest, status scheduler.RequestStatus) {
	wanted, sends := r.Params.DoRemotePrefill(), !r.Params.DoRemotePrefill() && r.Params.DoRemoteDecode()
	tid, named := r.Params.TransferID()
	if m.o.Pairing != nil {
		tid, named = r.ID, true
	}
	refused := m.s.Stats().Refused
	f, err := m.s.Finish(&r.Request, status, r.blocks)
	r.ended = true
	r.pulls = r.pulls || wanted && err == nil
	if sends && named && err == nil && m.s.Stats().Refused == refused {
		m.expected[tid] = true
	}
	if f.Params != nil && (m.o.Pairing == nil || !f.KeepBlocks || !sends) {
		m.t.Fatalf("%s: %+v", r.ID, f)
	}
	if r.kept = f.KeepBlocks; !r.kept {
		m.gone(r)
	}
	again, err := m.s.Finish(&r.Request, status, nil)
	if err != nil || again.KeepBlocks != f.KeepBlocks || again.Params != nil {
		m.t.Fatalf("%s: a second Finish says %+v, %v", r.ID, again, err)
	}
}

func (m *sim) gone(r *simRequest) {
	m.free(r)
	if !r.pulls || r.told == 1 {
		delete(m.live, r.ID) // else it stays until the workers have its pull
	}
}

func (m *sim) build() {
	meta, err := m.s.Build()
	if err != nil {
		m.t.Fatal(err)
	}
	workers := make([]int, max(1, m.o.Workers))
	for i := range workers {
		workers[i] = i
	}
	fly := func(id string, pull bool, lists [][]int) {
		f := &simTransfer{id: id, pull: pull, blocks: slices.Concat(lists...), left: slices.Clone(workers)}
		for _, b := range f.blocks {
			if m.owner[b] != id {
				m.t.Fatalf("block %d of %q is in a transfer of %s", b, m.owner[b], id)
			}
		}
		m.flying = append(m.flying, f)
	}
	for _, p := range meta.Pulls {
		r := m.live[p.RequestID]
		if r == nil || r.told > 0 || !r.pulls {
			m.t.Fatalf("pull %+v of %+v", p, r)
		}
		r.told++
		if (p.EngineID == "" || p.TransferID == "" || p.BootstrapAddr == "") && (p.Host == "" || p.Port == 0) {
			m.t.Fatalf("pull without a source: %+v", p)
		}
		switch empty := len(slices.Concat(p.Blocks...)) == 0; {
		case !empty:
			fly(p.RequestID, true, p.Blocks)
		case r.waits && !r.ended:
			m.t.Fatalf("%s waits for an empty pull", r.ID)
		case r.ended && !r.kept:
			delete(m.live, r.ID)
		}
	}
	for _, x := range meta.Sends {
		if slices.Contains(meta.NotProcessed, x.TransferID) {
			m.t.Fatalf("transfer %s is both sent and not processed", x.TransferID)
		}
		if m.announced[x.TransferID] = true; x.Blocks != nil {
			delete(m.announced, x.TransferID)
			m.settled[x.TransferID]++
			fly(x.RequestID, false, x.Blocks)
		}
	}
	for _, id := range meta.NotProcessed {
		delete(m.announced, id)
		m.settled[id]++
	}
}

// report lets one worker report one transfer as ended or failed.
func (m *sim) report() {
	if len(m.flying) == 0 {
		return
	}
	i := rapid.IntRange(0, len(m.flying)-1).Draw(m.t, "transfer")
	f := m.flying[i]
	w := rapid.SampledFrom(f.left).Draw(m.t, "worker")
	o := scheduler.WorkerOutput{Worker: w, Sent: []string{f.id, "nobody"}}
	if f.pull {
		o = scheduler.WorkerOutput{Worker: w, Received: []string{f.id}}
		switch rapid.IntRange(0, 5).Draw(m.t, "failure") {
		case 0:
			f.failed, o.Failed = true, []string{f.id}
		case 1:
			f.failed, o.FailedBlocks = true, []int{f.blocks[0]}
		}
	}
	f.left = slices.DeleteFunc(f.left, func(x int) bool { return x == w })
	if len(f.left) == 0 {
		m.flying = slices.Delete(m.flying, i, i+1)
	}
	for range 2 { // a repeated report counts once
		u, err := m.s.Update(o)
		if err != nil {
			m.t.Fatal(err)
		}
		m.updated(f, u)
		if len(f.left) == 0 {
			break
		}
	}
}

func (m *sim) updated(f *simTransfer, u scheduler.Update) {
	all := slices.Concat(u.Loaded, u.Failed, u.Freed)
	if len(f.left) > 0 && len(all) > 0 || len(f.left) == 0 && !slices.Equal(all, []string{f.id}) {
		m.t.Fatalf("%s, %d workers to come: %+v", f.id, len(f.left), u)
	}
	if len(all) == 0 {
		return
	}
	r := m.live[f.id]
	if r.kept != (len(u.Freed) == 1) || !r.kept && f.failed != (len(u.Failed) == 1) {
		m.t.Fatalf("%+v, failed %v: %+v", r, f.failed, u)
	}
	if r.waits = false; r.kept {
		r.kept = false
		m.gone(r)
	}
}

// Random engines run with preemptions, aborts at every point, broken params, foreign
// transfer ids and failed loads. Each block is freed exactly once and never during a
// transfer. The workers get each accepted pull once. Each announced transfer ends, and
// nothing is left.
func schedulerProperty(t *rapid.T) {
	o := scheduler.Options{
		Pairing: rapid.SampledFrom([]*scheduler.Pairing{nil, scheduler.RequestIDs("self", 8998)}).Draw(t, "pairing"),
		Role:    rapid.SampledFrom([]wire.Role{wire.Both, wire.Both, wire.Producer, wire.Consumer}).Draw(t, "role"),
		Workers: rapid.IntRange(0, 3).Draw(t, "workers"), MaxTransfers: rapid.SampledFrom([]int{0, 0, 2, 5}).Draw(t, "max"),
	}
	if o.Pairing == nil {
		full := scheduler.CacheGroup{Group: coordinator.Group{Kind: coordinator.Full, Block: 16}}
		window := scheduler.CacheGroup{Group: coordinator.Group{Kind: coordinator.SlidingWindow, Block: 16, Window: 20}}
		mamba := scheduler.CacheGroup{Group: coordinator.Group{Kind: coordinator.Mamba, Block: 16}}
		off := scheduler.CacheGroup{Group: full.Group, NoTransfer: true}
		o.Groups = rapid.SampledFrom([][]scheduler.CacheGroup{nil, {full, window}, {full, mamba}, {window, off, full}}).Draw(t, "groups")
	}
	s, err := scheduler.New(o)
	if err != nil {
		t.Fatal(err)
	}
	m := &sim{
		t: t, s: s, o: o, live: map[string]*simRequest{}, owner: map[int]string{},
		settled: map[string]int{}, asked: map[string]int{}, expected: map[string]bool{}, announced: map[string]bool{},
	}
	acts := []func(){m.newRequest, m.newRequest, m.schedule, m.schedule, m.schedule, m.finish, m.build, m.report, m.report}
	for range rapid.SampledFrom([]int{4, 20, 60, 150}).Draw(t, "steps") {
		rapid.SampledFrom(acts).Draw(t, "act")()
	}
	for _, id := range slices.Sorted(maps.Keys(m.live)) {
		if r := m.live[id]; !r.ended {
			m.end(r, scheduler.Aborted)
		}
	}
	m.build()
	for len(m.flying) > 0 {
		m.report()
	}
	if s.Len() != 0 || len(m.live) > 0 || len(m.owner) > 0 || len(m.announced) > 0 {
		t.Fatalf("left: %d in the scheduler, requests %v, blocks %v, announced %v", s.Len(), m.live, m.owner, m.announced)
	}
	for tid, n := range m.settled {
		if n > m.asked[tid] {
			t.Fatalf("transfer %s of %d requests ended %d times", tid, m.asked[tid], n)
		}
	}
	for tid := range m.expected {
		if m.settled[tid] == 0 && o.MaxTransfers == 0 {
			t.Fatalf("transfer %s has no end", tid)
		}
	}
	if n := s.Stats(); n.Receiving != 0 || n.Sending != 0 || n.Delayed != n.Sent || n.Pulls != n.Loaded+n.Failed {
		t.Fatalf("%+v", n)
	}
}

func TestSchedulerProperties(t *testing.T) { rapid.Check(t, schedulerProperty) }

func FuzzScheduler(f *testing.F) { f.Fuzz(rapid.MakeFuzz(schedulerProperty)) }
