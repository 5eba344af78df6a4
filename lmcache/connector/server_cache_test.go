// SPDX-License-Identifier: Apache-2.0

package connector_test

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"log/slog"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/lmcache/connector"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// lookupServer finds three chunks of 8 tokens in every prompt, when it is let to,
// and writes its requests down.
type lookupServer struct {
	mu     sync.Mutex
	busy   bool // lookups are still running
	silent bool
	chunks int64 // that are found; 0: three
	seen   []string
}

func (s *lookupServer) serve(p *zmtp.Peer, m zmtp.Message) {
	s.mu.Lock()
	defer s.mu.Unlock()
	op, _ := lmcache.ParseOp(m[1])
	if s.silent {
		return
	}
	reply := [][]byte{m[0], m[1]}
	var k lmcache.KeyView
	switch op {
	case lmcache.OpPing:
		_ = p.Send(append(reply, lmcache.AppendBool(nil, true))...)
		return
	case lmcache.OpQueryPrefetchStatus:
		if !s.busy {
			reply = append(reply, lmcache.AppendInt(nil, cmp.Or(s.chunks, 3)))
		}
		_ = p.Send(reply...)
		return
	case lmcache.OpLookup, lmcache.OpFreeLookupLocks:
		_ = lmcache.NewMemo(8, 0).DecodeKey(m[2], &k)
		s.seen = append(s.seen, fmt.Sprintf("%v %s %d-%d %d of %d salt %q", op, k.RequestID, k.Start, k.End, k.Readers, k.WorldSize, k.Salt))
	case lmcache.OpEndSession:
		r, _ := new(lmcache.Decoder).Decode(nil, lmcache.Only(lmcache.Latest), op, m[2:])
		s.seen = append(s.seen, fmt.Sprintf("%v %s", op, r.(*lmcache.EndSessionRequest).RequestID))
	default:
		s.seen = append(s.seen, op.String())
	}
	_ = p.Send(reply...)
}

func (s *lookupServer) set(busy, silent bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.busy, s.silent = busy, silent
}

func (s *lookupServer) take() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	seen := s.seen
	s.seen = nil
	return seen
}

func newScheduler(t *testing.T, change func(*connector.ServerCacheOptions)) (*lookupServer, *connector.ServerCache) {
	t.Helper()
	s := &lookupServer{}
	quiet := slog.New(slog.NewTextHandler(io.Discard, nil))
	router := zmtp.NewRouter(s.serve, zmtp.RouterOptions{Log: quiet})
	addr, err := router.Listen(t.Context(), "tcp://127.0.0.1:*")
	if err != nil {
		t.Fatal(err)
	}
	c, err := lmcache.NewClient("tcp://" + addr.String())
	if err != nil {
		t.Fatal(err)
	}
	o := connector.ServerCacheOptions{
		Model: "m", Parallel: lmcache.Parallel{World: 4, TP: 4, MLA: true}, ChunkTokens: 8, NoHeartbeat: true, CallTimeout: 5 * time.Second, Log: quiet,
	}
	if change != nil {
		change(&o)
	}
	sch, err := connector.NewServerCache(c, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		sch.Close()
		_ = c.Close()
		router.Close()
	})
	return s, sch
}

func result(t *testing.T, s *connector.ServerCache, id string) (n int) {
	t.Helper()
	testkit.Eventually(t, "result for "+id, func() (ok bool) { n, ok = s.LookupResult(id); return ok })
	return n
}

func flush(t *testing.T, s *connector.ServerCache) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	if err := s.Flush(ctx); err != nil {
		t.Fatal(err)
	}
}

func expect(t *testing.T, s *lookupServer, want ...string) {
	t.Helper()
	var got []string
	for deadline := time.Now().Add(60 * time.Second); len(got) < len(want) && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		got = append(got, s.take()...)
	}
	if !slices.Equal(got, want) {
		t.Errorf("the server saw\n%q\nwant\n%q", got, want)
	}
}

