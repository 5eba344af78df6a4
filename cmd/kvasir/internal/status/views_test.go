// SPDX-License-Identifier: Apache-2.0

package status_test

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/status"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/internal/transferlog"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/server/admin"
	"github.com/kvasir-kv/kvasir/server/explain"
)

// explained returns the fake's explanation of one request, which waited for a tier, loaded and stored.
func (f *fake) explained(id string) explain.Explanation {
	return explain.Explanation{
		Reasons: map[string]uint64{"evicted": 1}, Advice: map[string]explain.Advice{"evicted": {What: "evicted", Do: "a larger pool"}},
		Lookups: []explain.Lookup{{
			At: "2026-11-20T09:12:44.81Z", Request: id, Model: "m" + f.model, Salt: "green", AskedTokens: 1024, HitTokens: 256, Reason: "evicted",
			Text: "256 of 1024 tokens hit; the next chunk: evicted, 12.41s before, to make room for uid 1000" + f.model,
		}},
		Requests: []explain.Timeline{{
			Request: id, Model: "m" + f.model, Salt: "green", AskedTokens: 1024, HitTokens: 256, BelowTokens: 128, Began: "2026-11-20T09:12:44.81Z", Spans: []explain.Span{
				{Operation: "lookup", FromMS: 0, MS: 0.02, Count: 1},
				{Operation: "wait", FromMS: 0.02, MS: 1.5, Count: 1},
				{Operation: "query_prefetch_status", FromMS: 1.52, MS: 0.1, Count: 3},
				{Operation: "prepare_retrieve", FromMS: 2, MS: 0.1, Count: 1},
				{Operation: "commit_retrieve", FromMS: 5, MS: 0.25, Count: 1},
				{Operation: "prepare_store", FromMS: 7, MS: 0.1, Count: 1},
				{Operation: "commit_store", FromMS: 9, MS: 0.1, Count: 1},
				{Operation: "end_session", FromMS: 10, MS: 0.01, Count: 1},
			}, More: 2,
		}},
	}
}

// live returns the fake's answer to /now after n requests for /status.
func (f *fake) live(n uint64) admin.Live {
	quota, ttl := int64(1<<30), 1800.0
	e := admin.Live{AtMillis: int64(n), BelowTokens: 250 * n}
	for i := range max(2, f.many) {
		e.By = append(e.By, admin.Share{Model: "Qwen/Qwen2.5-7B" + f.model, Salt: []string{"", "green"}[i%2], Lookups: n, AskedTokens: uint64(1000*(i+1)) * n, HitTokens: uint64(750*(i+1))*n - 250*uint64(i), BelowTokens: 100 * n})
		e.Tenants = append(e.Tenants, admin.Tenant{Salt: []string{"_default", "green"}[i%2] + f.model, Quota: &quota, Bytes: quota / 2, EvictedBytes: 1 << 20, TTL: &ttl, PinLimit: 1 << 20, PinnedBytes: 4096, PinnedObjects: 1})
		id := fmt.Sprintf("chat-%d", i)
		r := f.explained(id)
		e.Requests = append(e.Requests, r.Requests[0])
		e.Slow = append(e.Slow, server.SlowRequest{Operation: "lookup", Request: id, Seconds: 0.0123, At: "2026-11-20T09:12:44Z"})
		r.Lookups[0].Request = "short-" + id
		e.Ended = append(e.Ended, r.Lookups[0])
	}
	e.PD = transfersOf(f, n)
	e.Slow[0].Request = "" // of an operation that has none
	e.Map.CellBytes = 1 << 20
	for i := range 240 {
		e.Map.Resident, e.Map.Staged, e.Map.Quarantined = append(e.Map.Resident, int64(i%60)<<15), append(e.Map.Staged, 0), append(e.Map.Quarantined, 0)
	}
	e.Map.Staged[61], e.Map.Quarantined[62] = 1, 1
	return e
}

