// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
)

// engineMetric reads a figure from an engine's own metrics.
func engineMetric(t testing.TB, url, name string) (v float64) {
	t.Helper()
	r, err := http.Get(url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	for s := bufio.NewScanner(r.Body); s.Scan(); {
		if rest, ok := strings.CutPrefix(s.Text(), name+"{"); ok {
			_, number, _ := strings.Cut(rest, "} ")
			if _, err := fmt.Sscan(number, &v); err != nil {
				t.Fatal(s.Text(), err)
			}
			return v
		}
	}
	t.Fatalf("%s has no %s", url, name)
	return 0
}

// free is how many KV blocks the engines say are free.
func (x *deployment) free() (n []float64) {
	for _, s := range append(append([]*served(nil), x.p...), x.d...) {
		n = append(n, engineMetric(x.t, s.web.URL, "kvasir_engine_free_blocks"))
	}
	return n
}

// A client that leaves ends both legs in every dialect, while P computes, while D waits and while D
// answers: by the engines' own metrics all blocks are free again, and nothing runs.
func TestClientLeavesInEachPhase(t *testing.T) {
	for _, dialect := range []proxy.Dialect{proxy.Mooncake, proxy.Mooncake013} {
		t.Run(fmt.Sprint(dialect), func(t *testing.T) {
			x := &deployment{t: t}
			x.stopAll()
			o := proxy.Options{HealthInterval: 50 * time.Millisecond}
			x.pair(t, pair{model: "m", dialect: dialect, p: 1, d: 1}, &o, 20*time.Millisecond)
			x.start(o)
			before := x.free()
			phases := []func(generated int64) bool{
				func(int64) bool { s := x.p[0].Stats(); return s.Running+s.Waiting > 0 },
				func(int64) bool { s := x.d[0].Stats(); return s.Running+s.Waiting > 0 },
				func(generated int64) bool { return x.d[0].Stats().Generated > generated+2 },
			}
			left := int64(0)
			for i, phase := range phases {
				for _, stream := range []bool{true, false} {
					x.idle() // what runs is this request
					ctx, cancel := context.WithCancel(t.Context())
					r, _ := http.NewRequestWithContext(ctx, http.MethodPost, x.url+"/v1/completions", strings.NewReader(body(i, 900, fmt.Sprintf(`,"stream":%v`, stream))))
					var wg sync.WaitGroup
					wg.Go(func() {
						if resp, err := http.DefaultClient.Do(r); err == nil {
							_, _ = io.Copy(io.Discard, resp.Body)
							resp.Body.Close()
						}
					})
					generated := x.d[0].Stats().Generated
					testkit.Eventually(t, "the phase is there, or over", func() bool { return phase(generated) || x.d[0].Stats().Generated > generated+2 })
					cancel()
					wg.Wait()
					left++
				}
			}
			x.idle()
			if after := x.free(); fmt.Sprint(after) != fmt.Sprint(before) {
				t.Errorf("free blocks %v, before %v", after, before)
			}
			for _, s := range append(x.p, x.d...) {
				if n := engineMetric(t, s.web.URL, "vllm:num_requests_running"); n != 0 {
					t.Errorf("%v requests run", n)
				}
			}
			testkit.Eventually(t, "all are counted", func() bool { return x.proxy.Stats().Requests["client_left"] == left })
			if s := x.proxy.Stats(); s.InFlight != 0 || s.Engine[x.p[0].web.URL]+s.Engine[x.d[0].web.URL] != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// P dies before it has the request, while it computes, and after it has answered: the request is
// served by the other P, or fails within its deadlines, and nothing is left behind.
func TestPDies(t *testing.T) {
	t.Parallel() // it waits for deadlines
	for _, when := range []string{"before", "during", "after"} {
		t.Run(when, func(t *testing.T) {
			t.Parallel()
			x := &deployment{t: t}
			o := proxy.Options{HealthInterval: time.Hour} // only requests notice it, no look
			x.pair(t, pair{model: "m", p: 2, d: 1}, &o, 5*time.Millisecond)
			x.stopAll()
			o.HealthInterval = 50 * time.Millisecond
			x.start(o)
			dead := func(p *served) {
				x.p = []*served{x.p[0], x.p[1]}
				for i := range x.p {
					if x.p[i] == p {
						x.p = append(x.p[:i], x.p[i+1:]...)
						break
					}
				}
				p.stop(t)
			}
			if when == "before" {
				dead(x.p[0])
			}
			var wg sync.WaitGroup
			for i := range 6 {
				wg.Go(func() {
					status, text, _ := post(t, x.url, body(i, 30, ""))
					if status != 200 {
						t.Errorf("%d %s", status, text)
					}
				})
			}
			switch when {
			case "during":
				p := x.p[0]
				testkit.Eventually(t, "P computes", func() bool { s := p.Stats(); return s.Running+s.Waiting > 0 || s.Finished > 0 })
				dead(p)
			case "after":
				p := x.p[0]
				testkit.Eventually(t, "P has answered", func() bool { return p.Stats().Finished > 0 })
				dead(p)
			}
			wg.Wait()
			x.idle()
			if s := x.proxy.Stats(); s.Requests["ok"] != 6 || s.InFlight != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// The registry goes away and comes back empty. Requests continue over existing connections, and
// over new ones as soon as P has registered again.
func TestRegistryRestarts(t *testing.T) {
	var gone atomic.Bool
	var engine atomic.Pointer[string]
	first := `{"0":{"engine_id":"e1","worker_addr":{"0":{"0":"tcp://h:1"}}}}`
	engine.Store(&first)
	registry := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if gone.Load() {
			panic(http.ErrAbortHandler)
		}
		_, _ = io.WriteString(w, *engine.Load())
	}))
	defer registry.Close()
	var ds legs
	p := mock(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, `{}`) })
	d := mock(t, func(w http.ResponseWriter, r *http.Request) { ds.note(r); fmt.Fprint(w, `{}`) })
	url, s := startProxy(t, proxy.Options{Prefill: []proxy.Prefill{{URL: p, Registry: registry.URL}}, Decode: []string{d}, HealthInterval: 20 * time.Millisecond})
	reach(t, url)
	if status, text, _ := post(t, url, `{"prompt":"a"}`); status != 200 {
		t.Fatal(status, text)
	}
	gone.Store(true)
	testkit.Eventually(t, "P is not used", func() bool { return s.Stats().Well[p] == 0 })
	if status, text, h := post(t, url, `{"prompt":"a"}`); status != 503 || h.Get("Retry-After") == "" || !strings.Contains(text, "no prefill engine is well") {
		t.Fatal(status, text)
	}
	empty := "{}"
	engine.Store(&empty)
	gone.Store(false)
	time.Sleep(60 * time.Millisecond)
	if s.Stats().Well[p] != 0 {
		t.Error("P is used while the registry does not know it")
	}
	second := strings.Replace(first, "e1", "e2", 1)
	engine.Store(&second)
	reach(t, url)
	if status, text, _ := post(t, url, `{"prompt":"a"}`); status != 200 {
		t.Fatal(status, text)
	}
	bodies, _ := ds.all()
	if got := bodies[len(bodies)-1]["kv_transfer_params"].(map[string]any)["remote_engine_id"]; got != "e2" {
		t.Fatal(got)
	}
}

// A client that does not read delays only its own stream. The proxy cuts that stream and leaves the engine;
// other streams continue.
func TestSlowClient(t *testing.T) {
	left := make(chan bool, 2)
	e := mock(t, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		if bytes.Contains(b, []byte("short")) {
			fmt.Fprint(w, `{}`)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		event := []byte("data: " + strings.Repeat("x", 32<<10) + "\n\n")
		for r.Context().Err() == nil {
			if _, err := w.Write(event); err != nil {
				break
			}
		}
		left <- true
	})
	url, s := startProxy(t, proxy.Options{Engines: []string{e}, SendTimeout: time.Second, HealthInterval: 20 * time.Millisecond})
	reach(t, url)
	nc, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	fmt.Fprintf(nc, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 28\r\n\r\n{\"prompt\":\"a\",\"stream\":true}")
	if status, text, _ := post(t, url, `{"prompt":"short"}`); status != 200 {
		t.Fatal(status, text)
	}
	select {
	case <-left:
	case <-time.After(30 * time.Second):
		t.Fatal("the engine streams on")
	}
	testkit.Eventually(t, "it is counted", func() bool { return s.Stats().Requests["client_left"] == 1 && s.Stats().InFlight == 0 })
	if s.Stats().Well[e] != 1 {
		t.Error("the engine is blamed")
	}
}

// Each leg has a deadline: for a P that does not answer, for an engine that sends no first byte, and for one
// that falls silent in the middle of an answer. A late request is not computed a second time: the client gets 504.
func TestDeadlines(t *testing.T) {
	hang := func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // so that the server sees that the client leaves
		<-r.Context().Done()
	}
	silent := mock(t, hang)
	url, s := startProxy(t, proxy.Options{Engines: []string{silent}, FirstByte: 50 * time.Millisecond, Attempts: 2, HealthInterval: 20 * time.Millisecond})
	reach(t, url)
	if status, text, h := post(t, url, `{"prompt":"a"}`); status != 504 || !strings.Contains(text, "in time") || h.Get("Retry-After") != "" || s.Stats().Retries != 0 {
		t.Error(status, text)
	}
	registry := mockRegistry(t, `{"0":{"engine_id":"e","worker_addr":{"0":{"0":"tcp://h:1"}}}}`)
	url, _ = startProxy(t, proxy.Options{
		Prefill: []proxy.Prefill{{URL: silent, Registry: registry}}, Decode: []string{mock(t, hang)}, PrefillTimeout: 50 * time.Millisecond, Attempts: 1, HealthInterval: 20 * time.Millisecond,
	})
	reach(t, url)
	if status, text, _ := post(t, url, `{"prompt":"a"}`); status != 504 || !strings.Contains(text, "in time") {
		t.Error(status, text)
	}
	half := mock(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, "data: {}\n\n")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})
	url, s = startProxy(t, proxy.Options{Engines: []string{half}, Stall: 50 * time.Millisecond, HealthInterval: 20 * time.Millisecond})
	reach(t, url)
	var text []byte
	for range 4 { // a pause of the machine at the wrong moment makes the first byte late: 504
		r, err := http.Post(url+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"a","stream":true}`))
		if err != nil {
			t.Fatal(err)
		}
		status := r.StatusCode
		text, err = io.ReadAll(r.Body)
		r.Body.Close()
		if status == 504 {
			continue
		}
		if err == nil || !bytes.Contains(text, []byte("broke off")) || s.Stats().Requests["broken_off"] != 1 {
			t.Errorf("%v %s", err, text)
		}
		return
	}
	t.Errorf("four times %s", text)
}

// A stream that ends in the middle of an event or of a rune, or without [DONE], ends with an error for
// the client. A whole stream passes byte for byte, in whatever pieces it comes.
func TestCutStreams(t *testing.T) {
	const whole = "data: {\"a\":\"ü 漢\"}\n\n: comment\n\ndata: [DONE]\n\n"
	var send atomic.Pointer[string]
	e := mock(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for _, c := range []byte(*send.Load()) {
			_, _ = w.Write([]byte{c})
			_ = http.NewResponseController(w).Flush()
		}
	})
	url, _ := startProxy(t, proxy.Options{Engines: []string{e}, HealthInterval: 10 * time.Millisecond})
	for n := 1; n <= len(whole); n++ {
		text := whole[:n]
		send.Store(&text)
		reach(t, url)
		r, err := http.Post(url+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"a","stream":true}`))
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(r.Body)
		r.Body.Close()
		if ends := strings.HasSuffix(strings.TrimRight(text, "\n"), "[DONE]"); (err == nil) != ends || !strings.HasPrefix(string(got), text) || ends && string(got) != text {
			t.Errorf("%q: %v, %q", text, err, got)
		}
	}
}

