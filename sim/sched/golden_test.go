// SPDX-License-Identifier: Apache-2.0

package sched_test

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"testing"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/sim/sched"
)

// recorded is one case: an engine with all its requests, and what vLLM's scheduler did.
type recorded struct {
	ID, Family string
	Cfg        struct {
		BlockSize   int     `json:"block_size"`
		Blocks      int     `json:"num_gpu_blocks"`
		MaxSeqs     int     `json:"max_num_seqs"`
		MaxTokens   int     `json:"max_num_batched_tokens"`
		MaxModel    int     `json:"max_model_len"`
		Caching     bool    `json:"caching"`
		Policy      string  `json:"policy"`
		Chunked     bool    `json:"chunked"`
		LongPrefill int     `json:"long_prefill"`
		Adaptive    bool    `json:"adaptive"`
		Watermark   float64 `json:"watermark"`
		ReserveFull bool    `json:"reserve_full"`
		MaxActive   int     `json:"max_active"`
		Async       bool    `json:"async"`
		Window      int     `json:"window"`
		Events      bool    `json:"events"`
		KV          *struct{ Role, Fail string }
	}
	Reqs []struct {
		P    [][2]int
		M    int
		Prio int
		Salt string
		Skip int
		Send int
		X    *struct{ N, A, None int }
	}
	Ops [][]json.RawMessage
	End struct{ Free, Cached []int }
}

// engine plays a case.
type engine struct {
	c    *recorded
	s    *sched.Scheduler
	reqs []*sched.Request
	none []int // how often the connector still answers that it does not know yet

	asked, allocated [][]any // of this pass
	names            map[sched.Hash]int
}

func index(r *sched.Request) int { return r.Data.(int) }

// token returns token t of request i.
func (e *engine) token(i, t int) int {
	for _, run := range e.c.Reqs[i].P {
		if t < run[1] {
			return run[0]<<16 + t
		}
		t -= run[1]
	}
	return (4096+i)<<16 + t
}

func (e *engine) hash(i, block int) sched.Hash {
	var parent sched.Hash
	if block > 0 {
		parent = e.hash(i, block-1)
	}
	b := slices.Clone(parent[:])
	if block == 0 {
		b = append(b, e.c.Reqs[i].Salt...)
	}
	size := e.c.Cfg.BlockSize
	for t := block * size; t < (block+1)*size; t++ {
		b = binary.LittleEndian.AppendUint32(b, uint32(e.token(i, t)))
	}
	return xxh3.Hash128(b).Bytes()
}

func (e *engine) Match(r *sched.Request, local int) (int, bool, bool) {
	i := index(r)
	x := e.c.Reqs[i].X
	switch {
	case x == nil:
		e.asked = append(e.asked, []any{i, local, 0, 0})
		return 0, false, true
	case e.none[i] > 0:
		e.none[i]--
		e.asked = append(e.asked, []any{i, local, nil, 0})
		return 0, false, false
	}
	n := max(0, x.N-local)
	async := n > 0 && x.A == 1
	e.asked = append(e.asked, []any{i, local, n, number(async)})
	return n, async, true
}

func number(b bool) int {
	if b {
		return 1
	}
	return 0
}

func (e *engine) Allocated(r *sched.Request, external int) {
	e.allocated = append(e.allocated, []any{index(r), external, len(r.Tables()[0])})
}

func (e *engine) Finish(r *sched.Request, why sched.Reason) bool {
	return why == sched.Length && e.c.Reqs[index(r)].Send == 1
}

// object leaves out what is empty, as the vectors do.
type object map[string]any

func (o object) put(key string, v any) {
	if reflect.ValueOf(v).Len() > 0 {
		o[key] = v
	}
}

func indices(list []*sched.Request) []int {
	out := make([]int, len(list))
	for i, r := range list {
		out[i] = index(r)
	}
	return out
}

func (e *engine) waiting() (holding, waiting []int) {
	return indices(e.s.Holding()), indices(e.s.Waiting())
}

