// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
)

const oneRank = `{"0":{"engine_id":"e","worker_addr":{"0":{"0":"tcp://h:1"}}}}`

// transferOf is the transfer id of a request of P's or D's.
func transferOf(m map[string]any) any { return m["kv_transfer_params"].(map[string]any)["transfer_id"] }

// A client leaves when P has computed and D does not read the request. D never gets the whole request, so the proxy asks
// a D to take P's KV.
func TestDDoesNotRead(t *testing.T) {
	t.Parallel() // it waits for deadlines
	var ps, ds legs
	var asked atomic.Int64
	stuck := make(chan struct{})
	p := mock(t, func(w http.ResponseWriter, r *http.Request) { ps.note(r); fmt.Fprint(w, `{}`) })
	d := mock(t, func(w http.ResponseWriter, r *http.Request) {
		if asked.Add(1) == 1 {
			<-stuck
			return
		}
		ds.note(r)
		fmt.Fprint(w, `{}`)
	})
	t.Cleanup(func() { close(stuck) })
	o := proxy.Options{Prefill: []proxy.Prefill{{URL: p, Registry: mockRegistry(t, oneRank)}}, Decode: []string{d}, HealthInterval: 20 * time.Millisecond}
	url, s := startProxy(t, o)
	reach(t, url)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		long := `{"prompt":"` + strings.Repeat("a", 16<<20) + `"}` // more than sockets hold
		r, _ := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", strings.NewReader(long))
		if resp, err := http.DefaultClient.Do(r); err == nil {
			resp.Body.Close()
			t.Error("it was answered")
		}
	})
	testkit.Eventually(t, "P has its part, and D does not read", func() bool {
		at := s.Stats().Engine
		return ps.count() == 1 && asked.Load() == 1 && at[p] == 0 && at[d] == 1
	})
	cancel()
	wg.Wait()
	testkit.Eventually(t, "D is asked to take P's KV", func() bool { return ds.count() == 1 && s.Stats().Freed == 1 })
	sent, _ := ps.all()
	taken, _ := ds.all()
	if transferOf(sent[0]) != transferOf(taken[0]) || taken[0]["max_tokens"] != 1.0 {
		t.Errorf("P did %v, D took %v", sent[0]["kv_transfer_params"], taken[0]["kv_transfer_params"])
	}
	testkit.Eventually(t, "no place is taken", func() bool { return s.Taken() == "" })
}

// A client leaves while D reads the request, which is longer than the sockets' buffers. D must get all of it, so that it can free the
// KV that P computes.
func TestDHasAllOfIt(t *testing.T) {
	var ps, ds legs
	prompt := strings.Repeat("a", 8<<20) // more than D's small receive buffer and the proxy's send buffer hold
	// note reads the body before it decodes: after the client left, D has five seconds to read, and decoding takes longer
	// than that on a busy machine.
	note := func(l *legs, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		r.Body = io.NopCloser(strings.NewReader(strings.Replace(string(body), prompt, "whole", 1)))
		l.note(r)
	}
	begun, left := make(chan struct{}, 1), make(chan struct{})
	p := mock(t, func(_ http.ResponseWriter, r *http.Request) { note(&ps, r); <-r.Context().Done() })
	d := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost { // a look at D's health
			return
		}
		begun <- struct{}{}
		<-left
		note(&ds, r)
	}))
	d.Config.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		_ = c.(*net.TCPConn).SetReadBuffer(64 << 10)
		return ctx
	}
	d.Start()
	t.Cleanup(d.Close)
	o := proxy.Options{Prefill: []proxy.Prefill{{URL: p, Registry: mockRegistry(t, oneRank)}}, Decode: []string{d.URL}, HealthInterval: 20 * time.Millisecond}
	at, s := startProxy(t, o)
	reach(t, at)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		r, _ := http.NewRequestWithContext(ctx, http.MethodPost, at+"/v1/completions", strings.NewReader(`{"prompt":"`+prompt+`"}`))
		if resp, err := http.DefaultClient.Do(r); err == nil {
			resp.Body.Close()
		}
	})
	<-begun
	testkit.Eventually(t, "P has its part", func() bool { return ps.count() == 1 })
	cancel()
	wg.Wait()
	time.Sleep(50 * time.Millisecond) // the proxy is to see it first
	close(left)
	testkit.Eventually(t, "D has read", func() bool { return ds.count() == 1 })
	sent, _ := ps.all()
	got, _ := ds.all()
	if text, _ := got[0]["prompt"].(string); text != "whole" {
		t.Fatalf("D has %d bytes of the prompt", len(text))
	}
	if transferOf(got[0]) != transferOf(sent[0]) {
		t.Errorf("P did %v, D has %v", sent[0]["kv_transfer_params"], got[0]["kv_transfer_params"])
	}
	testkit.Eventually(t, "no place is taken", func() bool { return s.Taken() == "" && s.Stats().Requests["client_left"] == 1 })
}