// Requests that no engine may take yet wait in order. Requests beyond the queue, or of a client that has
// its share of it, are refused at once. A request that waits too long is refused then.
func TestQueue(t *testing.T) {
	release, order := make(chan bool), make(chan string, 100)
	e := mock(t, func(w http.ResponseWriter, r *http.Request) {
		var q struct{ Prompt string }
		_ = json.NewDecoder(r.Body).Decode(&q)
		order <- q.Prompt
		<-release
		fmt.Fprint(w, `{}`)
	})
	url, s := startProxy(t, proxy.Options{Engines: []string{e}, MaxPerEngine: 1, MaxQueue: 8, QueueTimeout: time.Hour, HealthInterval: 20 * time.Millisecond})
	reach(t, url)
	var wg sync.WaitGroup
	var statuses [600]atomic.Int64
	ask := func(prompt string) {
		wg.Go(func() {
			status, _, _ := post(t, url, fmt.Sprintf(`{"prompt":%q}`, prompt))
			statuses[status].Add(1)
		})
	}
	ask("a")
	testkit.Eventually(t, "one runs", func() bool { return len(order) == 1 })
	for i := range 4 { // half of the queue
		ask(fmt.Sprint("w", i))
		testkit.Eventually(t, "it waits", func() bool { return s.Stats().Queued == int64(i+1) })
	}
	if status, text, h := post(t, url, `{"prompt":"z"}`); status != 503 || h.Get("Retry-After") == "" || !strings.Contains(text, "too many requests wait") {
		t.Fatal(status, text)
	}
	if n := s.Stats().Engine[e]; n != 1 {
		t.Fatal(n)
	}
	for range 5 {
		release <- true
	}
	wg.Wait()
	if statuses[200].Load() != 5 {
		t.Error("not all who waited were served")
	}
	close(order)
	var got []string
	for p := range order {
		got = append(got, p)
	}
	if fmt.Sprint(got) != "[a w0 w1 w2 w3]" {
		t.Error(got)
	}
	if st := s.Stats(); st.Requests["refused"] != 1 || st.Queued != 0 || st.Engine[e] != 0 {
		t.Errorf("%+v", st)
	}
	url, _ = startProxy(t, proxy.Options{Engines: []string{e}, MaxPerEngine: 1, QueueTimeout: 20 * time.Millisecond, HealthInterval: 20 * time.Millisecond})
	reach(t, url)
	order = make(chan string, 10)
	wg.Go(func() { post(t, url, `{"prompt":"a"}`) })
	testkit.Eventually(t, "one runs", func() bool { return len(order) == 1 })
	if status, text, _ := post(t, url, `{"prompt":"b"}`); status != 503 || !strings.Contains(text, "no engine had room within 20ms") {
		t.Error(status, text)
	}
	release <- true
	wg.Wait()
}

