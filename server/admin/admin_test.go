// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/server/admin"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/evict"
	"github.com/kvasir-kv/kvasir/store/pool"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// newServer returns a server with two stored chunks of 16 tokens.
func newServer(t testing.TB) *server.Server {
	t.Helper()
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: 64 * 4096, Dir: t.TempDir(), ChunkTokens: 16})
	if err != nil {
		t.Fatal(err)
	}
	lives := evict.NewLifetimes()
	st := store.New(p, store.Options{Policy: lives.Watch(evict.NewLRU())})
	s := server.New(st, server.Options{Lifetimes: lives, ChunkTokens: 16, Version: "v1", Log: slog.New(slog.DiscardHandler)})
	t.Cleanup(func() { _, _ = s.Close(), st.Close() })
	call := func(op lmcache.Op, p ...[]byte) {
		s.Answer(append([][]byte{{0}, lmcache.AppendOp(nil, op)}, p...))
	}
	reg := lmcache.EngineDriven{InstanceID: 7, Model: "m", WorldSize: 1, BlockSize: 16, Layers: 1, Hidden: 128, DType: "bfloat16", SinglePlane: true, PhysicalSlots: 16}
	call(lmcache.OpRegisterEngineDriven, reg.Append(nil))
	key := lmcache.Key{Model: "m", WorldSize: 1, Tokens: make([]uint32, 32), End: 32, RequestID: "r", Readers: 1}
	call(lmcache.OpPrepareStore, key.Append(nil), lmcache.AppendInt(nil, 7))
	call(lmcache.OpCommitStore, key.Append(nil), lmcache.AppendInt(nil, 7), lmcache.AppendBytes(nil, nil))
	if n := s.Status().Pool.ResidentChunks; n != 2 {
		t.Fatalf("%d chunks are stored", n)
	}
	return s
}

// loadPrompt has the worker of newServer look up four chunks as a request, and load the two that are there.
func loadPrompt(s *server.Server, request string) {
	call := func(op lmcache.Op, p ...[]byte) {
		s.Answer(append([][]byte{{0}, lmcache.AppendOp(nil, op)}, p...))
	}
	key := lmcache.Key{Model: "m", WorldSize: 1, Worker: lmcache.AllWorkers, Tokens: make([]uint32, 64), End: 64, RequestID: request, Readers: 1}
	call(lmcache.OpLookup, key.Append(nil), lmcache.AppendInt(nil, 1))
	key.Worker, key.End = 0, 32
	call(lmcache.OpPrepareRetrieve, key.Append(nil), lmcache.AppendInt(nil, 7))
	call(lmcache.OpCommitRetrieve, key.Append(nil), lmcache.AppendInt(nil, 7))
	call(lmcache.OpEndSession, lmcache.AppendString(nil, request))
}

func ask(h http.Handler, method, url, body string, header ...string) (int, string) {
	r := httptest.NewRequest(method, url, strings.NewReader(body))
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w.Code, w.Body.String()
}

// What runs beside the server is shown by its metrics, also what is added later.
func TestParts(t *testing.T) {
	type stats struct {
		Pulled uint64            `counter:"x_pulled_total" help:"Pulled."`
		Served map[string]uint64 `counter:"x_served_total" label:"from" help:"Served."`
	}
	parts, n := new(admin.Parts), uint64(1)
	h := admin.Handler(newServer(t), admin.Options{Parts: parts})
	figures := func() map[string]map[string]float64 {
		var st admin.Status
		if code, body := ask(h, "GET", "http://localhost/status", ""); code != 200 || json.Unmarshal([]byte(body), &st) != nil {
			t.Fatalf("%d %s", code, body)
		}
		return st.Parts
	}
	if got := figures(); got != nil {
		t.Errorf("without parts: %v", got)
	}
	parts.Add("relay", func() any { return stats{n, map[string]uint64{"p": 2}} })
	n = 3
	if got := figures()["relay"]; len(got) != 2 || got["x_pulled_total"] != 3 || got[`x_served_total{from="p"}`] != 2 {
		t.Errorf("got %v", got)
	}
	(*admin.Parts)(nil).Add("nobody", nil) // a command alone has none
}