// The only D fails some requests and then recovers: the proxy asks it to take P's KV until it can.
func TestFreedLater(t *testing.T) {
	var asked atomic.Int64
	p := mock(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"kv_transfer_params":{"a":1}}`) })
	d := mock(t, func(w http.ResponseWriter, _ *http.Request) {
		if asked.Add(1) < 4 {
			http.Error(w, "not now", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprint(w, `{}`)
	})
	o := proxy.Options{Dialect: proxy.NIXL, Prefill: []proxy.Prefill{{URL: p}}, Decode: []string{d}, Attempts: 1, HealthInterval: 10 * time.Millisecond}
	at, s := startProxy(t, o)
	reach(t, at)
	if status, text, _ := post(t, at, `{"prompt":"a"}`); status != http.StatusServiceUnavailable {
		t.Fatal(status, text)
	}
	testkit.Eventually(t, "D takes it", func() bool { return s.Stats().Freed == 1 && s.Taken() == "" })
	if n := asked.Load(); n != 4 {
		t.Errorf("D was asked %d times", n)
	}
}

// A D that is about to end also fails the request to take P's KV. This says nothing about the KV, so the proxy asks again. When a D that
// continues to run fails it again, the proxy assumes that P does not have the KV any more, and stops asking.
func TestFailureOfADyingDKeepsNothingOfP(t *testing.T) {
	for _, dies := range []bool{true, false} {
		var asked atomic.Int64
		p := mock(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"kv_transfer_params":{"a":1}}`) })
		d := mock(t, func(w http.ResponseWriter, _ *http.Request) {
			if n := asked.Add(1); n < 3 || !dies {
				http.Error(w, "no", http.StatusInternalServerError)
				return
			}
			fmt.Fprint(w, `{}`)
		})
		o := proxy.Options{Dialect: proxy.NIXL, Prefill: []proxy.Prefill{{URL: p}}, Decode: []string{d}, Attempts: 1, HealthInterval: 10 * time.Millisecond}
		at, s := startProxy(t, o)
		reach(t, at)
		if status, text, _ := post(t, at, `{"prompt":"a"}`); status < http.StatusInternalServerError {
			t.Fatal(status, text)
		}
		if dies {
			testkit.Eventually(t, "the next D takes it", func() bool { return s.Stats().Freed == 1 && s.Taken() == "" })
			continue
		}
		testkit.Eventually(t, "D is asked twice", func() bool { return asked.Load() == 3 && s.Taken() == "" })
		s.Close()
		if n := asked.Load(); n != 3 || s.Stats().Freed != 0 {
			t.Errorf("D was asked %d times", n)
		}
	}
}

