package mooncake_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"testing"

	"github.com/kvasir-kv/kvasir/coordinator"
	"github.com/kvasir-kv/kvasir/internal/vectors"
	"github.com/kvasir-kv/kvasir/mooncake"
)

// event is one line of a recorded script.
type event struct {
	Op       string          `json:"op"`
	Req      string          `json:"req"`
	Tokens   int             `json:"ntok"`
	Params   json.RawMessage `json:"params"`
	Skip     int             `json:"skip"`
	After    json.RawMessage `json:"after"`
	Computed int             `json:"computed"`
	Unhashed [][]int         `json:"unhashed"`
	External int             `json:"external"`
	Status   string          `json:"status"`
	Blocks   [][]int         `json:"blocks"`
	Out      json.RawMessage `json:"out"`
}

type script struct {
	Env struct {
		Role   string
		Groups []struct {
			T    string
			BS   int
			Win  int
			Xfer *int
		}
		HMAOff int `json:"hma_off"`
		DP, TP int
	}
	Events []event
}

func (s *script) options(d mooncake.Dialect, host string) (o mooncake.SchedulerOptions, err error) {
	o = mooncake.SchedulerOptions{Dialect: d, NoHybrid: s.Env.HMAOff != 0, Host: host, Port: mooncake.SidePortV1(8998, s.Env.DP, s.Env.TP, 0)}
	for _, g := range s.Env.Groups {
		kind, ok := map[string]coordinator.Kind{"full": coordinator.Full, "swa": coordinator.SlidingWindow, "mamba": coordinator.Mamba}[g.T]
		if !ok {
			return o, fmt.Errorf("group %q", g.T)
		}
		o.Groups = append(o.Groups, mooncake.CacheGroup{Group: coordinator.Group{Kind: kind, Block: g.BS, Window: g.Win}, NoTransfer: g.Xfer != nil && *g.Xfer == 0})
	}
	o.Role, err = mooncake.ParseRole(s.Env.Role)
	return o, err
}

var statuses = map[string]mooncake.RequestStatus{
	"FINISHED_LENGTH_CAPPED": mooncake.LengthCapped, "FINISHED_STOPPED": mooncake.Stopped, "FINISHED_ABORTED": mooncake.Aborted,
}

// player runs a script through a Scheduler.
type player struct {
	sched    *mooncake.Scheduler
	dialect  mooncake.Dialect
	requests map[string]*mooncake.Request
}

var errScript = errors.New("bad script")

// play carries one event out and returns what the vectors write for its result.
func (p *player) play(e *event) (any, error) {
	r := p.requests[e.Req]
	if r == nil && e.Op != "new" && e.Op != "build" {
		return nil, errScript
	}
	switch e.Op {
	case "new":
		params, err := mooncake.ParseKVTransferParams(e.Params)
		if err != nil {
			return nil, errors.Join(errScript, err)
		}
		r = &mooncake.Request{ID: e.Req, PromptTokens: e.Tokens, MaxTokens: 64, Params: params, SkipPrefixCache: e.Skip != 0}
		p.requests[e.Req] = r
		p.sched.NewRequest(r)
		return nil, nil
	case "match":
		m, err := p.sched.Match(r, e.Computed)
		return []any{m.Tokens, m.Async}, err
	case "alloc":
		return nil, p.sched.Allocated(r, e.Unhashed, e.External)
	case "finish":
		status, ok := statuses[e.Status]
		if !ok {
			return nil, errScript
		}
		f, err := p.sched.Finish(r, status, e.Blocks)
		return []any{f.KeepBlocks, f.Params}, err
	case "build":
		m, err := p.sched.Build()
		if err != nil {
			return nil, err
		}
		if p.dialect == mooncake.V1 {
			return metaV1(m), nil
		}
		return metaV2(m), nil
	}
	return nil, errScript
}

type object map[string]any

// lists writes nil as [].
func lists[T any](l []T) any {
	if l == nil {
		return []T{}
	}
	return l
}

func first(l [][]int) any {
	if len(l) == 0 {
		return []int{}
	}
	return l[0]
}