// transfersOf are single transfers of each state, as relay and proxy see them.
func transfersOf(f *fake, n uint64) admin.Transfers {
	step := func(state transferlog.State, from, ms float64, bytes int64) transferlog.Step {
		return transferlog.Step{State: state, What: string(state), From: from, MS: ms, Bytes: bytes}
	}
	at := func(state transferlog.State, ms float64, steps ...transferlog.Step) transferlog.Transfer {
		return transferlog.Transfer{
			ID: "kvasir-01234567…", Request: "chat-1" + f.model, Model: "Qwen/Qwen2.5-7B" + f.model, From: "p0" + f.model, To: "http://10.0.0.2:8200", State: state, Steps: steps, MS: ms, Bytes: 64 << 20, Blocks: 64,
		}
	}
	sending := at(transferlog.Sending, 60, step(transferlog.Computing, 0, 40, 0), step(transferlog.Sending, 40, 20, 16<<20))
	done := at(transferlog.Done, 200, step(transferlog.Computing, 0, 100, 0), step(transferlog.Waiting, 100, 50, 0), step(transferlog.Sending, 150, 30, 64<<20), step(transferlog.Sending, 180, 20, 64<<20))
	done.Rate = 3.36
	failed, expired := at(transferlog.Failed, 3, step(transferlog.Computing, 0, 3, 0)), at(transferlog.Expired, 3, step(transferlog.Computing, 0, 3, 0))
	failed.Why, expired.Why = "mooncake: P does not know the transfer"+f.model, "D waited no longer"
	waits := at(transferlog.Waiting, 9, step(transferlog.Computing, 0, 4, 0), step(transferlog.Waiting, 4, 5, 0))
	waits.Bytes = 0
	out := admin.Transfers{Seen: []string{"proxy", "relay"}, Last: []transferlog.Transfer{sending, waits, done, failed, expired}}
	out.Engines = []bootstrap.EngineState{{ID: "p0" + f.model, Host: "10.0.0.1", Workers: 2, Shown: true, Heard: float64(n)}, {ID: "p1", Host: "10.0.0.3", Workers: 1, Why: "1 of 2 TP ranks are registered"}}
	for range f.many {
		out.Last = append(out.Last, done)
	}
	if f.blind {
		out.Seen, out.Last = []string{}, []transferlog.Transfer{}
	}
	return out
}

// parts are those of kvasir all, at work.
func parts(n uint64) map[string]map[string]float64 {
	v := float64(n)
	return map[string]map[string]float64{
		"relay": {
			"kvasir_relay_pulled_total": 12 * v, "kvasir_relay_pulled_bytes_total": 2e9 * v, "kvasir_relay_pushed_bytes_total": 4e9 * v, `kvasir_relay_served_total{from="p"}`: 12 * v,
			`kvasir_relay_served_total{from="memory"}`: 4 * v, "kvasir_relay_kept_transfers": 3, "kvasir_relay_kept_bytes": 1 << 20, "kvasir_relay_engines": 1,
		},
		"bootstrap": {"kvasir_bootstrap_engines": 2, "kvasir_bootstrap_engines_shown": 1, "kvasir_bootstrap_workers": 4, "kvasir_bootstrap_queries_total": 20 * v},
		"proxy": {
			`kvasir_proxy_engine_well{engine="http://a:1"}`: 1, `kvasir_proxy_engine_well{engine="http://b:1"}`: 0, `kvasir_proxy_engine_requests{engine="http://a:1"}`: 3,
			"kvasir_proxy_requests_in_flight": 3, "kvasir_proxy_requests_queued": 1, `kvasir_proxy_requests_total{outcome="ok"}`: 50 * v, `kvasir_proxy_requests_total{outcome="failed"}`: 1,
		},
	}
}