// A proxy that drains finishes its requests, refuses new ones, and reports it on the health path for load balancers.
func TestDrain(t *testing.T) {
	release := make(chan bool)
	e := mock(t, func(w http.ResponseWriter, r *http.Request) { <-release; fmt.Fprint(w, `{}`) })
	url, s := startProxy(t, proxy.Options{Engines: []string{e}, HealthInterval: 20 * time.Millisecond})
	reach(t, url)
	var wg sync.WaitGroup
	wg.Go(func() {
		if status, text, _ := post(t, url, `{"prompt":"a"}`); status != 200 {
			t.Error(status, text)
		}
	})
	testkit.Eventually(t, "it runs", func() bool { return s.Stats().Engine[e] == 1 })
	s.Drain()
	if status, text, h := post(t, url, `{"prompt":"b"}`); status != 503 || h.Get("Retry-After") == "" || !strings.Contains(text, "stopping") {
		t.Error(status, text)
	}
	if r, err := http.Get(url + "/health"); err != nil || r.StatusCode != 503 {
		t.Error(err)
	} else {
		r.Body.Close()
	}
	release <- true
	wg.Wait()
}

// cached_tokens in the usage counts the tokens that were cached before the request, not those that came from P.
func TestUsage(t *testing.T) {
	x := deploy(t, 1, 0)
	cached := func(text string) (n int) {
		t.Helper()
		for line := range strings.Lines(text) {
			var a struct {
				Usage *struct {
					Details *struct {
						Cached int `json:"cached_tokens"`
					} `json:"prompt_tokens_details"`
				}
			}
			if json.Unmarshal([]byte(strings.TrimPrefix(line, "data: ")), &a) == nil && a.Usage != nil && a.Usage.Details != nil {
				n = a.Usage.Details.Cached
			}
		}
		return n
	}
	for i, more := range []string{"", `,"stream":true,"stream_options":{"include_usage":true}`} {
		status, text, _ := post(t, x.url, body(10+i, 3, more))
		if status != 200 || cached(text) > 16 {
			t.Errorf("%d %s: %d tokens cached of a new prompt", status, text, cached(text))
		}
		if _, text, _ = post(t, x.url, body(10+i, 3, more)); cached(text) < 64 {
			t.Errorf("%s: %d tokens cached of a prompt that P had", text, cached(text))
		}
	}
}