// A D that answers nothing any more, not even /health, or that fails each request, has not freed the KV that P
// computed for it: another D does.
func TestLostDKeepsNothingOfP(t *testing.T) {
	for _, how := range []string{"silent", "fails"} {
		t.Run(how, func(t *testing.T) {
			x := &deployment{t: t}
			x.stopAll()
			o := proxy.Options{HealthInterval: 10 * time.Millisecond}
			x.pair(t, pair{model: "m", dialect: proxy.Mooncake013, p: 1, d: 2}, &o, time.Millisecond)
			to, _ := url.Parse(x.d[0].web.URL)
			forward := httputil.NewSingleHostReverseProxy(to)
			forward.ErrorLog = log.New(io.Discard, "", 0) // clients leave
			var lost atomic.Bool
			var met atomic.Int64
			end := make(chan struct{})
			bad := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				asks := r.Method == http.MethodPost
				switch {
				case !lost.Load() || !asks && (how == "fails" || met.Load() == 0): // else no request may come any more
					forward.ServeHTTP(w, r)
				case how == "fails":
					met.Add(1)
					http.Error(w, "the engine is dead", 500)
				case !asks:
					panic(http.ErrAbortHandler)
				default:
					met.Add(1)
					_, _ = io.Copy(io.Discard, r.Body)
					select {
					case <-r.Context().Done():
					case <-end:
					}
				}
			}))
			t.Cleanup(bad.Close)
			t.Cleanup(func() { close(end) })
			o.Decode[0] = bad.URL
			x.start(o)
			lost.Store(true)
			for i := 0; met.Load() == 0 && i < 100; i++ {
				if status, text, _ := post(t, x.url, body(i, 3, "")); status != 200 {
					t.Fatal(status, text)
				}
			}
			if met.Load() == 0 {
				t.Fatal("no request went to the lost D")
			}
			lost.Store(false)
			x.idle()
			testkit.Eventually(t, "no place is taken", func() bool { return x.proxy.Taken() == "" })
		})
	}
}

// P never ends its answer, although D has answered all: P's place is free soon, and nothing waits for it.
func TestPNeverEnds(t *testing.T) {
	p := mock(t, func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	})
	d := mock(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{}`) })
	o := proxy.Options{Prefill: []proxy.Prefill{{URL: p, Registry: mockRegistry(t, oneRank)}}, Decode: []string{d}, HealthInterval: 20 * time.Millisecond}
	at, s := startProxy(t, o)
	reach(t, at)
	if status, text, _ := post(t, at, `{"prompt":"a"}`); status != 200 {
		t.Fatal(status, text)
	}
	testkit.Eventually(t, "no place is taken", func() bool { return s.Taken() == "" })
}

// P breaks off, fails or is late after D has begun to answer. D already has the KV that it needs, and its stream continues to its end.
func TestPFailsAfterDBegan(t *testing.T) {
	for _, how := range []string{"breaks off", "fails", "refuses", "is late"} {
		t.Run(how, func(t *testing.T) {
			began, end := make(chan struct{}, 1), make(chan struct{})
			p := mock(t, func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				<-began
				switch how {
				case "breaks off":
					panic(http.ErrAbortHandler)
				case "fails":
					http.Error(w, "the engine is dead", 500)
				case "refuses":
					http.Error(w, "no", 400)
				default:
					<-r.Context().Done()
				}
			})
			d := mock(t, func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", "text/event-stream")
				fmt.Fprint(w, "data: {\"a\":1}\n\n")
				_ = http.NewResponseController(w).Flush()
				<-end
				fmt.Fprint(w, "data: {\"a\":2}\n\ndata: [DONE]\n\n")
			})
			o := proxy.Options{Prefill: []proxy.Prefill{{URL: p, Registry: mockRegistry(t, oneRank)}}, Decode: []string{d}, HealthInterval: 20 * time.Millisecond}
			if how == "is late" {
				o.PrefillTimeout = 3 * time.Second // D begins before
			}
			at, s := startProxy(t, o)
			reach(t, at)
			r, err := http.Post(at+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"a","stream":true}`))
			if err != nil {
				t.Fatal(err)
			}
			defer r.Body.Close()
			first := make([]byte, 6)
			if _, err := io.ReadFull(r.Body, first); err != nil {
				t.Fatal(err)
			}
			began <- struct{}{}
			testkit.Eventually(t, "P's part is over", func() bool { return s.Stats().Engine[p] == 0 })
			close(end)
			rest, err := io.ReadAll(r.Body)
			if err != nil || !bytes.HasSuffix(rest, []byte("[DONE]\n\n")) {
				t.Errorf("%v: %q", err, rest)
			}
			testkit.Eventually(t, "no place is taken", func() bool { return s.Taken() == "" && s.Stats().Requests["ok"] == 1 })
		})
	}
}

