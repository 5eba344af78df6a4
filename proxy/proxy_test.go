// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/proxy"
	"github.com/kvasir-kv/kvasir/sim/api"
	"github.com/kvasir-kv/kvasir/sim/engine"
	"github.com/kvasir-kv/kvasir/sim/kvconfig"
	"github.com/kvasir-kv/kvasir/sim/kvmem"
)

func TestMain(m *testing.M) {
	http.DefaultClient.Timeout = 2 * time.Minute // a request that hangs is a failure, not a test that takes as long as the proxy's own limits
	testkit.Main(m)
}

func testLog() *slog.Logger {
	if !testing.Verbose() {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// served is a simulated engine with its API.
type served struct {
	*engine.Engine
	web *httptest.Server
}

func (s *served) stop(t testing.TB) {
	s.web.CloseClientConnections()
	s.web.Close()
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// serve starts an engine at addr; "" for any.
func serve(t testing.TB, addr, config string, step time.Duration) *served {
	t.Helper()
	return serveWith(t, addr, config, engine.Options{StepTime: step})
}

func serveWith(t testing.TB, addr, config string, o engine.Options) *served {
	t.Helper()
	o.Model, o.MaxModel = cmp.Or(o.Model, "m"), 2048
	if o.KV.Layers == 0 {
		o.KV = kvmem.Geometry{Layers: 2, Heads: 2, HeadBytes: 8, BlockTokens: 16, Blocks: 600}
	}
	if config != "" {
		var err error
		if o.Connectors, err = kvconfig.Parse([]byte(config)); err != nil {
			t.Fatal(err)
		}
	}
	e, err := engine.Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	s := &served{Engine: e, web: httptest.NewUnstartedServer(api.New(e, api.Options{SameIDs: o.First}))}
	s.web.Listener.Close()
	if addr == "" {
		s.web.Listener = testkit.Listen(t)
	} else {
		for end := time.Now().Add(60 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			if s.web.Listener, err = net.Listen("tcp", addr); err == nil {
				break
			}
			if time.Now().After(end) {
				t.Fatal(err)
			}
		}
	}
	s.web.Start()
	return s
}

// deployment is a registry, P's, D's and a proxy.
type deployment struct {
	t        testing.TB
	registry string
	p, d     []*served
	url      string
	proxy    *proxy.Proxy
}

func producer(registry, id string) string {
	return fmt.Sprintf(`{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","engine_id":%q,"kv_connector_extra_config":{"bootstrap_server_address":%q}}`, id, strings.TrimPrefix(registry, "http://"))
}

const consumer = `{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer"}`

func startRegistry(t testing.TB) string {
	t.Helper()
	r, err := bootstrap.Open(bootstrap.Options{})
	if err != nil {
		t.Fatal(err)
	}
	l := testkit.Listen(t)
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = r.Serve(ctx, l) })
	t.Cleanup(func() { stop(); wg.Wait(); r.Close() })
	return "http://" + l.Addr().String()
}

func deploy(t testing.TB, decoders int, step time.Duration) *deployment {
	t.Helper()
	x := &deployment{t: t, registry: startRegistry(t)}
	x.p = append(x.p, serve(t, "", producer(x.registry, "p0"), step))
	o := proxy.Options{Prefill: []proxy.Prefill{{URL: x.p[0].web.URL, Registry: x.registry}}, HealthInterval: 50 * time.Millisecond}
	for range decoders {
		d := serve(t, "", consumer, step)
		x.d, o.Decode = append(x.d, d), append(o.Decode, d.web.URL)
	}
	x.start(o)
	t.Cleanup(func() {
		for _, s := range append(x.p, x.d...) {
			s.stop(t)
		}
	})
	return x
}

func (x *deployment) start(o proxy.Options) {
	x.t.Helper()
	x.url, x.proxy = startProxy(x.t, o)
	x.well()
}

// startProxy starts a proxy that waits a minute longer for an engine than the product: a pause of the machine for some seconds must not
// make an engine unwell, or P's answer too late for its cached tokens.
func startProxy(t testing.TB, o proxy.Options) (string, *proxy.Proxy) {
	t.Helper()
	o.DialTimeout = cmp.Or(o.DialTimeout, time.Minute)
	return startImpatient(t, proxy.WithPrefillGrace(proxy.WithPatience(o, time.Minute), time.Minute))
}

// startImpatient starts a proxy with the limits of the product, for a test of an engine that is silent.
func startImpatient(t testing.TB, o proxy.Options) (string, *proxy.Proxy) {
	t.Helper()
	o.Log = testLog()
	p, err := proxy.New(o)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewServer(p)
	proxies.Store(s.URL, p)
	t.Cleanup(func() { proxies.Delete(s.URL); http.DefaultClient.CloseIdleConnections(); s.Close(); p.Close() })
	return s.URL, p
}

// proxies has the running proxies by their URLs.
var proxies sync.Map

// well waits until the proxy has found all of its engines: tests count on each.
func (x *deployment) well() {
	x.t.Helper()
	testkit.Eventually(x.t, "engines are found", func() bool {
		r, err := http.Get(x.url + "/health")
		if err != nil {
			return false
		}
		r.Body.Close()
		return r.StatusCode == 200
	})
	testkit.Eventually(x.t, "all engines are well", func() bool { // /health answers 200 as soon as a request finds engines
		if x.proxy == nil {
			return true
		}
		for _, well := range x.proxy.Stats().Well {
			if well == 0 {
				return false
			}
		}
		return true
	})
}

func post(t testing.TB, url, body string) (int, string, http.Header) {
	t.Helper()
	r, err := http.Post(url+"/v1/completions", "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(text), r.Header
}

// answerText returns the text of an answer, whole or streamed.
func answerText(t testing.TB, answer string) string {
	t.Helper()
	out := ""
	for line := range strings.Lines(answer) {
		line = strings.TrimPrefix(strings.TrimSpace(line), "data: ")
		if line == "" || line == "[DONE]" {
			continue
		}
		var c struct{ Choices []struct{ Text string } }
		if err := json.Unmarshal([]byte(line), &c); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		for _, x := range c.Choices {
			out += x.Text
		}
	}
	return out
}

func body(i, tokens int, more string) string {
	return fmt.Sprintf(`{"prompt":%q,"max_tokens":%d%s}`, fmt.Sprintf("request %d ", i)+strings.Repeat("tell me more ", 40), tokens, more)
}

// idle waits until no engine has blocks in use.
func (x *deployment) idle() {
	x.t.Helper()
	for _, s := range append(x.p, x.d...) {
		for end := time.Now().Add(60 * time.Second); ; time.Sleep(5 * time.Millisecond) {
			now := s.Stats()
			if now.Free == now.Blocks && now.Running+now.Waiting+now.Kept == 0 {
				break
			}
			if time.Now().After(end) {
				x.t.Fatalf("%s keeps blocks: %+v", s.web.URL, now)
			}
		}
		if s := s.Stats(); s.WrongBytes > 0 {
			x.t.Fatalf("%+v", s)
		}
	}
}

// A request through P and D is answered as by one engine, whole and streamed; D has all KV from P.
func TestPrefillAndDecode(t *testing.T) {
	x := deploy(t, 2, 0)
	alone := serve(t, "", "", 0)
	defer alone.stop(t)
	var wg sync.WaitGroup
	for i := range 24 {
		wg.Go(func() {
			more := ""
			if i%2 == 0 {
				more = `,"stream":true,"stream_options":{"include_usage":true}`
			}
			_, want, _ := post(t, alone.web.URL, body(i, 9, ""))
			status, got, h := post(t, x.url, body(i, 9, more))
			if status != 200 || answerText(t, got) != answerText(t, want) || h.Get("X-Request-Id") == "" {
				t.Errorf("%d %s\nwant %s", status, got, want)
			}
			if i%2 == 0 && !strings.HasSuffix(strings.TrimSpace(got), "data: [DONE]") {
				t.Errorf("%s", got)
			}
		})
	}
	wg.Wait()
	x.idle()
	loaded := x.d[0].Stats().LoadedTokens + x.d[1].Stats().LoadedTokens
	if s := x.proxy.Stats(); s.Requests["ok"] != 24 || s.InFlight != 0 || loaded < 24*100 {
		t.Fatalf("%+v, %d tokens loaded", s, loaded)
	}
}

// P is started again under another engine id: the next requests succeed without a restart of
// anything else.
func TestPIsStartedAgain(t *testing.T) {
	x := deploy(t, 1, 0)
	if status, text, _ := post(t, x.url, body(0, 3, "")); status != 200 {
		t.Fatal(status, text)
	}
	addr := x.p[0].web.Listener.Addr().String()
	x.p[0].stop(t)
	x.p[0] = serve(t, addr, producer(x.registry, "another"), 0)
	testkit.Eventually(t, "the next request succeeds", func() bool {
		status, _, _ := post(t, x.url, body(1, 3, ""))
		return status == 200
	})
	before := x.d[0].Stats().LoadedTokens
	if status, text, _ := post(t, x.url, body(2, 3, "")); status != 200 || x.d[0].Stats().LoadedTokens == before {
		t.Fatal(status, text)
	}
	x.idle()
}

// A client that leaves ends both legs, while P computes and while D answers.
func TestClientLeaves(t *testing.T) {
	x := deploy(t, 1, 30*time.Millisecond)
	atP := func() bool { s := x.p[0].Stats(); return s.Running+s.Waiting > 0 || x.d[0].Stats().Running > 0 }
	atD := func() bool { return x.d[0].Stats().Running > 0 }
	for i, when := range []func() bool{atP, atD} {
		x.idle() // no engine has the request before
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			for ctx.Err() == nil && !when() {
				time.Sleep(time.Millisecond)
			}
			cancel()
		}()
		r, _ := http.NewRequestWithContext(ctx, http.MethodPost, x.url+"/v1/completions", strings.NewReader(body(i, 500, `,"stream":true`)))
		if resp, err := http.DefaultClient.Do(r); err == nil {
			_, _ = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
		cancel()
	}
	x.idle()
	testkit.Eventually(t, "both are counted", func() bool { return x.proxy.Stats().Requests["client_left"] == 2 })
}

// When a D dies in the middle of a stream, the client's stream ends with an error. Later
// requests go to the other D.
func TestDDies(t *testing.T) {
	x := deploy(t, 2, 20*time.Millisecond)
	// The stream lasts half a minute: So D does not end it before the test stops D, also on a machine that pauses.
	r, err := http.Post(x.url+"/v1/completions", "application/json", strings.NewReader(body(0, 1500, `,"stream":true`)))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	lines := bufio.NewReader(r.Body)
	if _, err := lines.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	for i, d := range x.d {
		if d.Stats().Running > 0 {
			d.stop(t)
			x.d = append(x.d[:i:i], x.d[i+1:]...)
			break
		}
	}
	if len(x.d) != 1 {
		t.Fatal("no D had the request")
	}
	rest, err := io.ReadAll(lines)
	if err == nil || bytes.Contains(rest, []byte("[DONE]")) || !bytes.Contains(rest, []byte("broke off")) {
		t.Fatalf("%v: %.300s", err, rest)
	}
	for i := range 4 {
		if status, text, _ := post(t, x.url, body(i, 3, "")); status != 200 {
			t.Fatal(status, text)
		}
	}
	if s := x.proxy.Stats(); s.Requests["broken_off"] != 1 {
		t.Fatalf("%+v", s)
	}
}

// Without engines a request is refused at once, with a reason and a time.
func TestNoEngines(t *testing.T) {
	url, _ := startProxy(t, proxy.Options{Engines: []string{"http://127.0.0.1:1"}})
	start := time.Now()
	status, text, h := post(t, url, `{"prompt":"a"}`)
	if status != 503 || h.Get("Retry-After") == "" || !strings.Contains(text, "no engine is well") || time.Since(start) > 50*time.Second {
		t.Fatal(status, text, h)
	}
}

// mock answers as handler says, and is healthy.
func mock(t testing.TB, handler http.HandlerFunc) string {
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/v1/completions", handler)
	mux.HandleFunc("/v1/chat/completions", handler)
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return s.URL
}

// reach waits until the proxy of a URL has found all of its engines.
func reach(t testing.TB, url string) {
	t.Helper()
	x := &deployment{t: t, url: url}
	if p, ok := proxies.Load(url); ok {
		x.proxy = p.(*proxy.Proxy)
	}
	x.well()
}

// reachSome waits until a proxy has found engines for a request; others of them may not be well.
func reachSome(t testing.TB, url string) {
	t.Helper()
	x := &deployment{t: t, url: url}
	x.well()
}

// Unknown fields, their order and their bytes pass; so do the query and headers but those of
// the connection.
func TestBytesPass(t *testing.T) {
	var got atomic.Pointer[[]byte]
	var header atomic.Pointer[http.Header]
	e := mock(t, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		got.Store(&b)
		h := r.Header.Clone()
		header.Store(&h)
		w.Header().Set("X-Engine", "7")
		fmt.Fprint(w, `{"ok":1}`)
	})
	url, _ := startProxy(t, proxy.Options{Engines: []string{e}, HealthInterval: 20 * time.Millisecond})
	reach(t, url)
	sent := "{ \"tools\":[{\"x\":1.0e2}],\"prompt\" : \"\\u00fc ü\",\"unknown\":{\"a\":[ ]}, \"n\":1 }"
	r, _ := http.NewRequest(http.MethodPost, url+"/v1/completions?q=1", strings.NewReader(sent))
	r.Header.Set("Traceparent", "00-abc")
	r.Header.Set("X-Request-Id", "mine")
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body)
	h := *header.Load()
	if string(*got.Load()) != sent || string(text) != `{"ok":1}` || resp.Header.Get("X-Engine") != "7" || resp.Header.Get("X-Request-Id") != "mine" ||
		h.Get("Traceparent") != "00-abc" || h.Get("X-Request-Id") != "mine" || h.Get("Accept-Encoding") != "" {
		t.Fatalf("%s\n%v\n%s", *got.Load(), h, text)
	}
}

