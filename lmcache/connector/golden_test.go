// SPDX-License-Identifier: Apache-2.0

package connector_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/lmcache/connector"
)

// fakeCache answers lookups as told and lists its calls as the vectors do.
type fakeCache struct {
	results map[string]int
	calls   []any
}

func (f *fakeCache) log(call ...any) { f.calls = append(f.calls, call) }

func (f *fakeCache) SubmitLookup(id string, tokens []uint32, salt string) {
	if salt != "" {
		f.log("lookup", id, len(tokens), salt)
		return
	}
	f.log("lookup", id, len(tokens))
}

func (f *fakeCache) LookupResult(id string) (int, bool) {
	n, ok := f.results[id]
	return n, ok
}

func (f *fakeCache) CleanupLookup(id string) { f.log("cleanup", id) }

func (f *fakeCache) FreeLookupLocks(id string, tokens []uint32, start, end int, salt string) {
	if salt != "" {
		f.log("free_locks", id, len(tokens), start, end, salt)
		return
	}
	f.log("free_locks", id, len(tokens), start, end)
}

func (f *fakeCache) EndSession(id string) { f.log("end_session", id) }

func (f *fakeCache) ReportBlockAllocations(records []lmcache.BlockAllocation) {
	list := []any{}
	for _, r := range records {
		list = append(list, []any{r.RequestID, r.NewBlocks, len(r.NewTokens)})
	}
	f.log("alloc", list)
}

// event is one line of a script; cachedEvent is [id, ids or null, resumed, computed].
type event struct {
	Op       string                     `json:"op"`
	Req      string                     `json:"req"`
	Tokens   int                        `json:"ntok"`
	Salt     string                     `json:"salt"`
	Hit      int                        `json:"tok"`
	Hashes   int                        `json:"hashes"`
	Computed int                        `json:"computed"`
	Blocks   []int                      `json:"blocks"`
	External int                        `json:"external"`
	New      []string                   `json:"new"`
	Cached   [][4]json.RawMessage       `json:"cached"`
	Sched    map[string]int             `json:"sched"`
	Out      json.RawMessage            `json:"out"`
	Calls    json.RawMessage            `json:"calls"`
	Tracker  json.RawMessage            `json:"t"`
	Trackers map[string]json.RawMessage `json:"trk"`
}

type script struct {
	BlockTokens int     `json:"bs"`
	Chunk       int     `json:"chunk"` // blocks
	Events      []event `json:"events"`
}

// player runs a script through a Scheduler.
type player struct {
	scheduler *connector.Scheduler
	cache     *fakeCache
	block     int
	requests  map[string]*connector.Request
}

func newPlayer(s *script, o connector.SchedulerOptions) (*player, error) {
	p := &player{block: s.BlockTokens, cache: &fakeCache{results: map[string]int{}}, requests: map[string]*connector.Request{}}
	o.BlockTokens, o.ChunkTokens = s.BlockTokens, s.BlockTokens*s.Chunk
	var err error
	p.scheduler, err = connector.NewScheduler(p.cache, o)
	return p, err
}

var errScript = errors.New("bad script")

// play carries one event out. out is what the vectors write for its result, nil
// for nothing.
func (p *player) play(e *event) (out any, err error) {
	r := p.requests[e.Req]
	if e.Op != "new" && e.Op != "step" && e.Op != "lookup_result" && r == nil {
		return nil, errScript
	}
	switch e.Op {
	case "new":
		r = &connector.Request{ID: e.Req, Tokens: make([]uint32, e.Tokens), Hashes: e.Tokens / p.block, Salt: e.Salt}
		p.requests[e.Req] = r
	case "lookup_result":
		p.cache.results[e.Req] = e.Hit
	case "grow":
		r.Tokens = append(r.Tokens, make([]uint32, max(0, e.Tokens-len(r.Tokens)))...)
		r.Hashes = e.Hashes
	case "preempt":
		r.Preempted = true
	case "match":
		m, err := p.scheduler.Match(r, e.Computed)
		if err != nil {
			return nil, err
		}
		if m.Pending {
			return []any{nil, m.Async}, nil
		}
		return []any{m.Tokens, m.Async}, nil
	case "alloc":
		return nil, p.scheduler.Allocated(r, [][]int{e.Blocks}, e.External)
	case "step":
		return p.step(e)
	case "finish":
		f, err := p.scheduler.Finish(r)
		return []any{f.KeepBlocks, nil}, err
	default:
		return nil, errScript
	}
	return nil, nil
}

