// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
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
)

// Each form of a request is answered as by one engine: native and OpenAI's, whole and streamed, lists, and several answers to a prompt,
// which SGLang itself would never finish. D has all KV from P.
func TestSGLangForms(t *testing.T) {
	for _, detect := range []bool{false, true} {
		o := proxy.Options{Dialect: proxy.SGLang}
		if detect {
			o = proxy.Options{Detect: true}
		}
		x := deploySGLang(t, 2, 2, o, engine.Options{})
		text := func(i int) string { return fmt.Sprintf("prompt %d ", i) + strings.Repeat("tell me more ", 20+i) }
		f := func(path, one, whole string, prompts, n int) {
			t.Helper()
			for _, more := range []string{"", `,"stream":true`, `,"stream":true,"stream_options":{"include_usage":true}`} {
				if path == "/generate" && strings.Contains(more, "options") {
					continue
				}
				var want []string
				tokens := 0
				for i := range prompts {
					status, answer := askSGLang(t, x.alone.web.URL, path, strings.ReplaceAll(one, "PROMPT", strconv.Quote(text(i))))
					if status != 200 {
						t.Fatalf("%d %s", status, answer)
					}
					a := readSGLang(t, answer)
					tokens += a.usage[0]
					for range n {
						want = append(want, a.texts[0])
					}
				}
				request := whole
				for i := range prompts {
					request = strings.Replace(request, "PROMPT", strconv.Quote(text(i)), 1)
				}
				request = strings.TrimSuffix(request, "}") + more + "}"
				status, answer := askSGLang(t, x.url, path, request)
				got := readSGLang(t, answer)
				if status != 200 || !slices.Equal(got.texts, want) || more != "" && !strings.HasSuffix(answer, "data: [DONE]\n\n") {
					t.Errorf("%s %.200s: %d %q\nwant %q", path, request, status, got.texts, want)
				}
				if path != "/generate" && more != `,"stream":true` && got.usage != [2]int{tokens, 6 * prompts * n} {
					t.Errorf("%s %.200s: usage %v, want %d", path, request, got.usage, tokens)
				}
				if path != "/generate" && len(got.ids) != 1 {
					t.Errorf("%s %.200s: ids %v", path, request, got.ids)
				}
				if path == "/generate" && more == "" && got.list != (prompts*n > 1 || strings.Contains(whole, `"text":[`)) {
					t.Errorf("%.200s: %s", request, answer)
				}
			}
		}
		native := `{"text":PROMPT,"sampling_params":{"max_new_tokens":6}}`
		f("/generate", native, native, 1, 1)
		f("/generate", native, `{"text":[PROMPT],"sampling_params":{"max_new_tokens":6}}`, 1, 1)
		f("/generate", native, `{"text":[PROMPT,PROMPT,PROMPT],"sampling_params":{"max_new_tokens":6},"rid":"r"}`, 3, 1)
		f("/generate", native, `{"text":PROMPT,"sampling_params":{"max_new_tokens":6,"n":2}}`, 1, 2)
		f("/generate", native, `{"text":[PROMPT,PROMPT],"sampling_params":[{"max_new_tokens":6,"n":2},{"n":2,"max_new_tokens":6}]}`, 2, 2)
		completion := `{"prompt":PROMPT,"max_tokens":6}`
		f("/v1/completions", completion, completion, 1, 1)
		f("/v1/completions", completion, `{"prompt":[PROMPT,PROMPT],"max_tokens":6}`, 2, 1)
		f("/v1/completions", completion, `{"prompt":[PROMPT,PROMPT],"max_tokens":6,"n":2}`, 2, 2)
		chat := `{"messages":[{"role":"user","content":PROMPT}],"max_tokens":6}`
		f("/v1/chat/completions", chat, chat, 1, 1)
		f("/v1/chat/completions", chat, `{"messages":[{"role":"user","content":PROMPT}],"max_tokens":6,"n":3}`, 1, 3)
		x.waitIdle()
		loaded := int64(0)
		for _, d := range x.ds {
			loaded += d.Stats().LoadedTokens
		}
		if loaded == 0 {
			t.Error("no KV came from P")
		}
		if bad := x.proxy.Stats().Requests; bad["ok"] != 25 {
			t.Errorf("%v", bad)
		}
	}
}