// A lookup is sent once until it is cleaned up. Pins of a hit that was never reported are given
// back, before the session ends.
func TestScheduler(t *testing.T) {
	s, sch := newScheduler(t, nil)
	tokens := make([]uint32, 30)
	sch.SubmitLookup("a", tokens, "salt")
	sch.SubmitLookup("a", tokens, "salt")
	if n := result(t, sch, "a"); n != 24 {
		t.Errorf("hit %d", n)
	}
	sch.CleanupLookup("a")
	sch.FreeLookupLocks("a", tokens, 0, 19, "salt")
	sch.FreeLookupLocks("a", tokens, 16, 23, "salt") // no whole chunk
	sch.ReportBlockAllocations([]lmcache.BlockAllocation{{RequestID: "a"}})
	sch.EndSession("a")
	flush(t, sch)
	expect(t, s, `lookup a 0-24 4 of 1 salt "salt"`, `free_lookup_locks a 0-16 4 of 1 salt "salt"`, "report_block_allocation", "end_session a")

	sch.SubmitLookup("short", tokens[:7], "")
	if n := result(t, sch, "short"); n != 0 {
		t.Errorf("hit %d", n)
	}
	if _, ok := sch.LookupResult("never"); ok {
		t.Error("a result without a lookup")
	}

	// A lookup is given up while it runs, with and without the end of its session.
	s.set(true, false)
	sch.SubmitLookup("b", tokens, "")
	sch.SubmitLookup("c", tokens, "")
	testkit.Eventually(t, "lookups", func() bool { return len(s.seenNow()) == 2 })
	s.take()
	sch.CleanupLookup("b")
	sch.EndSession("c")
	flush(t, sch)
	expect(t, s)
	s.set(false, false)
	var got []string
	testkit.Eventually(t, "calls", func() bool { got = append(got, s.take()...); return len(got) >= 3 })
	slices.Sort(got)
	if want := []string{"end_session c", `free_lookup_locks b 0-24 4 of 1 salt ""`, `free_lookup_locks c 0-24 4 of 1 salt ""`}; !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	if st := sch.Stats(); st.Lookups != 3 || st.LookupTimes.Total() != 3 || !st.Healthy || st.LookupsFailed != 0 {
		t.Errorf("%+v", st)
	}
}

// A lookup at two servers has a result once both have answered. The hit is what both have. The pins of a longer hit beyond that are freed.
func TestHitOfSeveralServersIsWhatAllHave(t *testing.T) {
	s1, c1 := newScheduler(t, nil)
	s2, c2 := newScheduler(t, nil)
	s1.chunks = 2
	all := connector.NewServers(c1, c2)
	tokens := make([]uint32, 30)
	for _, late := range []*lookupServer{s1, s2} {
		late.set(true, false)
		all.SubmitLookup("a", tokens, "salt")
		all.SubmitLookup("a", tokens, "salt")
		testkit.Eventually(t, "lookups", func() bool { return len(s1.seenNow()) == 1 && len(s2.seenNow()) == 1 })
		if n, ok := all.LookupResult("a"); ok {
			t.Errorf("a hit of %d while a server looks", n)
		}
		late.set(false, false)
		var n int
		testkit.Eventually(t, "result", func() (ok bool) {
			if n, ok = all.LookupResult("a"); ok {
				return true
			}
			if err := all.Flush(t.Context()); err != nil {
				t.Fatal(err)
			}
			if seen := s2.seenNow(); len(seen) > 1 {
				t.Fatalf("pins are given back before there is a result: %q", seen)
			}
			return false
		})
		if again, ok := all.LookupResult("a"); n != 16 || again != 16 || !ok {
			t.Errorf("hits of %d and %d, %v", n, again, ok)
		}
		all.EndSession("a")
		if err := all.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		const lookup = `lookup a 0-24 4 of 1 salt "salt"`
		expect(t, s1, lookup, "end_session a")
		expect(t, s2, lookup, `free_lookup_locks a 16-24 4 of 1 salt "salt"`, "end_session a")
	}
	if _, ok := all.LookupResult("a"); ok {
		t.Error("a result after the session")
	}
}

