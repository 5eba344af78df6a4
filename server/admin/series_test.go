// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"bufio"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/server/admin"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/evict"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/tier"
)

var (
	typeLine = regexp.MustCompile(`^# TYPE (\w+) (\w+)$`)
	sample   = regexp.MustCompile(`^(\w+?)(_bucket|_sum|_count)?(?:\{(.*)\})? \S+$`)
	label    = regexp.MustCompile(`(\w+)="(?:[^"\\]|\\.)*"`)
)

// seriesOf returns the type and the labels of each series of a page.
func seriesOf(page string) map[string]string {
	kinds, labels := map[string]string{}, map[string][]string{}
	for line := range strings.Lines(page) {
		line = strings.TrimSpace(line)
		if m := typeLine.FindStringSubmatch(line); m != nil {
			kinds[m[1]] = m[2]
			continue
		}
		m := sample.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		name := m[1]
		if kinds[name] == "" {
			name += m[2]
		}
		for _, l := range label.FindAllStringSubmatch(m[3], -1) {
			if l[1] != "le" && !slices.Contains(labels[name], l[1]) {
				labels[name] = append(labels[name], l[1])
			}
		}
	}
	out := map[string]string{}
	for name, kind := range kinds {
		slices.Sort(labels[name])
		out[name] = strings.Join(append([]string{kind}, labels[name]...), " ")
	}
	return out
}

// newServerWithTier is newServer over a tier.
func newServerWithTier(t *testing.T) *server.Server {
	t.Helper()
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: 64 * 4096, Dir: t.TempDir(), ChunkTokens: 16})
	if err != nil {
		t.Fatal(err)
	}
	below := tier.Counted(tier.NewMemory(1<<20), "memory")
	st := store.New(p, store.Options{Below: below})
	s := server.New(st, server.Options{ChunkTokens: 16, Tiers: []*tier.Counting{below}, Lifetimes: evict.NewLifetimes()})
	t.Cleanup(func() { _, _ = s.Close(), st.Close() })
	return s
}

// Each series that LMCache's server shows under the same driver is here, with its type and labels, but for
// those that the list excepts with a reason.
func TestSeriesOfLMCache(t *testing.T) {
	h := admin.Handler(newServerWithTier(t), admin.Options{})
	_, page := ask(h, "GET", "http://localhost/metrics", "")
	have := seriesOf(page)
	file, err := os.Open("testdata/lmcache-0.5.6.series")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	same, excepted := 0, 0
	for r := bufio.NewScanner(file); r.Scan(); {
		line := r.Text()
		if rest, ok := strings.CutPrefix(line, "except "); ok {
			spec, reason, _ := strings.Cut(rest, " # ")
			name, want, _ := strings.Cut(spec, " ")
			if excepted++; reason == "" || have[name] == want {
				t.Errorf("%s is excepted without a reason, or needs to be no more", name)
			}
			continue
		}
		name, want, ok := strings.Cut(line, " ")
		if !ok || strings.HasPrefix(line, "#") {
			continue
		}
		if same++; have[name] != want {
			t.Errorf("%s is %q here, %q there", name, have[name], want)
		}
	}
	if same < 24 || excepted > 25 {
		t.Errorf("%d series are the same, %d excepted", same, excepted)
	}
}

// Figures by model and salt are those of what was asked, and many names take no more room than some.
func TestFiguresByModel(t *testing.T) {
	s := newServer(t)
	h := admin.Handler(s, admin.Options{})
	look := func(model, salt string, tokens int) {
		key := lmcache.Key{Model: model, Salt: salt, WorldSize: 1, Worker: lmcache.AllWorkers, Tokens: make([]uint32, tokens), End: tokens, RequestID: "q", Readers: 1}
		s.Answer([][]byte{{0}, lmcache.AppendOp(nil, lmcache.OpLookup), key.Append(nil), lmcache.AppendInt(nil, 1)})
	}
	look("m", "", 64)
	look("m", "green", 32)
	look("m", "green", 3)
	look("nobody", "green", 32)
	_, page := ask(h, "GET", "http://localhost/metrics", "")
	for _, want := range []string{
		`lmcache_mp_lookup_requested_tokens_total{cache_salt="",model_name="m"} 64`, `lmcache_mp_lookup_hit_tokens_total{cache_salt="",model_name="m"} 32`,
		`lmcache_mp_lookup_hit_l1_keys_total{cache_salt="",model_name="m"} 2`, `lmcache_mp_lookup_requested_tokens_total{cache_salt="green",model_name="m"} 32`,
		`lmcache_mp_lookups_requests_total{cache_salt="green",model_name="m"} 2`,
		`lmcache_mp_lookup_early_exit_requests_total{cache_salt="green",model_name="m",reason="empty_chunk_hashes"} 1`,
		`lmcache_mp_lookup_early_exit_requests_total{cache_salt="_other",model_name="_other",reason="no_gpu_context"} 1`,
		`lmcache_mp_num_submitted_stores_total{device="engine"} 1`, `lmcache_mp_l1_usage_ratio{backend="shm",l1_tag="_default"} `,
	} {
		if !strings.Contains(page, want) {
			t.Errorf("/metrics lacks %s", want)
		}
	}
	for i := range 600 {
		look("m", strings.Repeat("x", i%100)+string(rune('a'+i/100)), 32)
	}
	_, page = ask(h, "GET", "http://localhost/metrics", "")
	if n := strings.Count(page, "\nlmcache_mp_lookups_requests_total{"); n > 256+2 {
		t.Errorf("%d series of names that clients make up", n)
	}
	if !strings.Contains(page, `lmcache_mp_lookups_requests_total{cache_salt="_other",model_name="_other"} `) {
		t.Error("what has no place of its own is not counted")
	}
}