// gate is a TCP forwarder to an engine that a test can close.
type gate struct {
	t    testing.TB
	addr string
	to   string
	wg   sync.WaitGroup
	mu   sync.Mutex
	l    net.Listener
	all  []net.Conn
}

func newGate(t testing.TB, to string) *gate {
	l := testkit.Listen(t)
	g := &gate{t: t, addr: l.Addr().String(), to: strings.TrimPrefix(to, "http://")}
	l.Close()
	g.open()
	t.Cleanup(g.close)
	return g
}

func (g *gate) open() {
	g.t.Helper()
	for end := time.Now().Add(60 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		l, err := net.Listen("tcp", g.addr)
		if err == nil {
			g.l = l
			break
		}
		if time.Now().After(end) {
			g.t.Fatal(err)
		}
	}
	g.wg.Go(func() {
		for {
			in, err := g.l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", g.to)
			if err != nil {
				in.Close()
				continue
			}
			g.mu.Lock()
			g.all = append(g.all, in, out)
			g.mu.Unlock()
			for _, way := range [][2]net.Conn{{in, out}, {out, in}} {
				g.wg.Go(func() {
					_, _ = io.Copy(way[0], way[1])
					_, _ = way[0].Close(), way[1].Close()
				})
			}
		}
	})
}

func (g *gate) close() {
	g.l.Close()
	g.mu.Lock()
	for _, c := range g.all {
		c.Close()
	}
	g.all = nil
	g.mu.Unlock()
	g.wg.Wait()
}