func (e *engine) schedule() object {
	e.asked, e.allocated = nil, nil
	step := e.s.Schedule()
	o := object{"free": e.s.FreeBlocks()}
	var rows, hits [][]any
	for _, r := range step.Rows {
		blocks := r.Blocks[0]
		if blocks == nil {
			blocks = []sched.BlockID{}
		}
		rows = append(rows, []any{index(r.Request), r.Tokens, r.Before, r.Kind, blocks})
	}
	for _, h := range step.Hits {
		hits = append(hits, []any{index(h.Request), h.Tokens})
	}
	ended := indices(step.Ended)
	slices.Sort(ended)
	o.put("n", rows)
	o.put("h", hits)
	o.put("x", e.asked)
	o.put("a", e.allocated)
	o.put("p", indices(step.Preempted))
	o.put("f", ended)
	holding, waiting := e.waiting()
	o["q"] = []any{indices(e.s.Running()), holding, waiting}
	return o
}

func (e *engine) process(raw json.RawMessage) object {
	var in struct {
		RX, TX, FR []int
		Bad        []sched.BlockID
	}
	if err := json.Unmarshal(raw, &in); err != nil {
		panic(err)
	}
	ids := func(list []int) (out []string) {
		for _, i := range list {
			out = append(out, e.reqs[i].ID)
		}
		return out
	}
	r := e.s.Process(sched.Output{Arrived: ids(in.RX), Sent: ids(in.TX), Bad: in.Bad, Failed: ids(in.FR)})
	o := object{"free": e.s.FreeBlocks()}
	o.put("rx", in.RX)
	o.put("tx", in.TX)
	o.put("fr", in.FR)
	o.put("bad", in.Bad)
	o.put("t", indices(r.Tokens))
	var ended [][]any
	for _, d := range r.Ended {
		ended = append(ended, []any{index(d.Request), d.Reason.String()})
	}
	slices.SortFunc(ended, func(a, b []any) int { return a[0].(int) - b[0].(int) })
	o.put("d", ended)
	var events [][]any
	for _, v := range r.Events {
		events = append(events, e.event(&v))
	}
	o.put("e", events)
	return o
}

func (e *engine) name(h sched.Hash) int {
	n, ok := e.names[h]
	if !ok {
		n = len(e.names)
		e.names[h] = n
	}
	return n
}

func (e *engine) event(v *sched.Event) []any {
	switch v.Kind {
	case sched.Removed:
		return []any{"R", e.name(v.Hashes[0])}
	case sched.Cleared:
		return []any{"C"}
	}
	i, parent := index(v.Request), -1
	if v.Block > 0 {
		parent = e.name(e.hash(i, v.Block-1))
	}
	var names []int
	for _, h := range v.Hashes {
		names = append(names, e.name(h))
	}
	out := []any{"S", parent, names, e.token(i, v.Block*e.c.Cfg.BlockSize)}
	if salt := e.c.Reqs[i].Salt; salt != "" && v.Block == 0 {
		keys := make([]any, len(names))
		keys[0] = []string{salt}
		out = append(out, keys)
	}
	return out
}

// same compares what was decided with what is recorded.
func same(got any, want json.RawMessage) (string, bool) {
	b, err := json.Marshal(got)
	if err != nil {
		panic(err)
	}
	var g, w any
	if json.Unmarshal(b, &g) != nil || json.Unmarshal(want, &w) != nil {
		return string(b), false
	}
	return string(b), reflect.DeepEqual(g, w)
}