// When an engine fails before the first byte, the request is tried at another one. When an engine refuses the
// request, the client gets that refusal, and no other engine is asked.
func TestAttempts(t *testing.T) {
	var bad, good atomic.Int64
	failing := mock(t, func(w http.ResponseWriter, r *http.Request) {
		switch bad.Add(1) % 4 {
		case 0:
			http.Error(w, "boom", 500)
		case 1: // an empty good answer
		case 2: // a stream's header and nothing more
			w.Header().Set("Content-Type", "text/event-stream")
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		default:
			panic(http.ErrAbortHandler)
		}
	})
	well := mock(t, func(w http.ResponseWriter, r *http.Request) { good.Add(1); fmt.Fprint(w, "fine") })
	url, p := startProxy(t, proxy.Options{Engines: []string{failing, well}, HealthInterval: 10 * time.Millisecond})
	reach(t, url)
	for i := range 16 {
		testkit.Eventually(t, "both are well", func() bool { s := p.Stats(); return s.Well[failing] == 1 && s.Well[well] == 1 })
		if status, text, _ := post(t, url, `{"prompt":"a"}`); status != 200 || text != "fine" {
			t.Fatal(i, status, text)
		}
	}
	if good.Load() != 16 || bad.Load() < 4 {
		t.Fatal(good.Load(), bad.Load())
	}
	var asked atomic.Int64
	refusing := mock(t, func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		w.WriteHeader(422)
		fmt.Fprint(w, "no such field")
	})
	url, _ = startProxy(t, proxy.Options{Engines: []string{refusing}, HealthInterval: 10 * time.Millisecond})
	reach(t, url)
	if status, text, _ := post(t, url, `{"prompt":"a"}`); status != 422 || text != "no such field" || asked.Load() != 1 {
		t.Fatal(status, text, asked.Load())
	}
}

