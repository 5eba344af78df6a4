// SPDX-License-Identifier: Apache-2.0

package scheduler_test

import (
	"encoding/json"
	"errors"
	"fmt"
	mathbits "math/bits"
	"reflect"
	"slices"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv/coordinator"
	"github.com/kvasir-kv/kvasir/mooncake/scheduler"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
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

func (s *script) options(release wire.Release, host string) (o scheduler.Options, err error) {
	o = scheduler.Options{NoHybrid: s.Env.HMAOff != 0, Release: release}
	if release == 13 {
		o.Pairing = scheduler.RequestIDs(host, 8998+s.Env.DP*s.Env.TP)
	}
	for _, g := range s.Env.Groups {
		kind, ok := map[string]coordinator.Kind{"full": coordinator.Full, "swa": coordinator.SlidingWindow, "mamba": coordinator.Mamba}[g.T]
		if !ok {
			return o, fmt.Errorf("group %q", g.T)
		}
		o.Groups = append(o.Groups, scheduler.CacheGroup{Group: coordinator.Group{Kind: kind, Block: g.BS, Window: g.Win}, NoTransfer: g.Xfer != nil && *g.Xfer == 0})
	}
	o.Role, err = wire.ParseRole(s.Env.Role)
	return o, err
}

var statuses = map[string]scheduler.RequestStatus{
	"FINISHED_LENGTH_CAPPED": scheduler.LengthCapped, "FINISHED_STOPPED": scheduler.Stopped, "FINISHED_ABORTED": scheduler.Aborted,
}

// player runs a script through a Scheduler.
type player struct {
	sched    *scheduler.Scheduler
	release  wire.Release // whose form the results have
	requests map[string]*scheduler.Request
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
		params, err := wire.ParseKVTransferParams(e.Params)
		if err != nil {
			return nil, errors.Join(errScript, err)
		}
		r = &scheduler.Request{ID: e.Req, PromptTokens: e.Tokens, MaxTokens: 64, Params: params, SkipPrefixCache: e.Skip != 0}
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
		if p.release == 13 {
			return meta013(m), nil
		}
		return meta(m), nil
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

func meta013(m *wire.Metadata) any {
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

func meta(m *wire.Metadata) any {
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
func equal(t *testing.T, got any, want json.RawMessage, report func(string, ...any)) bool {
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
	report("%s\nwant %s", b, want)
	return false
}

var recorded = map[wire.Release]string{13: "scheduler-v0130.json", 33: "scheduler-v0330.json"}

// scripts reads what was recorded of a release.
func scripts(t *testing.T, release wire.Release) (list []script, host string) {
	t.Helper()
	var doc struct {
		Host  string `json:"self_host"`
		Cases []script
	}
	testkit.ReadVector(t, "mooncake-connector/"+recorded[release], &doc)
	if len(doc.Cases) == 0 {
		t.Fatal("no cases")
	}
	return doc.Cases, doc.Host
}

// Every recorded event of the schedulers of vLLM 0.13.0 and 0.33.0: answers,
// refusals with their texts, params afterwards, and the metadata for the workers.
func TestSchedulerGolden(t *testing.T) {
	for release := range recorded {
		cases, host := scripts(t, release)
		events, refused := 0, 0
		for i := range cases {
			at, n := play(t, &cases[i], release, host, all(release), t.Errorf)
			if refused += n; at < len(cases[i].Events) {
				t.Fatalf("0.%d: case %d, event %d", release, i, at)
			}
			events += at
		}
		if refused == 0 {
			t.Fatalf("0.%d: %d cases, no refusal", release, len(cases))
		}
		t.Logf("0.%d: %d cases, %d events, %d refusals", release, len(cases), events, refused)
	}
}

func all(r wire.Release) (rules uint32) {
	bits, _, _ := scheduler.Rules(r)
	for _, b := range bits {
		rules |= b
	}
	return rules
}

// play runs a script of a release through a Scheduler that follows rules, up to the
// first difference.
func play(t *testing.T, c *script, of wire.Release, host string, rules uint32, report func(string, ...any)) (events, refused int) {
	t.Helper()
	o, err := c.options(of, host)
	if err != nil {
		t.Fatal(err)
	}
	s, err := scheduler.New(o)
	if err != nil {
		t.Fatal(err)
	}
	s.Follow(rules)
	p := &player{sched: s, release: of, requests: map[string]*scheduler.Request{}}
	for j := range c.Events {
		if !check(t, p, &c.Events[j], &refused, report) {
			return j, refused
		}
	}
	return len(c.Events), refused
}

func quiet(string, ...any) {}

// Every rule of a release is needed: without it some recorded event is decided otherwise.
func TestEveryRuleIsSeen(t *testing.T) {
	for release := range recorded {
		cases, host := scripts(t, release)
		bits, does, unseen := scheduler.Rules(release)
		for i, b := range bits {
			seen := slices.IndexFunc(cases, func(c script) bool {
				at, _ := play(t, &c, release, host, all(release)&^b, quiet)
				return at < len(c.Events)
			})
			if (seen < 0) != unseen[i] {
				t.Errorf("0.%d: case %d of %d (-1: none) shows that %s", release, seen, len(cases), does[i])
			}
		}
	}
}

// Where we decide otherwise than a release, a minimal set of the table's rules says why: with it the case goes as it
// was recorded, and without any one of its rules it does not. Some rules show only together, so the search starts from
// all rules and removes those that the case does not need.
func TestDeparturesAreRules(t *testing.T) {
	for release := range recorded {
		cases, host := scripts(t, release)
		bits, _, _ := scheduler.Rules(release)
		differ, most := 0, 0
		for i := range testkit.Volume(len(cases)) { // one goroutine: nothing races
			passes := func(rules uint32) bool {
				at, _ := play(t, &cases[i], release, host, rules, quiet)
				return at == len(cases[i].Events)
			}
			if passes(0) {
				continue
			}
			differ++
			rules := all(release)
			if !passes(rules) {
				t.Fatalf("0.%d: case %d: all rules together do not explain what we decide", release, i)
			}
			for removed := true; removed; { // until each rule that is left is needed: a rule may become superfluous once another one is removed
				removed = false
				for _, b := range bits {
					if rules&b != 0 && passes(rules&^b) {
						rules, removed = rules&^b, true
					}
				}
			}
			most = max(most, mathbits.OnesCount32(rules))
		}
		if differ == 0 {
			t.Errorf("0.%d: no case shows a rule", release)
		}
		t.Logf("0.%d: ours differ in %d of %d cases, by %d rules at most", release, differ, len(cases), most)
	}
}

// check plays one event and compares all that is recorded about it.
func check(t *testing.T, p *player, e *event, refused *int, report func(string, ...any)) bool {
	t.Helper()
	out, err := p.play(e)
	if err != nil {
		var refusal *wire.Error
		if !errors.As(err, &refusal) {
			report("%s: %v", e.Op, err)
			return false
		}
		*refused++
		out = object{"err": refusal.Class, "msg": refusal.Text}
	}
	ok := equal(t, out, e.Out, report)
	r := p.requests[e.Req]
	switch e.Op {
	case "new":
		if len(e.After) > 0 {
			ok = equal(t, object{"ntok": r.PromptTokens, "max_tokens": r.MaxTokens, "params": r.Params}, e.After, report) && ok
		}
	case "alloc", "finish":
		ok = equal(t, r.Params, e.Params, report) && ok
	}
	return ok
}