func newEngine(c *recorded) (*engine, error) {
	e := &engine{c: c, names: map[sched.Hash]int{}, none: make([]int, len(c.Reqs))}
	cfg := sched.Config{
		BlockTokens: c.Cfg.BlockSize, Blocks: c.Cfg.Blocks, MaxSeqs: c.Cfg.MaxSeqs, MaxActive: c.Cfg.MaxActive,
		MaxTokens: c.Cfg.MaxTokens, MaxModel: c.Cfg.MaxModel, Groups: []sched.Group{{Window: c.Cfg.Window}}, NoPrefixCache: !c.Cfg.Caching,
		Priority: c.Cfg.Policy == "priority", NoChunks: !c.Cfg.Chunked, LongPrefill: c.Cfg.LongPrefill, Adaptive: c.Cfg.Adaptive,
		Watermark: c.Cfg.Watermark, NoReserve: !c.Cfg.ReserveFull, Async: c.Cfg.Async, Events: c.Cfg.Events,
	}
	if kv := c.Cfg.KV; kv != nil {
		cfg.Connector, cfg.Recompute = e, kv.Fail == "recompute"
		cfg.Sends, cfg.Receives = kv.Role != "kv_consumer", kv.Role != "kv_producer"
	}
	for i := range c.Reqs {
		q := &c.Reqs[i]
		r := &sched.Request{ID: fmt.Sprint(i), MaxTokens: q.M, Priority: q.Prio, SkipCache: q.Skip == 1, Data: i}
		for _, run := range q.P {
			r.Prompt += run[1]
		}
		memo := map[int]sched.Hash{}
		r.Hash = func(block int) sched.Hash {
			h, ok := memo[block]
			if !ok {
				h = e.hash(i, block)
				memo[block] = h
			}
			return h
		}
		if q.X != nil {
			e.none[i] = q.X.None
		}
		e.reqs = append(e.reqs, r)
	}
	var err error
	e.s, err = sched.New(cfg)
	return e, err
}

// play runs a case up to the first difference, which it describes.
func play(c *recorded) (passes int, difference string) {
	e, err := newEngine(c)
	if err != nil {
		return 0, err.Error()
	}
	for n, op := range c.Ops {
		var name string
		if err := json.Unmarshal(op[0], &name); err != nil {
			return passes, err.Error()
		}
		var arg int
		_ = json.Unmarshal(op[1], &arg) // only where it is a number
		var got any
		want := op[len(op)-1]
		switch name {
		case "+":
			if err := e.s.Add(e.reqs[arg]); err != nil {
				return passes, err.Error()
			}
			continue
		case "-":
			e.s.Abort(e.reqs[arg].ID)
			got = e.s.FreeBlocks()
		case "c":
			preempted, ok := e.s.Reset(arg == 1)
			got = []any{number(ok), indices(preempted), e.s.FreeBlocks()}
			want = json.RawMessage(fmt.Sprintf("[%s,%s,%s]", op[2], op[3], op[4]))
		case "s":
			passes++
			got = e.schedule()
		case "u":
			got = e.process(op[1])
		default:
			return passes, "operation " + name
		}
		if text, ok := same(got, want); !ok {
			return passes, fmt.Sprintf("operation %d %s\n got %s\nwant %s", n, name, text, want)
		}
	}
	free, cached := e.s.Pool()
	if text, ok := same(object{"free": free, "cached": cached}, mustJSON(object{"free": c.End.Free, "cached": c.End.Cached})); !ok {
		return passes, "end: " + text
	}
	return passes, ""
}

func mustJSON(v any) json.RawMessage {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}

// Every recorded step of vLLM 0.32.0 is the same: the scheduled requests, their tokens and blocks, the preempted
// requests, the hits, the order, and the free queue at the end.
func TestGolden(t *testing.T) {
	var doc struct{ Cases []recorded }
	testkit.ReadVector(t, "vllm-scheduler/scheduler-v0320.json", &doc)
	passes, families := 0, map[string]int{}
	for i := range testkit.Volume(len(doc.Cases)) { // one goroutine: nothing races
		c := &doc.Cases[i]
		n, difference := play(c)
		if difference != "" {
			t.Errorf("%s %s: %s", c.ID, c.Family, difference)
		}
		passes += n
		families[c.Family]++
	}
	if len(doc.Cases) == 0 || passes == 0 {
		t.Fatal("no cases")
	}
	t.Logf("%d cases, %d passes: %v", len(doc.Cases), passes, families)
}