func (p *player) step(e *event) (any, error) {
	s := connector.Step{Scheduled: e.Sched}
	for _, id := range e.New {
		s.New = append(s.New, connector.NewRequest{ID: id})
	}
	for _, raw := range e.Cached {
		var (
			c       connector.CachedRequest
			ids     []int
			resumed int
		)
		if err := errors.Join(json.Unmarshal(raw[0], &c.ID), json.Unmarshal(raw[1], &ids), json.Unmarshal(raw[2], &resumed), json.Unmarshal(raw[3], &c.Computed)); err != nil {
			return nil, fmt.Errorf("%w: %w", errScript, err)
		}
		if ids != nil {
			c.NewBlocks = [][]int{ids}
		}
		c.Resumed = resumed != 0
		s.Cached = append(s.Cached, c)
	}
	ops, err := p.scheduler.Step(&s)
	if err != nil {
		return nil, err
	}
	for _, c := range s.Cached {
		if r := p.requests[c.ID]; r != nil {
			r.Preempted = false
		}
	}
	list := []any{}
	for _, op := range ops {
		list = append(list, []any{op.RequestID, op.Direction.String(), op.Start, op.End, op.SkipFirst, op.Blocks[0], len(op.Tokens)})
	}
	return list, nil
}

func (p *player) info(id string) any {
	i, ok := p.scheduler.Info(id)
	if !ok {
		return nil
	}
	return []any{i.State.String(), i.Scheduled, i.StoredBlocks, i.VLLMHitBlocks, i.CacheHitBlocks, i.Blocks}
}

// equal compares got with recorded JSON.
func equal(t *testing.T, got any, want json.RawMessage) bool {
	t.Helper()
	b, err := json.Marshal(got)
	if err != nil {
		t.Fatal(err)
	}
	if len(want) == 0 {
		want = json.RawMessage("null")
	}
	if bytes.Equal(b, want) {
		return true
	}
	var g, w any // the same in another spelling
	if err := errors.Join(json.Unmarshal(b, &g), json.Unmarshal(want, &w)); err != nil {
		t.Fatal(err)
	}
	return reflect.DeepEqual(g, w)
}

// Every recorded event of the original classes: answers, calls of the cache, and
// the contents of the trackers.
func TestGolden(t *testing.T) {
	f := func(file string, r connector.Release) {
		t.Helper()
		var doc struct{ Cases []script }
		testkit.ReadVector(t, "lmcache-tracker/"+file, &doc)
		events, ops := 0, 0
		for i := range doc.Cases {
			p, err := newPlayer(&doc.Cases[i], connector.SchedulerOptions{Release: r})
			if err != nil {
				t.Fatal(err)
			}
			for j := range doc.Cases[i].Events {
				e := &doc.Cases[i].Events[j]
				events++
				if !check(t, p, e) {
					t.Fatalf("%s: case %d, event %d", file, i, j)
				}
			}
			s := p.scheduler.Stats()
			ops += int(s.Stores + s.Retrieves)
			if s.Live != p.scheduler.Len() {
				t.Fatalf("%s: case %d: %d live, Len %d", file, i, s.Live, p.scheduler.Len())
			}
		}
		if len(doc.Cases) == 0 || ops == 0 {
			t.Fatalf("%s: no cases", file)
		}
		t.Logf("%s: %d cases, %d events, %d operations", file, len(doc.Cases), events, ops)
	}
	f("tracker-seed.json", connector.VLLM018)
	f("tracker-v0330.json", connector.VLLM033)
}

// check plays one event and compares all that is recorded about it.
func check(t *testing.T, p *player, e *event) bool {
	t.Helper()
	out, err := p.play(e)
	if err != nil {
		var refusal *connector.Error
		if !errors.As(err, &refusal) {
			t.Errorf("%s: %v", e.Op, err)
			return false
		}
		out = map[string]any{"err": refusal.Class, "msg": refusal.Text}
	}
	ok := true
	if !equal(t, out, e.Out) {
		t.Errorf("%s %s: %v, want %s", e.Op, e.Req, out, e.Out)
		ok = false
	}
	var calls any
	if len(p.cache.calls) > 0 {
		calls = p.cache.calls
	}
	if !equal(t, calls, e.Calls) {
		t.Errorf("%s %s: calls %v, want %s", e.Op, e.Req, calls, e.Calls)
		ok = false
	}
	p.cache.calls = nil
	switch e.Op {
	case "match", "alloc", "finish":
		if got := p.info(e.Req); !equal(t, got, e.Tracker) {
			t.Errorf("%s %s: tracker %v, want %s", e.Op, e.Req, got, e.Tracker)
			ok = false
		}
	case "step":
		if len(e.Trackers) != p.scheduler.Len() {
			t.Errorf("%d trackers, want %d", p.scheduler.Len(), len(e.Trackers))
			ok = false
		}
		for id, want := range e.Trackers {
			if got := p.info(id); !equal(t, got, want) {
				t.Errorf("after step: tracker %s %v, want %s", id, got, want)
				ok = false
			}
		}
	}
	return ok
}
