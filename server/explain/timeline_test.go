// SPDX-License-Identifier: Apache-2.0

package explain_test

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/server/explain"
	"github.com/kvasir-kv/kvasir/server/lookup"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/tier"
)

func advise(miss.Reason) string { return "" }

// A request is shown by its spans, in order. Equal operations that follow each other are one span, and a lookup that waited has one more.
func TestTimeline(t *testing.T) {
	b := explain.New(tier.NewNames())
	start := time.Now()
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	took := func(op string, from, to int) { b.Took(op, []byte("r"), at(from), at(to)) }
	ask := func(id string) explain.Timeline {
		t.Helper()
		got := b.Explain(id, 20, advise).Requests
		if len(got) != 1 {
			t.Fatalf("%d timelines", len(got))
		}
		return got[0]
	}
	spans := func(l explain.Timeline) (out string) {
		for _, s := range l.Spans {
			if s.Operation == explain.WaitSpan {
				s.MS = 0 // until now
			}
			out += fmt.Sprintf("%s %g+%g x%d, ", s.Operation, s.FromMS, s.MS, s.Count)
		}
		return out
	}
	took("lookup", 0, 2)
	took("query_prefetch_status", 3, 4)
	took("query_prefetch_status", 8, 9)
	b.Lookup(&lookup.Outcome{
		Request: []byte("r"), Model: []byte("m"), Salt: []byte("green"), ChunkTokens: 256, Searched: true,
		LookupResult: store.LookupResult{State: store.Ready, Asked: 4, Hit: 4, Below: 3, Waited: true},
	})
	took("prepare_retrieve", 10, 11)
	took("commit_retrieve", 20, 21)
	took("end_session", 30, 31)
	took("commit_store", 32, 33) // a worker may still be at it
	l := ask("r")
	if want := "lookup 0+2 x1, query_prefetch_status 3+6 x2, wait 2+0 x1, prepare_retrieve 10+1 x1, commit_retrieve 20+1 x1, end_session 30+1 x1, commit_store 32+1 x1, "; spans(l) != want {
		t.Errorf("got  %s\nwant %s", spans(l), want)
	}
	if l.Request != "r" || l.Model != "m" || l.Salt != "green" || l.AskedTokens != 1024 || l.HitTokens != 1024 || l.BelowTokens != 768 || l.Began != start.UTC().Format("2006-01-02T15:04:05.000Z07:00") {
		t.Errorf("%+v", l)
	}
	took("lookup", 100, 101) // the same id again
	if l := ask("r"); spans(l) != "lookup 0+1 x1, " || l.HitTokens != 0 {
		t.Errorf("another request: %+v", l)
	}
	b.Took("noop", nil, start, start)
	if n := len(b.Requests(20)); n != 1 {
		t.Errorf("%d requests after one without an id", n)
	}
}

// What is remembered is bounded: the newest requests, 24 spans of each, parts of long ids, and the memory of all.
func TestTimelinesAreBounded(t *testing.T) {
	b := explain.New(tier.NewNames())
	heap := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before, now := heap(), time.Now()
	id := func(i int) []byte { return fmt.Appendf(nil, "%s-%d", strings.Repeat("x", 100), i) }
	const n = 3 * explain.MaxTimelines
	for i := range n {
		for j := range 2 * explain.MaxSpans {
			b.Took([]string{"prepare_store", "commit_store"}[j%2], id(i), now, now)
		}
	}
	if grown := heap() - before; grown > 3<<19 {
		t.Errorf("%d requests take %d bytes", explain.MaxTimelines, grown)
	}
	got := b.Requests(n)
	if len(got) != explain.MaxTimelines || got[0].Request != string(id(n-1)) || got[len(got)-1].Request != string(id(n-explain.MaxTimelines)) {
		t.Errorf("%d are remembered", len(got))
	}
	if len(got[0].Spans) != explain.MaxSpans || got[0].More != explain.MaxSpans {
		t.Errorf("%d spans, %d more", len(got[0].Spans), got[0].More)
	}
	if len(b.Explain(string(id(0)), 1, advise).Requests) != 0 || len(b.Requests(3)) != 3 {
		t.Error("what is forgotten is told")
	}
	long := strings.Repeat("y", 4096)
	b.Took("lookup", []byte(long), now, now)
	if got := b.Explain(long, 1, advise).Requests; len(got) != 1 || len(got[0].Request) != 128 {
		t.Errorf("a long id: %+v", got)
	}
	known := id(n - 1)
	if a := testing.AllocsPerRun(100, func() { b.Took("lookup", known, now, now) }); a > 0 {
		t.Errorf("%v allocations", a)
	}
}

// What a node pays for each answer: a request with eight of them.
func BenchmarkTook(b *testing.B) {
	book, now := explain.New(tier.NewNames()), time.Now()
	names := []string{"lookup", "wait_prefetch_status", "prepare_retrieve", "commit_retrieve", "prepare_store", "commit_store", "free_lookup_locks", "end_session"}
	id := make([]byte, 0, 64)
	for i := 0; b.Loop(); i++ {
		id = fmt.Appendf(id[:0], "cmpl-%032d", i/len(names))
		book.Took(names[i%len(names)], id, now, now)
	}
}