// whim answers a request as a bad engine or network may, by chance.
func whim(w http.ResponseWriter, r *http.Request) {
	switch rand.IntN(12) {
	case 0: // before it is read
		panic(http.ErrAbortHandler)
	case 1:
		_, _ = io.Copy(io.Discard, r.Body)
		panic(http.ErrAbortHandler)
	case 2:
		http.Error(w, "dead", 500)
		return
	case 3:
		http.Error(w, "no", 400)
		return
	case 4:
		return // an empty answer
	case 5: // no HTTP
		nc, _, err := http.NewResponseController(w).Hijack()
		if err == nil {
			_, _ = io.WriteString(nc, "what\r\n\r\n")
			nc.Close()
		}
		return
	case 6: // the connection is closed as soon as it has answered
		w.Header().Set("Connection", "close")
	case 7:
		time.Sleep(time.Duration(rand.IntN(3)) * time.Millisecond)
	}
	var m map[string]any
	_ = json.NewDecoder(r.Body).Decode(&m)
	if m["stream"] != true {
		fmt.Fprint(w, `{"kv_transfer_params":{"a":1}}`)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	for i := range 4 {
		fmt.Fprintf(w, "data: {\"i\":%d}\n\n", i)
		_ = http.NewResponseController(w).Flush()
		switch rand.IntN(30) {
		case 0:
			panic(http.ErrAbortHandler)
		case 1:
			return // without [DONE]
		}
	}
	fmt.Fprint(w, "data: [DONE]\n\n")
}

// Whatever engines and clients do, every place is given back once. Afterwards no place is taken, no prompt counts as still
// to be computed, and a new request is served.
func TestPlacesAreGivenBackOnce(t *testing.T) {
	for _, dialect := range []proxy.Dialect{proxy.Mooncake, proxy.NIXL} {
		for _, policy := range []proxy.Policy{proxy.RoundRobin, proxy.PrefixAware} {
			t.Run(fmt.Sprint(dialect, " ", policy), func(t *testing.T) { testPlaces(t, dialect, policy) })
		}
	}
}

func testPlaces(t *testing.T, dialect proxy.Dialect, policy proxy.Policy) {
	var calm atomic.Bool
	engine := func() string {
		return mock(t, func(w http.ResponseWriter, r *http.Request) {
			if !calm.Load() {
				whim(w, r)
				return
			}
			_, _ = io.Copy(io.Discard, r.Body)
			fmt.Fprint(w, `{"kv_transfer_params":{"a":1}}`)
		})
	}
	o := proxy.Options{
		Dialect: dialect, Policy: policy, Decode: []string{engine(), engine()}, HealthInterval: 5 * time.Millisecond,
		MaxPerEngine: 8, QueueTimeout: 50 * time.Millisecond,
	}
	if policy == proxy.PrefixAware {
		o.SkipPrefill, o.SharedStore = 600, true
	}
	for range 2 {
		y := proxy.Prefill{URL: engine()}
		if dialect == proxy.Mooncake {
			y.Registry = mockRegistry(t, oneRank)
		}
		o.Prefill = append(o.Prefill, y)
	}
	at, s := startProxy(t, o)
	reach(t, at)
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range max(15, testkit.Volume(40)) {
				ctx, cancel := t.Context(), context.CancelFunc(func() {})
				if rand.IntN(3) == 0 {
					ctx, cancel = context.WithTimeout(ctx, time.Duration(rand.IntN(4000))*time.Microsecond)
				}
				text := fmt.Sprintf(`{"prompt":%q,"stream":%v}`, strings.Repeat(fmt.Sprint("w", rand.IntN(9), " "), rand.IntN(2000)), rand.IntN(2) == 0)
				r, _ := http.NewRequestWithContext(ctx, http.MethodPost, at+"/v1/completions", strings.NewReader(text))
				if resp, err := http.DefaultClient.Do(r); err == nil {
					_, _ = io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
				}
				cancel()
			}
		})
	}
	wg.Wait()
	calm.Store(true)
	taken := ""
	defer func() {
		if t.Failed() {
			t.Log("still taken:", taken)
		}
	}()
	testkit.Eventually(t, "every place is given back", func() bool { taken = s.Taken(); return taken == "" })
	testkit.Eventually(t, "all are well", func() bool {
		for _, well := range s.Stats().Well {
			if well != 1 {
				return false
			}
		}
		return true
	})
	if status, text, _ := post(t, at, `{"prompt":"a"}`); status != 200 {
		t.Error(status, text)
	}
}