// sglLegs records the bodies that P or D of SGLang got.
type sglLegs struct {
	sync.Mutex
	bodies []string
}

func (l *sglLegs) take(r *http.Request) string {
	text, _ := io.ReadAll(r.Body)
	l.Lock()
	defer l.Unlock()
	l.bodies = append(l.bodies, string(text))
	return string(text)
}

func (l *sglLegs) all() []string {
	l.Lock()
	defer l.Unlock()
	return slices.Clone(l.bodies)
}

// mockSGLang is an engine of SGLang, and a bootstrap server, that answers as a function does.
func mockSGLang(t testing.TB, mode string, more map[string]string, handler http.HandlerFunc) string {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("/ready", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/server_info", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"disaggregation_mode":%q,"api_key":"secret","version":"0.5.23","launch_command":"--api-key secret"}`, mode)
	})
	mux.HandleFunc("/route", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, more["/route"])
	})
	for path, text := range more {
		if path != "/route" {
			mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, text) })
		}
	}
	if more["/model_info"] == "" {
		mux.HandleFunc("/model_info", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"model_path":"m"}`) })
	}
	if more["/v1/models"] == "" {
		mux.Handle("/v1/models", http.NotFoundHandler())
	}
	mux.HandleFunc("/", handler)
	s := httptest.NewServer(mux)
	t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
	return s.URL
}

const oneRankSGLang = `{"attn_tp_size":1,"dp_size":1,"follow_bootstrap_room":true}`

func startMockedPair(t testing.TB, route string, o proxy.Options, p, d http.HandlerFunc) (string, *proxy.Proxy) {
	t.Helper()
	pURL := mockSGLang(t, "prefill", map[string]string{"/route": route}, p)
	o.Dialect, o.HealthInterval = proxy.SGLang, 20*time.Millisecond
	o.Prefill = []proxy.Prefill{{URL: pURL, Registry: pURL}}
	o.Decode = []string{mockSGLang(t, "decode", map[string]string{"/v1/models": `{"data":[{"id":"m","root":"m"},{"id":"lora0","root":"x","parent":"m"}]}`}, d)}
	url, s := startProxy(t, o)
	reach(t, url)
	return url, s
}

// P and D get the client's bytes with one room, whatever fields of that kind the client sent; P does not stream.
func TestSGLangBodies(t *testing.T) {
	var ps, ds sglLegs
	url, s := startMockedPair(t, oneRankSGLang, proxy.Options{}, func(w http.ResponseWriter, r *http.Request) {
		ps.take(r)
		fmt.Fprint(w, `{"text":"a","meta_info":{"cached_tokens":7}}`)
	}, func(w http.ResponseWriter, r *http.Request) {
		ds.take(r)
		fmt.Fprint(w, `{"text":"a","meta_info":{"cached_tokens":0}}`)
	})
	var boot struct {
		Host string `json:"bootstrap_host"`
		Port int    `json:"bootstrap_port"`
		Room int64  `json:"bootstrap_room"`
	}
	seen := map[int64]bool{}
	for _, own := range []string{"", `"bootstrap_room":18446744073709551615,`, `"bootstrap_room":0,"bootstrap_host":"evil","bootstrap_port":1,"bootstrap_pair_key":"k","disagg_prefill_dp_rank":3,`, `"bootstrap_room":[1,2],`} {
		status, answer := askSGLang(t, url, "/generate", `{ "text":"hello" , `+own+`"odd": 1.50,"sampling_params":{"x":[ ]},"stream":false}`)
		if status != 200 || answer != `{"text":"a","meta_info":{"cached_tokens":7}}` {
			t.Fatalf("%d %s", status, answer)
		}
		p, d := ps.all(), ds.all()
		last, other := d[len(d)-1], p[len(p)-1]
		if err := json.Unmarshal([]byte(last), &boot); err != nil || last != other {
			t.Fatalf("D got %s\nP got %s, %v", last, other, err)
		}
		if boot.Room < 1 || boot.Room > 1<<63-1<<20 || seen[boot.Room] || boot.Host != "127.0.0.1" || boot.Port < 2 {
			t.Errorf("%+v", boot)
		}
		seen[boot.Room] = true
		if !strings.HasPrefix(last, `{ "text":"hello" , `) || !strings.Contains(last, `"odd": 1.50,"sampling_params":{"x":[ ]},"stream":false`) || strings.Contains(last, "pair_key") || strings.Contains(last, "dp_rank") {
			t.Error(last)
		}
	}
	if _, answer := askSGLang(t, url, "/v1/completions", `{"model":"lora0","prompt":"x","stream":true,"stream_options":{"include_usage":true}}`); answer == "" {
		t.Error("no answer")
	}
	p, d := ps.all(), ds.all()
	if got := p[len(p)-1]; !strings.Contains(got, `"stream":false`) || strings.Contains(got, "stream_options") || !strings.Contains(got, `"model":"m:lora0"`) { // P has not listed its models
		t.Errorf("P got %s", got)
	}
	if got := d[len(d)-1]; !strings.Contains(got, `"stream":true,"stream_options":{"include_usage":true}`) || !strings.Contains(got, `"model":"m:lora0"`) {
		t.Errorf("D got %s", got)
	}
	status, _ := askSGLang(t, url, "/v1/completions", `{"model":"m:lora0","prompt":"x"}`)
	if other, _ := askSGLang(t, url, "/v1/completions", `{"model":"lora1","prompt":"x"}`); status != 200 || other != 404 {
		t.Errorf("%d, %d", status, other)
	}
	testkit.Eventually(t, "no place is taken", func() bool { return s.Taken() == "" })
}

// Rooms take P's data-parallel ranks in turn.
func TestSGLangRanks(t *testing.T) {
	var ps sglLegs
	url, _ := startMockedPair(t, `{"dp_size":4,"follow_bootstrap_room":true}`, proxy.Options{}, func(w http.ResponseWriter, r *http.Request) {
		ps.take(r)
		fmt.Fprint(w, `{}`)
	}, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, `{}`) })
	got := map[int64]int{}
	for range 8 {
		if status, answer := askSGLang(t, url, "/generate", `{"text":"x"}`); status != 200 {
			t.Fatalf("%d %s", status, answer)
		}
	}
	testkit.Eventually(t, "P has all requests", func() bool { return len(ps.all()) == 8 }) // D does not wait for it here
	for _, text := range ps.all() {
		var boot struct {
			Room int64 `json:"bootstrap_room"`
		}
		if err := json.Unmarshal([]byte(text), &boot); err != nil {
			t.Fatal(err)
		}
		got[boot.Room%4]++
	}
	if len(got) != 4 || got[0] != 2 || got[3] != 2 {
		t.Errorf("requests by rank: %v", got)
	}
}

// P's refusal is the client's answer, although D would wait. An error in D's stream is an error for the client, too.
func TestSGLangRefusals(t *testing.T) {
	hang := func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	}
	refused := `{"object":"error","message":"too long","code":400}`
	refuse := func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(400)
		fmt.Fprint(w, refused)
	}
	url, s := startMockedPair(t, oneRankSGLang, proxy.Options{}, refuse, hang)
	if status, answer := askSGLang(t, url, "/v1/completions", `{"prompt":"x","stream":true}`); status != 400 || answer != refused {
		t.Errorf("%d %s", status, answer)
	}
	testkit.Eventually(t, "no place is taken", func() bool { return s.Taken() == "" })

	stream := func(events string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, events)
		}
	}
	bad := `{"error": {"object": "error", "message": "no", "code": 400}}`
	url, s = startMockedPair(t, oneRankSGLang, proxy.Options{}, hang, stream("data: "+strings.ReplaceAll(bad, `{"error": {`, `{"error":{`)+"\n\ndata: [DONE]\n\n"))
	if status, answer := askSGLang(t, url, "/v1/chat/completions", `{"messages":[],"stream":true}`); status != 400 || !strings.Contains(answer, `"message": "no"`) {
		t.Errorf("%d %s", status, answer)
	}
	testkit.Eventually(t, "no place is taken", func() bool { return s.Taken() == "" })

	failed := `data: {"text":"","meta_info":{"finish_reason":{"type":"abort","message":"Decode transfer failed","status_code":500}}}` + "\n\ndata: [DONE]\n\n"
	good := `data: {"text":"a","meta_info":{"finish_reason":null}}` + "\n\ndata: [DONE]\n\n"
	var ds sglLegs
	url, s = startMockedPair(t, oneRankSGLang, proxy.Options{}, hang, func(w http.ResponseWriter, r *http.Request) {
		ds.take(r)
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, map[bool]string{true: failed, false: good}[len(ds.all()) == 1])
	})
	if status, answer := askSGLang(t, url, "/generate", `{"text":"x","stream":true}`); status != 200 || answer != good {
		t.Errorf("%d %s", status, answer)
	}
	if got := ds.all(); len(got) != 2 || got[0] == got[1] {
		t.Errorf("the retry had the same room: %v", got)
	}
	testkit.Eventually(t, "no place is taken", func() bool { return s.Taken() == "" })
}

// A client leaves: D's leg ends before P's, which ends too. P fails: D's leg ends at once, and another attempt has another room.
func TestSGLangLegsEnd(t *testing.T) {
	var mu sync.Mutex
	var ended []string
	both := make(chan struct{}, 8)
	leg := func(name string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			both <- struct{}{}
			<-r.Context().Done()
			mu.Lock()
			ended = append(ended, name)
			mu.Unlock()
		}
	}
	url, s := startMockedPair(t, oneRankSGLang, proxy.Options{}, leg("p"), leg("d"))
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		r, _ := http.NewRequestWithContext(ctx, http.MethodPost, url+"/generate", strings.NewReader(`{"text":"x","stream":true}`))
		if resp, err := http.DefaultClient.Do(r); err == nil {
			resp.Body.Close()
			t.Error("it was answered")
		}
	})
	<-both
	<-both
	cancel()
	wg.Wait()
	testkit.Eventually(t, "both legs end", func() bool { mu.Lock(); defer mu.Unlock(); return len(ended) == 2 })
	testkit.Eventually(t, "no place is taken", func() bool { return s.Taken() == "" })

	var ps, ds sglLegs
	url, s = startMockedPair(t, oneRankSGLang, proxy.Options{}, func(w http.ResponseWriter, r *http.Request) {
		ps.take(r)
		if len(ps.all()) == 1 {
			waitFor(r, func() bool { return len(ds.all()) == 1 })
			w.WriteHeader(500)
			return
		}
		fmt.Fprint(w, `{}`)
	}, func(w http.ResponseWriter, r *http.Request) {
		ds.take(r)
		if len(ds.all()) == 1 {
			<-r.Context().Done() // D waits for P
			return
		}
		waitFor(r, func() bool { return len(ps.all()) == 2 })
		fmt.Fprint(w, `{"text":"a"}`)
	})
	status, answer := askSGLang(t, url, "/generate", `{"text":"x"}`)
	if got := ds.all(); status != 200 || len(got) != 2 || got[0] == got[1] || !slices.Equal(got, ps.all()) {
		t.Errorf("%d %s: D got %v, P %v", status, answer, got, ps.all())
	}
	testkit.Eventually(t, "no place is taken", func() bool { return s.Taken() == "" })
}

// waitFor waits until something is so, or the request has ended.
func waitFor(r *http.Request, ok func() bool) {
	for !ok() && r.Context().Err() == nil {
		time.Sleep(time.Millisecond)
	}
}

// A P gets no requests while some of its ranks have not registered, and the proxy reports the reason. It gets requests when all have. A
// P that reports itself as a D gets none either.
func TestSGLangHalfRegistered(t *testing.T) {
	registry, err := bootstrap.Open(bootstrap.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer registry.Close()
	boot := api.NewBoot(registry, 16, 2)
	boot.Register()
	b := httptest.NewServer(boot)
	defer b.Close()
	ok := func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, `{}`) }
	o := proxy.Options{Dialect: proxy.SGLang, HealthInterval: 10 * time.Millisecond, Decode: []string{mockSGLang(t, "decode", nil, ok)}}
	o.Prefill = []proxy.Prefill{{URL: mockSGLang(t, "prefill", nil, ok), Registry: b.URL}, {URL: mockSGLang(t, "decode", nil, ok), Registry: b.URL}}
	url, s := startProxy(t, o)
	testkit.Eventually(t, "D is well", func() bool { return s.Stats().Well[o.Decode[0]] == 1 })
	testkit.Eventually(t, "the reason is known", func() bool {
		return strings.Contains(s.Problem(o.Prefill[0].URL), "status 503: Prefill server not fully registered yet (1/2)") && strings.Contains(s.Problem(o.Prefill[1].URL), `"decode"`)
	})
	if status, answer := askSGLang(t, url, "/generate", `{"text":"x"}`); status != 503 {
		t.Errorf("%d %s", status, answer)
	}
	boot.Register()
	reachSome(t, url)
	if status, answer := askSGLang(t, url, "/generate", `{"text":"x"}`); status != 200 || s.Stats().Well[o.Prefill[1].URL] != 0 {
		t.Errorf("%d %s", status, answer)
	}
	http.DefaultTransport.(*http.Transport).CloseIdleConnections()
}

// Clients that leave, and a P and a D that are killed, leave nothing behind, and every other request is answered right.
func TestSGLangUnderLoad(t *testing.T) {
	x := deploySGLang(t, 2, 2, proxy.Options{Dialect: proxy.SGLang}, engine.Options{StepTime: time.Millisecond, Getenv: keepFor("3")}) // clients leave: the test waits for the KV to go
	f := func(i int) {
		path, body := "/generate", fmt.Sprintf(`{"text":"request %d %s","sampling_params":{"max_new_tokens":20}`, i, strings.Repeat("tell me more ", 40))
		if i%2 == 0 {
			body += `,"stream":true`
		}
		if i%3 == 0 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*time.Millisecond)
			defer cancel()
			r, _ := http.NewRequestWithContext(ctx, http.MethodPost, x.url+path, strings.NewReader(body+"}"))
			if resp, err := http.DefaultClient.Do(r); err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
			return
		}
		_, want := askSGLang(t, x.alone.web.URL, path, body+"}")
		status, got := askSGLang(t, x.url, path, body+"}")
		if status != 200 || readSGLang(t, got).texts[0] != readSGLang(t, want).texts[0] {
			t.Errorf("%d: %d %s", i, status, got)
		}
	}
	var wg sync.WaitGroup
	for i := range 30 {
		wg.Go(func() { f(i) })
	}
	wg.Wait()
	x.waitIdle()

	for _, dead := range []*sgl{x.ps[0], x.ds[0]} { // each with a second one beside it
		for i := range 6 {
			wg.Go(func() {
				body := fmt.Sprintf(`{"text":"killed %d %s","sampling_params":{"max_new_tokens":4}}`, i, strings.Repeat("tell me more ", 40))
				if status, got := askSGLang(t, x.url, "/generate", body); status != 200 {
					t.Errorf("%d %s", status, got)
				}
			})
			if i == 3 {
				dead.web.Listener.Close()
				dead.web.CloseClientConnections()
			}
		}
		wg.Wait()
		testkit.Eventually(t, "the dead one is known", func() bool {
			dead.web.CloseClientConnections() // one may have been accepted just before the listener's end
			return x.proxy.Stats().Well[dead.web.URL] == 0
		})
	}
	testkit.Eventually(t, "no place is taken", func() bool { return x.proxy.Taken() == "" })
}

// Clients can read an engine's configuration but none of its secrets. Each id names one request.
func TestSGLangRoutes(t *testing.T) {
	var ds sglLegs
	url, _ := startMockedPair(t, oneRankSGLang, proxy.Options{}, func(w http.ResponseWriter, r *http.Request) { ds.take(r) }, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/model_info" {
			fmt.Fprint(w, `{"model_path":"m"}`)
			return
		}
		ds.take(r)
	})
	get := func(path string) string {
		r, err := http.Get(url + path)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		text, _ := io.ReadAll(r.Body)
		return string(text)
	}
	if info := get("/server_info"); !strings.Contains(info, `"version":"0.5.23"`) || !strings.Contains(info, `"disaggregation_mode":"decode"`) || strings.Contains(info, "secret") {
		t.Error(info)
	}
	if info := get("/model_info"); info != `{"model_path":"m"}` {
		t.Error(info)
	}
	for _, body := range []string{`{"abort_all":true}`, `{"rid":"","abort_all":false}`, `{"rid":"x","abort_all":true}`, `{}`, `x`} {
		if status, answer := askSGLang(t, url, "/abort_request", body); status != 400 {
			t.Errorf("%s: %d %s", body, status, answer)
		}
	}
	want := []string{`{"rid":"r1"}`, `{"rid":"2-r1"}`, `{"rid":"3-r1"}`, `{"rid":"r1"}`, `{"rid":"2-r1"}`, `{"rid":"3-r1"}`} // of each attempt, D's and then P's
	if status, _ := askSGLang(t, url, "/abort_request", `{"rid":"r1"}`); status != 200 || !slices.Equal(ds.all(), want) {
		t.Errorf("%d %v", status, ds.all())
	}
	for _, body := range []string{`{"text":["a","b"],"sampling_params":{"n":65}}`, `{"text":["a",[1]]}`, `{"text":["a","b"],"sampling_params":[{}]}`, `{"text":"a","sampling_params":{"n":0}}`, `{"text":"a","sampling_params":{"n":9223372036854775807}}`} {
		if status, answer := askSGLang(t, url, "/generate", body); status != 400 {
			t.Errorf("%s: %d %s", body, status, answer)
		}
	}
	if status, answer := askSGLang(t, url, "/v1/messages", `{"messages":[],"max_tokens":1}`); status != 501 {
		t.Errorf("%d %s", status, answer)
	}

	plain := mock(t, func(http.ResponseWriter, *http.Request) {})
	url, _ = startProxy(t, proxy.Options{Detect: true, Engines: []string{plain}, HealthInterval: 20 * time.Millisecond})
	reach(t, url)
	if status, _ := askSGLang(t, url, "/generate", `{"text":"x"}`); status != 404 {
		t.Errorf("/generate of vLLM: %d", status)
	}
}

// An engine of vLLM is not asked for /server_info, which takes seconds there in its development mode: it is well at its first look.
func TestServerInfoOfVLLMIsNotAsked(t *testing.T) {
	var asked atomic.Int64
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/server_info", func(_ http.ResponseWriter, r *http.Request) { asked.Add(1); <-r.Context().Done() })
	e := serveMux(t, mux)
	_, p := startProxy(t, proxy.Options{Engines: []string{e}, Detect: true, HealthInterval: 20 * time.Millisecond})
	testkit.Eventually(t, "the engine is well", func() bool { return p.Stats().Well[e] == 1 })
	if n := asked.Load(); n != 0 {
		t.Errorf("/server_info was asked %d times", n)
	}
}