// A request that ends while its lookup runs, as an aborted one does, ends its session at the server after the lookup. Another request of the
// same id, which comes meanwhile, is looked up after that.
func TestRequestEndsDuringItsLookup(t *testing.T) {
	s, sch := newScheduler(t, nil)
	track, err := connector.NewScheduler(sch, connector.SchedulerOptions{BlockTokens: 8, ChunkTokens: 8})
	if err != nil {
		t.Fatal(err)
	}
	s.set(true, false)
	r := &connector.Request{ID: "a", Tokens: make([]uint32, 30)}
	match := func() (m connector.Matched) {
		m, err := track.Match(r, 0)
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	match()
	testkit.Eventually(t, "lookup", func() bool { return len(s.seenNow()) == 1 })
	if _, err := track.Finish(r); err != nil {
		t.Fatal(err)
	}
	r = &connector.Request{ID: "a", Tokens: make([]uint32, 30)}
	match()
	flush(t, sch)
	lookup := `lookup a 0-24 4 of 1 salt ""`
	if got := s.seenNow(); !slices.Equal(got, []string{lookup}) {
		t.Errorf("%q while the lookup runs", got)
	}
	s.set(false, false)
	var m connector.Matched
	testkit.Eventually(t, "the second lookup", func() bool { m = match(); return !m.Pending })
	if m.Tokens != 24 {
		t.Errorf("%+v", m)
	}
	expect(t, s, lookup, `free_lookup_locks a 0-24 4 of 1 salt ""`, "end_session a", lookup)
}

func (s *lookupServer) seenNow() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.seen)
}

// An unhealthy server is not asked: lookups hit nothing, those in progress too.
func TestSchedulerUnhealthy(t *testing.T) {
	s, sch := newScheduler(t, func(o *connector.ServerCacheOptions) {
		o.NoHeartbeat, o.Heartbeat, o.MaxLookups = false, time.Second, 1 // a ping may take as long
	})
	tokens := make([]uint32, 30)
	s.set(true, false)
	sch.SubmitLookup("running", tokens, "")
	sch.SubmitLookup("one too many", tokens, "")
	if n, ok := sch.LookupResult("one too many"); n != 0 || !ok {
		t.Errorf("%d, %v", n, ok)
	}
	s.set(true, true)
	if n := result(t, sch, "running"); n != 0 {
		t.Errorf("hit %d", n)
	}
	if sch.Healthy() {
		t.Error("healthy")
	}
	sch.SubmitLookup("later", tokens, "")
	if n, ok := sch.LookupResult("later"); n != 0 || !ok {
		t.Errorf("%d, %v", n, ok)
	}
	s.take()
	sch.EndSession("later")
	s.set(false, false)
	testkit.Eventually(t, "healthy", sch.Healthy)
	sch.SubmitLookup("again", tokens, "")
	if n := result(t, sch, "again"); n != 24 {
		t.Errorf("hit %d", n)
	}
	for _, line := range s.take() {
		if line == "end_session later" {
			t.Error("an unhealthy server was told")
		}
	}
}

// names returns the metrics of a Stats struct.
func names(t *testing.T, stats any) (list []string) {
	t.Helper()
	var out strings.Builder
	if err := metrics.Write(&out, stats); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(out.String()) {
		if rest, ok := strings.CutPrefix(line, "# TYPE "); ok {
			name, _, _ := strings.Cut(rest, " ")
			list = append(list, name)
		}
	}
	problems, err := promlint.New(strings.NewReader(out.String())).Lint()
	for _, p := range problems {
		if !strings.HasPrefix(p.Metric, "vllm:") { // vLLM's name
			t.Errorf("%+v", p)
		}
	}
	if err != nil {
		t.Error(err)
	}
	return list
}

// Every figure of the three has a metric of its own, with a name that passes the
// lint.
func TestMetrics(t *testing.T) {
	seen := map[string]bool{}
	for _, stats := range []any{connector.SchedulerStats{}, connector.ServerCacheStats{}, connector.WorkerStats{}} {
		list := names(t, stats)
		if fields := reflect.TypeOf(stats).NumField(); len(list) < fields-1 {
			t.Errorf("%T: %d metrics for %d fields", stats, len(list), fields)
		}
		for _, name := range list {
			if seen[name] {
				t.Errorf("%s is there twice", name)
			}
			seen[name] = true
		}
	}
}