// Bad requests do not reach an engine.
func TestBadRequests(t *testing.T) {
	var asked atomic.Int64
	e := mock(t, func(http.ResponseWriter, *http.Request) { asked.Add(1) })
	url, _ := startProxy(t, proxy.Options{Engines: []string{e}, MaxBody: 1000, HealthInterval: 10 * time.Millisecond})
	reach(t, url)
	f := func(body string, want int, words string) {
		t.Helper()
		if status, text, _ := post(t, url, body); status != want || !strings.Contains(text, words) {
			t.Errorf("%.40q: %d %s", body, status, text)
		}
	}
	f(`{"prompt":`, 400, "position 10")
	f(`[]`, 400, "an object is wanted")
	f("{\"prompt\":\"\xff\"}", 400, "UTF-8")
	f(`{"prompt":"`+strings.Repeat("a", 2000)+`"}`, 413, "longer than 1000 bytes")
	if r, err := http.Get(url + "/v1/completions"); err != nil || r.StatusCode != 405 {
		t.Error(err)
	} else {
		r.Body.Close()
	}
	if asked.Load() != 0 {
		t.Fatal("an engine was asked")
	}
}

// One error names every invalid field of the options.
func TestOptions(t *testing.T) {
	testkit.CheckNumbers[proxy.Options](t)
	_, err := proxy.New(proxy.Options{Prefill: []proxy.Prefill{{URL: "p:1", Registry: "http://r"}}, Engines: []string{"http://e?x=1"}, MaxBody: -1})
	for _, want := range []string{`Prefill "p:1" is not`, `Engines "http://e?x=1" is not`, "Decode is missing", "MaxBody -1"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v lacks %q", err, want)
		}
	}
}

// mockRegistry answers every query with one text.
func mockRegistry(t testing.TB, text string) string {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, text) }))
	t.Cleanup(s.Close)
	return s.URL
}

func serveMux(t testing.TB, mux *http.ServeMux) string {
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return s.URL
}