func metaV1(m *mooncake.Metadata) any {
	recv, send := object{}, object{}
	for _, x := range m.Pulls {
		recv[x.RequestID] = object{"blocks": first(x.Blocks), "host": x.Host, "port": x.Port}
	}
	for _, x := range m.Sends {
		send[x.RequestID] = first(x.Blocks)
	}
	if len(m.NotProcessed) > 0 {
		send["not processed"] = m.NotProcessed // the original has none
	}
	return object{"recv": recv, "send": send}
}

func metaV2(m *mooncake.Metadata) any {
	recv, send := object{}, object{}
	for _, x := range m.Pulls {
		if recv[x.EngineID] == nil {
			recv[x.EngineID] = object{}
		}
		recv[x.EngineID].(object)[x.RequestID] = object{"blocks": lists(x.Blocks), "tid": x.TransferID, "boot": x.BootstrapAddr}
	}
	for _, x := range m.Sends {
		send[x.RequestID] = []any{x.TransferID, lists(x.Blocks)}
	}
	return object{"recv": recv, "send": send, "not_processed": lists(m.NotProcessed)}
}

// equal compares got, marshalled, with recorded JSON; no JSON is null.
func equal(t *testing.T, got any, want json.RawMessage) bool {
	t.Helper()
	b, err := json.Marshal(got)
	if err != nil {
		t.Fatal(err)
	}
	if len(want) == 0 {
		want = json.RawMessage("null")
	}
	var g, w any
	if err := errors.Join(json.Unmarshal(b, &g), json.Unmarshal(want, &w)); err != nil {
		t.Fatal(err)
	}
	if reflect.DeepEqual(g, w) {
		return true
	}
	t.Errorf("%s\nwant %s", b, want)
	return false
}

// Every recorded event of the schedulers of vLLM 0.13.0 and 0.33.0: answers,
// refusals with their texts, params afterwards, and what the workers are told.
func TestSchedulerGolden(t *testing.T) {
	f := func(file string, d mooncake.Dialect) {
		t.Helper()
		var doc struct {
			Host  string `json:"self_host"`
			Cases []script
		}
		vectors.Read(t, "mooncake-connector/"+file, &doc)
		events, refused := 0, 0
		for i := range doc.Cases {
			o, err := doc.Cases[i].options(d, doc.Host)
			if err != nil {
				t.Fatal(err)
			}
			o.Faithful = true
			s, err := mooncake.NewScheduler(o)
			if err != nil {
				t.Fatal(err)
			}
			p := &player{sched: s, dialect: d, requests: map[string]*mooncake.Request{}}
			for j := range doc.Cases[i].Events {
				events++
				if !check(t, p, &doc.Cases[i].Events[j], &refused) {
					t.Fatalf("%s: case %d, event %d", file, i, j)
				}
			}
		}
		if len(doc.Cases) == 0 || refused == 0 {
			t.Fatalf("%s: %d cases, %d refusals", file, len(doc.Cases), refused)
		}
		t.Logf("%s: %d cases, %d events, %d refusals", file, len(doc.Cases), events, refused)
	}
	f("scheduler-v0130.json", mooncake.V1)
	f("scheduler-v0330.json", mooncake.V2)
}

// check plays one event and compares all that is recorded about it.
func check(t *testing.T, p *player, e *event, refused *int) bool {
	t.Helper()
	out, err := p.play(e)
	if err != nil {
		var refusal *mooncake.Error
		if !errors.As(err, &refusal) {
			t.Errorf("%s: %v", e.Op, err)
			return false
		}
		*refused++
		out = object{"err": refusal.Class, "msg": refusal.Text}
	}
	ok := equal(t, out, e.Out)
	r := p.requests[e.Req]
	switch e.Op {
	case "new":
		if len(e.After) > 0 {
			ok = equal(t, object{"ntok": r.PromptTokens, "max_tokens": r.MaxTokens, "params": r.Params}, e.After) && ok
		}
	case "alloc", "finish":
		ok = equal(t, r.Params, e.Params) && ok
	}
	return ok
}