// The pages say what the server says, and nothing else.
func TestPages(t *testing.T) {
	s := newServer(t)
	h := admin.Handler(s, admin.Options{})
	get := func(path string, want int) string {
		t.Helper()
		code, body := ask(h, "GET", "http://localhost"+path, "")
		if code != want {
			t.Errorf("%s: %d, want %d", path, code, want)
		}
		return body
	}
	for _, path := range []string{"/healthcheck", "/healthz"} {
		if body := get(path, 200); body != "{\"status\":\"healthy\"}\n" {
			t.Errorf("%s: %s", path, body)
		}
	}
	if body := get("/healthcheck?workers=1", 200); body != "{\"status\":\"healthy\",\"workers\":1}\n" {
		t.Errorf("one worker: %s", body)
	}
	if body := get("/healthcheck?workers=2", 503); !strings.Contains(body, "1 of 2 workers can load a hit") || !strings.Contains(body, `"workers":1}`) {
		t.Errorf("two workers: %s", body)
	}
	for _, bad := range []string{"-1", "x", "4294967296", "1.5"} {
		get("/healthcheck?workers="+bad, 400)
	}
	if body := get("/version", 200); body != "\"v1\"\n" {
		t.Errorf("version: %s", body)
	}
	if body := get("/", 200); !strings.Contains(body, `"status":"ok"`) {
		t.Errorf("/: %s", body)
	}
	get("/nothing", 404)

	want := s.Status()
	var whole admin.Status
	dec := json.NewDecoder(strings.NewReader(get("/status", 200)))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&whole); err != nil {
		t.Fatal(err)
	}
	status := whole.Status
	status.Uptime, want.Uptime, status.Workers[0].SilentFor, want.Workers[0].SilentFor = 0, 0, 0, 0
	status.Recent.Seconds, want.Recent.Seconds = 0, 0
	a, _ := json.Marshal(status)
	b, _ := json.Marshal(want)
	if !bytes.Equal(a, b) {
		t.Errorf("status\n%s, want\n%s", a, b)
	}

	page := get("/metrics", 200)
	var figures strings.Builder
	if err := metrics.Write(&figures, s.Stats()); err != nil {
		t.Fatal(err)
	}
	lines := map[string]bool{}
	for line := range strings.Lines(page) {
		lines[line] = true
	}
	n := 0
	for line := range strings.Lines(figures.String()) {
		if n++; !lines[line] {
			t.Errorf("/metrics lacks %s", line)
		}
	}
	if n < 300 || !strings.Contains(page, `kvasir_build_info{`) || !strings.Contains(page, `version="v1"`) {
		t.Errorf("%d lines of figures", n)
	}
	problems, err := promlint.New(strings.NewReader(page)).Lint()
	problems = slices.DeleteFunc(problems, func(p promlint.Problem) bool { return strings.HasSuffix(p.Metric, "_throughput_GB_per_second") }) // LMCache's names
	if err != nil || len(problems) > 0 {
		t.Errorf("lint: %v, %v", problems, err)
	}
	for line := range strings.Lines(page) {
		if rest, ok := strings.CutPrefix(line, "# HELP kvasir_"); ok && len(strings.Fields(rest)) < 4 {
			t.Errorf("a help that says little: %s", line)
		}
	}

	if err := s.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/healthcheck", "/healthz"} {
		if body := get(path, 503); !strings.Contains(body, "shutting down") {
			t.Errorf("%s after the end: %s", path, body)
		}
	}
}

// No series appears with its first event: alerts and rates need the zero.
func TestSeriesAreThereFromTheStart(t *testing.T) {
	s := newServer(t)
	h := admin.Handler(s, admin.Options{})
	series := func() map[string]bool {
		_, page := ask(h, "GET", "http://localhost/metrics", "")
		out := map[string]bool{}
		for line := range strings.Lines(page) {
			if name, _, ok := strings.Cut(line, " "); ok && (strings.HasPrefix(name, "kvasir_") || strings.HasPrefix(name, "lmcache_")) {
				out[name] = true
			}
		}
		return out
	}
	before := series()
	for op := range byte(60) {
		s.Answer([][]byte{{0}, {op}, {0xc0}, {1}})
		s.Answer([][]byte{{0}, {op}})
	}
	for name := range series() {
		if !before[name] {
			t.Errorf("%s appeared with its first event", name)
		}
	}
}

// A clear takes LMCache's body, and says what it does not know.
func TestClear(t *testing.T) {
	h := admin.Handler(newServer(t), admin.Options{})
	f := func(body string, want int, contains string) {
		t.Helper()
		if code, got := ask(h, "POST", "http://localhost/cache/clear", body, "Content-Type", "application/json"); code != want || !strings.Contains(got, contains) {
			t.Errorf("%q: %d %s", body, code, got)
		}
	}
	f(`{"tier":"l3"}`, 400, "unknown tier")
	f(`{"tier":`, 400, "body is not")
	f(`{"model":"m"}`, 400, `unknown field \"model\"`) // what limits a clear is not passed over
	f(`{"models":["m"]} {}`, 400, "body is not")
	f(`{"models":[]}`, 400, "empty list")
	f(`{"tier":"`+strings.Repeat("x", 5000)+`"}`, 400, "body is not")
	f("", 200, `"chunks":2`)
	f(`{"tier":"l1","force":true}`, 200, `"chunks":0`)
}