// Each view at 80 by 24 is as testdata/views.txt has it. UPDATE=1 writes that file.
func TestViews(t *testing.T) {
	var got strings.Builder
	f := func(name string, view status.View, keys string) {
		t.Helper()
		width := 80
		if strings.HasSuffix(name, ", wide") {
			width = 160
		}
		fake := &fake{edit: func(st *admin.Status) {
			n := st.Lookup.Lookups / 10
			st.Parts = parts(n)
			st.Workers = []server.WorkerStatus{{Model: "Qwen/Qwen2.5-7B", World: 2, Mode: "engine_driven", ChunkBytes: 14 << 20, SilentFor: 3}}
			st.Below.Tiers = []server.TierStatus{{Name: "fs", Hits: 30, Misses: 10, ReadBytes: 1 << 30, ReadRate: 1.5, WriteBytes: 2 << 30, WriteRate: 0.7, Late: 2}}
		}}
		lines := seeView(t, fake, view, keys, width, 24)
		if len(lines) != 24 {
			t.Errorf("%s: %d lines", name, len(lines))
		}
		fmt.Fprintf(&got, "--- %s\n", name)
		for _, line := range lines {
			if utf8.RuneCountInString(line) > width {
				t.Errorf("%s: wider than the terminal: %s", name, line)
			}
			got.WriteString(strings.TrimRight(line, " ") + "\n")
		}
	}
	f("overview", status.Overview, "")
	f("tenants, by a digit", status.Overview, "2")
	f("requests, the newest", status.Overview, "\t\t")
	f("requests, the next but one", status.Requests, "jj")
	f("slow, down twice", status.Slow, "jj")
	f("slow, down and Enter", status.Slow, "j\r")
	f("pool", status.Overview, "5")
	f("P→D", status.Overview, "\x80")
	f("P→D, wide", status.Transfers, "")
	f("keys", status.Overview, "?")
	const golden = "testdata/views.txt"
	if os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(golden, []byte(got.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	gotLines, wantLines := strings.Split(got.String(), "\n"), strings.Split(string(want), "\n")
	for i := range min(len(gotLines), len(wantLines)) {
		if gotLines[i] != wantLines[i] {
			t.Errorf("%s:%d\n%s\nnow\n%s", golden, i+1, wantLines[i], gotLines[i])
		}
	}
	if len(gotLines) != len(wantLines) {
		t.Errorf("%s has %d lines, now there are %d", golden, len(wantLines), len(gotLines))
	}
}

// Whatever names models have, however much there is to show and however small the terminal: every view fits, moves no
// cursor, and its last line has the keys.
func TestViewsFit(t *testing.T) {
	testkit.LongAlone(t)
	evil := "evil\x1b[2J\n模型" + strings.Repeat("x", 300)
	for _, keys := range []string{"1", "2", "3", "3jjjjj", "4", "4jjjjjjjjjjjjjjjjjjjjjjjj\r", "5", "6", "?"} {
		for _, size := range [][2]int{{80, 24}, {200, 60}, {40, 12}, {20, 5}, {20, 3}, {1, 1}} {
			lines := seeView(t, &fake{many: 40, model: evil, edit: func(st *admin.Status) {
				st.Parts = parts(1)
				st.Parts["proxy"][`kvasir_proxy_engine_well{engine="`+evil+`"}`] = 1
			}}, status.Overview, keys, size[0], size[1])
			if len(lines) > size[1] {
				t.Errorf("%q, %v: %d lines", keys, size, len(lines))
			}
			for _, line := range lines {
				if utf8.RuneCountInString(line) > size[0] || strings.ContainsAny(line, "\x1b\n\r\x00模") {
					t.Errorf("%q, %v: %q", keys, size, line)
				}
			}
			if last := lines[len(lines)-1]; size[0] >= 80 && !strings.Contains(last, "? keys  q quit") {
				t.Errorf("%q, %v: no keys in %q", keys, size, last)
			}
		}
	}
}

// A view without figures says why: an older server has no /now, or runs alone, or only with a registry.
func TestViewsWithoutFigures(t *testing.T) {
	f := func(fake *fake, keys, want string) {
		t.Helper()
		if got := strings.Join(seeView(t, fake, status.Overview, keys, 80, 24), "\n"); !strings.Contains(got, want) {
			t.Errorf("%q: no %q in\n%s", keys, want, got)
		}
	}
	f(&fake{old: true}, "1", "pool      [######......]")
	for _, keys := range []string{"2", "3", "3j", "4", "4j\r", "5"} {
		f(&fake{old: true}, keys, "it is of an older version")
	}
	f(&fake{}, "6", "the server runs alone: kvasir all runs")
	f(&fake{blind: true, edit: func(st *admin.Status) { st.Parts = parts(1) }}, "6", "the registry alone sees none: P sends straight to D")
	f(&fake{old: true, edit: func(st *admin.Status) { st.Parts = parts(1) }}, "6", "relay: P→D")
	f(&fake{}, "3jn", "one request: chat-0\n")
	f(&fake{}, "4\r", "[4 slow]") // the first has no id
	for name, want := range map[string]status.View{"overview": status.Overview, "slow": status.Slow, "pd": status.Transfers, "P→D": status.Transfers} {
		if got, ok := status.ParseView(name); !ok || got != want {
			t.Errorf("%s: %v, %v", name, got, ok)
		}
	}
	if _, ok := status.ParseView("nothing"); ok {
		t.Error("nothing is a view")
	}
}