// When D cannot be reached, P's KV is freed before P's timeout: another D takes it at once, or, where
// there is no other, a D that comes back does.
func TestPsMemoryIsFreed(t *testing.T) {
	for _, more := range []int{0, 1} {
		t.Run(fmt.Sprint(more), func(t *testing.T) {
			x := &deployment{t: t}
			x.stopAll()
			o := proxy.Options{HealthInterval: 20 * time.Millisecond, Attempts: 1 + 2*more}
			x.pair(t, pair{model: "m", dialect: proxy.Mooncake013, p: 1, d: 1 + more}, &o, 10*time.Millisecond)
			g := newGate(t, x.d[0].web.URL)
			o.Decode[0] = "http://" + g.addr
			x.start(o)
			var wg sync.WaitGroup
			var ok atomic.Int64
			for i := range 4 {
				wg.Go(func() {
					if status, _, _ := post(t, x.url, body(i, 3, "")); status == 200 {
						ok.Add(1)
					}
				})
			}
			// D goes while P computes: all requests have chosen it, or one of two.
			testkit.Eventually(t, "P computes", func() bool { s := x.p[0].Stats(); return s.Running+s.Waiting > 0 || s.Finished > 0 })
			g.close()
			wg.Wait()
			if more == 1 && ok.Load() != 4 {
				t.Errorf("%d of 4 were served by the other", ok.Load())
			}
			g.open()
			x.well()
			x.idle()
		})
	}
}
