// SPDX-License-Identifier: Apache-2.0

package status

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/server/explain"
)

func request(id string) *explain.Explanation {
	return &explain.Explanation{
		Kept: 7, Advice: map[string]explain.Advice{"evicted": {What: "evicted", Do: "a larger pool"}},
		Lookups: []explain.Lookup{{
			At: "2026-11-20T09:12:44.81Z", Request: id, Model: "m", Salt: "green", AskedTokens: 1024, HitTokens: 256, Reason: "evicted", Tags: "team=search",
			Text: "256 of 1024 tokens hit; the next chunk: evicted, 12.41s before, to make room for uid 1000",
		}},
		Requests: []explain.Timeline{{
			Request: id, Model: "m", Salt: "green", AskedTokens: 1024, HitTokens: 256, BelowTokens: 128, Began: "2026-11-20T09:12:44.8Z", Spans: []explain.Span{
				{Operation: "lookup", FromMS: 0, MS: 0.02, Count: 1},
				{Operation: "wait", FromMS: 0.02, MS: 1.5, Count: 1},
				{Operation: "query_prefetch_status", FromMS: 1.52, MS: 0.1, Count: 3},
				{Operation: "prepare_retrieve", FromMS: 2, MS: 0.1, Count: 1},
				{Operation: "commit_retrieve", FromMS: 5, MS: 0.25, Count: 1},
				{Operation: "end_session", FromMS: 10, MS: 0.01, Count: 1},
			}, More: 2,
		}},
	}
}

// The output of kvasir explain REQUEST, to the letter.
func TestOneRequest(t *testing.T) {
	f := func(edit func(*explain.Explanation), width int, want string) {
		t.Helper()
		got := request("chat-1")
		edit(got)
		var b strings.Builder
		if err := printRequest(&b, got, "chat-1", width); err != nil || b.String() != want {
			t.Errorf("%v\n%s\nwant\n%s", err, b.String(), want)
		}
	}
	const ended = `2026-11-20T09:12:44.81Z  chat-1  m (salt "green")  team=search
  256 of 1024 tokens hit; the next chunk: evicted, 12.41s before, to make room for uid 1000
`
	const advice = `
What to do:
- evicted
  a larger pool
`
	f(func(*explain.Explanation) {}, 100, ended+`
What it asked for, 10.0 ms from 2026-11-20T09:12:44.8Z on:
  what                             at ms        ms  0 to 10.0 ms
  lookup                            0.00      0.02  █
  waits for tiers or checksums      0.02      1.50  ███████
  query_prefetch_status x 3         1.52      0.10         █
  prepare_retrieve                  2.00      0.10            █
  the engine copies                 2.10      2.90            ██████████████
  commit_retrieve                   5.00      0.25                          █
  end_session                      10.00      0.01                                                 █
  and 2 more
`+advice)
	f(func(e *explain.Explanation) { e.Requests[0].Spans, e.Requests[0].More = e.Requests[0].Spans[:2], 0 }, 60, ended+`
What it asked for, 1.5 ms from 2026-11-20T09:12:44.8Z on:
  what                             at ms        ms
  lookup                            0.00      0.02
  waits for tiers or checksums      0.02      1.50
`+advice)
	f(func(e *explain.Explanation) { e.Requests = nil }, 100, ended+"\nWhat chat-1 asked for is forgotten: the last 1024 requests are remembered.\n"+advice)

	// No lookup of the request that found less is remembered: the text says why.
	for _, v := range []struct {
		asked, hit int
		want       string
	}{
		{1024, 1024, "  1024 of 1024 tokens hit, 128 of them from tiers\n  it found all that it asked for\n"},
		{0, 0, ", 128 of them from tiers\n  it looked up no whole chunk\n"},
		{1024, 256, "  256 of 1024 tokens hit, 128 of them from tiers\n  why it found no more is forgotten: 7 lookups are remembered that found less than they asked for\n"},
	} {
		f(func(e *explain.Explanation) {
			e.Lookups = nil
			e.Requests[0].AskedTokens, e.Requests[0].HitTokens, e.Requests[0].Spans, e.Requests[0].More = v.asked, v.hit, e.Requests[0].Spans[:1], 0
		}, 100, `2026-11-20T09:12:44.8Z  chat-1  m (salt "green")`+v.want+`
What it asked for, 0.0 ms:
  what                             at ms        ms  0 to 0.0 ms
  lookup                            0.00      0.02  `+strings.Repeat("█", 48)+"\n")
	}
}

// The engine copies between a prepare and its commit, whatever other operations come between them. Each commit has one copy.
func TestTheEngineCopies(t *testing.T) {
	f := func(want string, operations ...string) {
		t.Helper()
		var r explain.Timeline
		for i, o := range operations {
			r.Spans = append(r.Spans, explain.Span{Operation: o, FromMS: float64(10 * i), MS: 1, Count: 1})
		}
		var got []string
		for _, s := range stepsOf(&r) {
			if s.name == "the engine copies" {
				got = append(got, fmt.Sprintf("%g+%g", s.from, s.ms))
			}
		}
		if text := strings.Join(got, " "); text != want {
			t.Errorf("%v: %q, want %q", operations, text, want)
		}
	}
	f("1+9", "prepare_store", "commit_store")
	f("1+19", "prepare_retrieve", "free_lookup_locks", "commit_retrieve")
	f("11+9 1+29", "prepare_retrieve", "prepare_store", "commit_store", "commit_retrieve")
	f("1+9", "prepare_store", "commit_store", "lookup", "commit_store")
	f("", "commit_store", "prepare_store", "prepare_retrieve", "end_session")
	f("", "prepare_retrieve", "commit_store")
}

// Impossible figures draw nothing beyond the line, and cause no panic.
func TestBars(t *testing.T) {
	f := func(from, to, all float64, want string) {
		t.Helper()
		if got := span(from, to, all, 10); got != want {
			t.Errorf("%g to %g of %g: %q, want %q", from, to, all, got, want)
		}
	}
	f(0, 10, 10, "██████████")
	f(5, 10, 10, "     █████")
	f(10, 10, 10, "         █")
	f(0, 0, 10, "█")
	f(-5, 1e9, 10, "██████████")
	f(7, 3, 10, "       █")
	f(0, 0, 0, "")
	big := 1.7e308
	f(0, 1, big+big, "")
	for _, ms := range []float64{big, -big} {
		rows := waterfall(&explain.Timeline{Spans: []explain.Span{{Operation: "lookup", FromMS: ms, MS: ms}, {Operation: "x", FromMS: 1, MS: -ms}}}, 80)
		if len(rows) != 3 {
			t.Errorf("%q", rows)
		}
	}
	if got := fmt.Sprint(wrap("aa bb cc dd ee ff gg hh ii jj kk", 12)); got != "[  aa bb cc   dd ee ff   gg hh ii jj kk]" {
		t.Error(got)
	}
	if got := wrap(strings.Repeat("x", 20), 12); len(got) != 2 || got[0] != "  xxxxxxxxxx" {
		t.Errorf("%q", got)
	}
}