// A drop, a key's rotation and a clear refuse a field that they do not know: it could limit what they do.
func TestUnknownFieldsAreRefused(t *testing.T) {
	h := admin.Handler(newServer(t), admin.Options{})
	for path, body := range map[string]string{
		"/tiers/drop": `{"tier":"fs","modle":"m"}`, "/tiers/rekey": `{"tier":"fs","bytes":1}`, "/cache/clear": `{"teir":"l1"}`,
	} {
		if code, got := ask(h, "POST", "http://localhost"+path, body, "Content-Type", "application/json"); code != 400 || !strings.Contains(got, "unknown field") {
			t.Errorf("%s: %d %s", path, code, got)
		}
	}
}

// A request that found less than it asked for is explained by its id, within limits.
func TestExplain(t *testing.T) {
	s := newServer(t)
	h := admin.Handler(s, admin.Options{})
	for _, id := range []string{"r 1", "r2"} {
		key := lmcache.Key{Model: "m", WorldSize: 1, Worker: lmcache.AllWorkers, Tokens: make([]uint32, 64), End: 64, RequestID: id, Readers: 1}
		s.Answer([][]byte{{0}, lmcache.AppendOp(nil, lmcache.OpLookup), key.Append(nil), lmcache.AppendInt(nil, 1)})
	}
	f := func(query string, want int, contains string) {
		t.Helper()
		if code, got := ask(h, "GET", "http://localhost/explain"+query, ""); code != want || !strings.Contains(got, contains) {
			t.Errorf("%s: %d %s", query, code, got)
		}
	}
	f("?request_id=r+1", 200, `"request_id":"r 1","model_name":"m","cache_salt":"","asked_tokens":64,"hit_tokens":32,"reason":"never_stored","text":"32 of 64 tokens hit; the next chunk: never stored"`)
	f("", 200, `{"kept":2,"reasons":{"never_stored":2},"lookups":[{`)
	f("?limit=1", 200, `"request_id":"r2"`)
	f("?request_id=nobody", 200, `"lookups":[],`)
	f("?limit=0", 400, "1 to 4096")
	f("?limit=5000", 400, "1 to 4096")
	f("?limit=x", 400, "1 to 4096")
}

// Pages of other sites, and names that lead here, read no status and clear nothing;
// probes and metrics answer under any name.
func TestPagesOfOtherSitesAreRefused(t *testing.T) {
	s := newServer(t)
	h := admin.Handler(s, admin.Options{AllowHosts: []string{"cache.example"}})
	f := func(want int, method, url, body string, header ...string) {
		t.Helper()
		code, got := ask(h, method, url, body, header...)
		if code != want {
			t.Errorf("%s %s %q: %d, want %d", method, url, header, code, want)
		}
		if want == 403 && strings.Contains(got, "workers") {
			t.Errorf("%s %s tells %s", method, url, got)
		}
	}
	const clear = "/cache/clear"
	f(403, "POST", "http://127.0.0.1"+clear, "", "Origin", "https://evil.example")
	f(403, "POST", "http://127.0.0.1"+clear, "", "Sec-Fetch-Site", "cross-site")
	f(415, "POST", "http://127.0.0.1"+clear, `{"tier":"l1","force":true}`, "Content-Type", "text/plain")
	f(403, "POST", "http://attacker.example"+clear, "")
	f(403, "GET", "http://attacker.example/status", "")
	f(403, "GET", "http://attacker.example/explain", "")
	f(200, "GET", "http://attacker.example/healthcheck", "")
	f(200, "GET", "http://attacker.example/metrics", "")
	f(200, "GET", "http://cache.example:8080/status", "")
	if n := s.Status().Pool.ResidentChunks; n != 2 {
		t.Errorf("%d of 2 chunks are left", n)
	}
	f(200, "POST", "http://127.0.0.1"+clear, "")
}

// Profiles are there only where they were asked for, and web pages do not get them.
func TestProfiles(t *testing.T) {
	s := newServer(t)
	f := func(o admin.Options, path, host string, want int) {
		t.Helper()
		if code, _ := ask(admin.Handler(s, o), "GET", "http://"+host+path, ""); code != want {
			t.Errorf("%+v: %s at %s: %d, want %d", o, path, host, code, want)
		}
	}
	f(admin.Options{}, "/debug/pprof/", "localhost", 404)
	f(admin.Options{Profiles: true}, "/debug/pprof/", "localhost", 200)
	f(admin.Options{Profiles: true}, "/debug/pprof/heap", "localhost", 200)
	f(admin.Options{Profiles: true}, "/debug/pprof/cmdline", "localhost", 404) // flags have secrets
	f(admin.Options{Profiles: true}, "/debug/pprof/heap", "attacker.example", 403)
}
