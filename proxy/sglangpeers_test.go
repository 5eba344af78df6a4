// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
	"github.com/kvasir-kv/kvasir/sim/api"
	"github.com/kvasir-kv/kvasir/sim/engine"
)

// P answers with logprobs of the whole prompt before D answers: however long that is, the client gets D's answer.
func TestSGLangLongAnswerOfP(t *testing.T) {
	read := make(chan struct{})
	once := sync.OnceFunc(func() { close(read) })
	url, s := startMockedPair(t, oneRankSGLang, proxy.Options{Attempts: 1}, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"meta_info":{"input_token_logprobs":[0`)
		for range 10 {
			_, _ = io.WriteString(w, strings.Repeat(",1", 1<<19))
		}
		_, _ = io.WriteString(w, `]}}`)
		once()
	}, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		select {
		case <-read:
		case <-r.Context().Done():
			return
		}
		fmt.Fprint(w, `{"text":"a"}`)
	})
	if status, answer := askSGLang(t, url, "/generate", `{"text":"x"}`); status != 200 || answer != `{"text":"a"}` {
		t.Errorf("%d %s", status, answer)
	}
	testkit.Eventually(t, "no place is taken", func() bool { return s.Taken() == "" })
}

// Engines of SGLang that read fields of a request from its header never get a client's.
func TestSGLangHeaderOverrides(t *testing.T) {
	var mu sync.Mutex
	var got []string
	take := func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		for name := range r.Header {
			if strings.HasPrefix(name, "X-Override-") {
				got = append(got, name)
			}
		}
		fmt.Fprint(w, `{"text":"a"}`)
	}
	url, _ := startMockedPair(t, oneRankSGLang, proxy.Options{}, take, take)
	r, _ := http.NewRequest(http.MethodPost, url+"/generate", strings.NewReader(`{"text":"x"}`))
	for _, name := range []string{"bootstrap-host", "bootstrap-port", "bootstrap-room", "routed-dp-rank", "disagg-prefill-dp-rank", "rid"} {
		r.Header.Set("x-override-"+name, "9223372036854775808")
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if mu.Lock(); resp.StatusCode != 200 || len(got) > 0 {
		t.Errorf("%d, engines got %v", resp.StatusCode, got)
	}
	mu.Unlock()
}

// rids has the request ids of an engine of SGLang. Such an engine refuses an id that it has already, and forgets the ids of a client that
// has left only some time later.
type rids struct {
	mu  sync.Mutex
	all []string
}

func (x *rids) add(body string) (fresh bool) {
	var q struct {
		RID     string `json:"rid"`
		Request string `json:"request_id"` // of /v1/responses; none: the engine makes one
	}
	_ = json.Unmarshal([]byte(body), &q) // the proxy's own
	if q.RID == "" {
		q.RID = q.Request
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, rid := range x.all {
		if rid == q.RID {
			return false
		}
	}
	x.all = append(x.all, q.RID)
	return true
}

// When a client chose the id of a request, a second attempt uses another id, because engines may still have the first one.
func TestSGLangRetryHasItsOwnID(t *testing.T) {
	for _, form := range []string{`{"text":"x","rid":"r"}`, `{"text":["x"],"rid":["r"]}`, `{"text":["x","y"],"rid":"r"}`, `{"input":"x","request_id":"resp_r"}`} {
		var ps, ds rids
		var failures atomic.Int64
		url, s := startMockedPair(t, oneRankSGLang, proxy.Options{}, func(w http.ResponseWriter, r *http.Request) {
			text, _ := io.ReadAll(r.Body)
			if !ps.addAny(string(text)) {
				w.WriteHeader(400)
				fmt.Fprint(w, `{"error":{"message":"Duplicate request ID detected"}}`)
				return
			}
			fmt.Fprint(w, `{"text":"a"}`)
		}, func(w http.ResponseWriter, r *http.Request) {
			text, _ := io.ReadAll(r.Body)
			if !ds.addAny(string(text)) {
				w.WriteHeader(400)
				return
			}
			if failures.Add(1) == 1 {
				w.WriteHeader(500)
				return
			}
			fmt.Fprint(w, `{"text":"a"}`)
		})
		path := "/generate"
		if strings.Contains(form, "input") {
			path = "/v1/responses"
		}
		if status, answer := askSGLang(t, url, path, form); status != 200 {
			t.Errorf("%s: %d %s; P got %v, D %v", form, status, answer, ps.list(), ds.list())
		}
		testkit.Eventually(t, "no place is taken", func() bool { return s.Taken() == "" })
		all := ps.list()
		for i, rid := range all {
			for k, other := range all {
				if i != k && rid != "" && strings.HasPrefix(other, rid) { // engines end all that begin so
					t.Errorf("%s: the end of %q ends %q", form, rid, other)
				}
			}
		}
	}
}

func (x *rids) list() []string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return slices.Clone(x.all)
}

// addAny is add for an id that may be in a list.
func (x *rids) addAny(body string) bool {
	var q struct {
		RID []string `json:"rid"`
	}
	if json.Unmarshal([]byte(body), &q) == nil && len(q.RID) == 1 {
		one, _ := json.Marshal(map[string]string{"rid": q.RID[0]})
		body = string(one)
	}
	return x.add(body)
}

// A client with a key cannot end, or keep out, requests of others by an id that theirs begin with.
func TestSGLangIDsOfKeys(t *testing.T) {
	set, secrets := keyFile(t, keyLine("alice", "sa", ""), keyLine("bob", "sb", "")), []string{"sa", "sb"}
	var mu sync.Mutex
	var got []string
	take := func(w http.ResponseWriter, r *http.Request) {
		text, _ := io.ReadAll(r.Body)
		mu.Lock()
		got = append(got, string(text))
		mu.Unlock()
		fmt.Fprint(w, `{"text":"a"}`)
	}
	url, _ := startMockedPair(t, oneRankSGLang, proxy.Options{Keys: set}, take, take)
	for _, key := range secrets {
		r, _ := http.NewRequest(http.MethodPost, url+"/generate", strings.NewReader(`{"text":"x","rid":"a","http_worker_ipc":"tcp://evil:1","encoder_urls":["http://evil"],"lora_id":"l","decode_tp_size":7,"kv_router_hint":{"source_control_endpoint":"tcp://evil:1"}}`))
		r.Header.Set("Authorization", "Bearer "+key)
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != 200 {
			t.Fatal(resp.Status)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	seen := map[string]int{}
	for _, text := range got {
		var q map[string]any
		if err := json.Unmarshal([]byte(text), &q); err != nil {
			t.Fatal(err)
		}
		rid, _ := q["rid"].(string)
		if seen[rid]++; len(rid) < 32 {
			t.Errorf("rid %q", rid)
		}
		for _, name := range []string{"http_worker_ipc", "encoder_urls", "lora_id", "decode_tp_size", "kv_router_hint"} {
			if q[name] != nil {
				t.Errorf("an engine got %s", name)
			}
		}
	}
	if len(seen) != 2 {
		t.Errorf("%v", seen)
	}
}

// An engine of SGLang whose scheduler is busy does not answer at once which kind it is. The proxy learns the kind later, and never takes
// the engine for another kind meanwhile.
func TestSGLangKnownLate(t *testing.T) {
	var asked atomic.Int64
	var free atomic.Bool
	late := func(mode string, route string, h http.HandlerFunc) string {
		mux := http.NewServeMux()
		for _, path := range []string{"/ready", "/health"} {
			mux.HandleFunc(path, func(http.ResponseWriter, *http.Request) {})
		}
		mux.HandleFunc("/model_info", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{}`) })
		mux.HandleFunc("/server_info", func(w http.ResponseWriter, r *http.Request) {
			if asked.Add(1); !free.Load() {
				w.WriteHeader(503)
				return
			}
			fmt.Fprintf(w, `{"disaggregation_mode":%q,"page_size":16}`, mode)
		})
		mux.HandleFunc("/route", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, route) })
		mux.HandleFunc("/generate", h)
		s := httptest.NewServer(mux)
		t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
		return s.URL
	}
	ok := func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		fmt.Fprint(w, `{"text":"a"}`)
	}
	p := late("prefill", oneRankSGLang, ok)
	d := late("decode", "", ok)
	url, s := startProxy(t, proxy.Options{Detect: true, HealthInterval: 20 * time.Millisecond, Prefill: []proxy.Prefill{{URL: p, Registry: p}}, Decode: []string{d}})
	testkit.Eventually(t, "both were asked", func() bool { return asked.Load() >= 4 })
	if w := s.Stats().Well; w[p]+w[d] != 0 {
		t.Errorf("it is not known what they are, and they get requests: %v", w)
	}
	free.Store(true)
	reach(t, url)
	if status, answer := askSGLang(t, url, "/generate", `{"text":"x"}`); status != 200 {
		t.Errorf("%d %s", status, answer)
	}
}

// An engine of a known kind missed a look. It becomes well again even while its scheduler is busy.
func TestSGLangBusyAfterAMissedLook(t *testing.T) {
	var ready, busy atomic.Bool
	ready.Store(true)
	mux := http.NewServeMux()
	mux.HandleFunc("/ready", func(w http.ResponseWriter, _ *http.Request) {
		if !ready.Load() {
			w.WriteHeader(503)
		}
	})
	mux.HandleFunc("/model_info", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{}`) })
	mux.HandleFunc("/server_info", func(w http.ResponseWriter, r *http.Request) {
		if busy.Load() {
			<-r.Context().Done()
			return
		}
		fmt.Fprint(w, `{"disaggregation_mode":"null"}`)
	})
	e := serveMux(t, mux)
	url, s := startImpatient(t, proxy.Options{Detect: true, HealthInterval: 20 * time.Millisecond, Engines: []string{e}})
	reach(t, url)
	busy.Store(true)
	ready.Store(false)
	testkit.Eventually(t, "the engine misses a look", func() bool { return s.Stats().Well[e] == 0 })
	ready.Store(true)
	testkit.Eventually(t, "the engine is well", func() bool { return s.Stats().Well[e] == 1 })
}

// An engine of another kind takes the place of one of SGLang, at its address, and the other way round.
func TestSGLangReplaced(t *testing.T) {
	var vllm, down atomic.Bool
	down.Store(true)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		path := r.URL.Path
		switch {
		case down.Load():
			w.WriteHeader(503)
		case vllm.Load() && path == "/health", !vllm.Load() && path == "/ready":
		case !vllm.Load() && path == "/model_info":
			fmt.Fprint(w, `{}`)
		case !vllm.Load() && path == "/server_info":
			fmt.Fprint(w, `{"disaggregation_mode":"null"}`)
		case path == "/v1/completions":
			fmt.Fprint(w, `{"ok":1}`)
		default:
			w.WriteHeader(404)
		}
	}))
	t.Cleanup(s.Close)
	_, p := startProxy(t, proxy.Options{Detect: true, HealthInterval: 10 * time.Millisecond, Engines: []string{s.URL}})
	for range 2 {
		for _, v := range []bool{false, true} {
			testkit.Eventually(t, "the engine is unwell", func() bool { return p.Stats().Well[s.URL] == 0 })
			vllm.Store(v)
			down.Store(false)
			testkit.Eventually(t, fmt.Sprintf("the engine is well, vLLM %v", v), func() bool { return p.Stats().Well[s.URL] == 1 })
			down.Store(true)
		}
	}
}

// Requests of SGLang's own paths go to its engines alone, beside engines of vLLM that serve the same model.
func TestSGLangPathsBesideVLLM(t *testing.T) {
	sglang := mockSGLang(t, "null", map[string]string{"/model_info": `{"model_path":"m"}`}, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, `{"text":"a"}`) })
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	vllm := serveMux(t, mux)
	url, p := startProxy(t, proxy.Options{Detect: true, Engines: []string{vllm, sglang}, HealthInterval: 20 * time.Millisecond})
	testkit.Eventually(t, "both are well", func() bool { w := p.Stats().Well; return w[vllm] == 1 && w[sglang] == 1 })
	for range 4 {
		if status, answer := askSGLang(t, url, "/generate", `{"text":"x"}`); status != 200 {
			t.Errorf("/generate: %d %s", status, answer)
		}
		r, err := http.Get(url + "/model_info")
		if err != nil {
			t.Fatal(err)
		}
		if r.Body.Close(); r.StatusCode != 200 {
			t.Errorf("/model_info: %s", r.Status)
		}
	}
}

// A D that gets a P of another page size ends its process (SGLang 0.5.23): such engines are no pair.
func TestSGLangPageSizes(t *testing.T) {
	engineOf := func(mode, page string, h http.HandlerFunc) string {
		info := fmt.Sprintf(`{"disaggregation_mode":%q,"page_size":%s}`, mode, page)
		mux := http.NewServeMux()
		mux.HandleFunc("/ready", func(http.ResponseWriter, *http.Request) {})
		mux.HandleFunc("/server_info", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, info) })
		mux.HandleFunc("/model_info", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{}`) })
		mux.HandleFunc("/route", func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprintf(w, `{"dp_size":1,"page_size":%s,"follow_bootstrap_room":true}`, page)
		})
		mux.HandleFunc("/generate", h)
		return serveMux(t, mux)
	}
	var mixed atomic.Int64
	at := func(page string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			text, _ := io.ReadAll(r.Body)
			fmt.Fprintf(w, `{"page":%s,"port":%s}`, page, portOf(string(text)))
		}
	}
	p16, p64 := engineOf("prefill", "16", at("16")), engineOf("prefill", "64", at("64"))
	of := func(p string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			text, _ := io.ReadAll(r.Body)
			if !strings.HasSuffix(p, ":"+portOf(string(text))) {
				mixed.Add(1)
			}
			fmt.Fprint(w, `{"text":"a"}`)
		}
	}
	d16, d64 := engineOf("decode", "16", of(p16)), engineOf("decode", "64", of(p64))
	o := proxy.Options{Dialect: proxy.SGLang, HealthInterval: 20 * time.Millisecond, Prefill: []proxy.Prefill{{URL: p16, Registry: p16}}, Decode: []string{d64}}
	url, s := startProxy(t, o)
	testkit.Eventually(t, "the reason is known", func() bool {
		return strings.Contains(s.Problem(p16), "16 tokens") && strings.Contains(s.Problem(d64), "64 tokens") && s.Stats().Well[p16]+s.Stats().Well[d64] == 0
	})
	if status, answer := askSGLang(t, url, "/generate", `{"text":"x"}`); status != 503 {
		t.Errorf("%d %s", status, answer)
	}
	o.Prefill = append(o.Prefill, proxy.Prefill{URL: p64, Registry: p64})
	o.Decode = append(o.Decode, d16)
	url, s = startProxy(t, o)
	testkit.Eventually(t, "all are well", func() bool { w := s.Stats().Well; return w[p16]+w[p64]+w[d16]+w[d64] == 4 })
	for range 8 {
		if status, answer := askSGLang(t, url, "/generate", `{"text":"x"}`); status != 200 {
			t.Errorf("%d %s", status, answer)
		}
	}
	if n := mixed.Load(); n > 0 {
		t.Errorf("D got %d requests with the P of another page size", n)
	}
}

func portOf(body string) string {
	var q struct {
		Port json.Number `json:"bootstrap_port"`
	}
	_ = json.Unmarshal([]byte(body), &q) // the proxy's own
	return q.Port.String()
}

// The proxy does not prefer an engine that reports an impossible load.
func TestSGLangLoadsOfNonsense(t *testing.T) {
	var liar atomic.Int64
	answer := func(n *atomic.Int64) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/generate" {
				n.Add(1)
			}
			fmt.Fprint(w, `{"text":"a"}`)
		}
	}
	var honest atomic.Int64
	for _, policy := range []proxy.Policy{proxy.LeastLoaded, proxy.PrefixAware} {
		for _, loads := range []string{
			`{"loads":[{"num_running_reqs":9223372036854775807,"num_waiting_reqs":9223372036854775807}]}`, `{"loads":[{"num_running_reqs":9007199254740993000}]}`,
		} {
			liar.Store(0)
			honest.Store(0)
			a := mockSGLang(t, "null", map[string]string{"/v1/loads": loads}, answer(&liar))
			b := mockSGLang(t, "null", map[string]string{"/v1/loads": `{"loads":[{"num_running_reqs":1}]}`}, answer(&honest))
			url, p := startProxy(t, proxy.Options{Dialect: proxy.SGLang, Engines: []string{a, b}, Policy: policy, HealthInterval: 20 * time.Millisecond})
			testkit.Eventually(t, "both are well", func() bool { w := p.Stats().Well; return w[a] == 1 && w[b] == 1 })
			for i := range 8 {
				if status, answer := askSGLang(t, url, "/generate", fmt.Sprintf(`{"text":"prompt %d %s"}`, i, strings.Repeat("x", 4096))); status != 200 {
					t.Errorf("%d %s", status, answer)
				}
			}
			if honest.Load() == 0 {
				t.Errorf("%s: all requests went to the engine that says so", loads)
			}
		}
	}
}

// A client that asks for /server_info does not wait for a hung scheduler.
func TestSGLangServerInfoIsBounded(t *testing.T) {
	var busy atomic.Bool
	mux := http.NewServeMux()
	mux.HandleFunc("/ready", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/model_info", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{}`) })
	mux.HandleFunc("/server_info", func(w http.ResponseWriter, r *http.Request) {
		if busy.Load() {
			<-r.Context().Done()
			return
		}
		fmt.Fprint(w, `{"disaggregation_mode":"null"}`)
	})
	s := httptest.NewServer(mux)
	t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
	url, _ := startProxy(t, proxy.Options{Detect: true, HealthInterval: 20 * time.Millisecond, Engines: []string{s.URL}, FirstByte: 50 * time.Millisecond})
	reach(t, url)
	busy.Store(true)
	client := http.Client{Timeout: time.Minute}
	r, err := client.Get(url + "/server_info")
	if err != nil {
		t.Fatal(err)
	}
	if r.Body.Close(); r.StatusCode != 503 && r.StatusCode != 504 {
		t.Error(r.Status)
	}
}

// The proxy does not split a request at a field that its API does not have.
func TestSGLangFieldsOfOtherAPIs(t *testing.T) {
	var legs sglLegs
	take := func(w http.ResponseWriter, r *http.Request) {
		legs.take(r)
		fmt.Fprint(w, `{"id":"resp_1","output":[],"choices":[{"index":0}]}`)
	}
	url, _ := startMockedPair(t, oneRankSGLang, proxy.Options{}, take, take)
	for path, body := range map[string]string{
		"/v1/responses": `{"input":"x","n":2}`, "/v1/chat/completions": `{"messages":[],"prompt":["a","b"]}`, "/generate": `{"text":"x","n":2,"prompt":["a","b"]}`,
	} {
		before := len(legs.all())
		status, answer := askSGLang(t, url, path, body)
		testkit.Eventually(t, "P and D are asked", func() bool { return len(legs.all()) >= before+2 })
		if n := len(legs.all()) - before; status != 200 || n != 2 || !strings.Contains(answer, "resp_1") {
			t.Errorf("%s %s: %d %s, %d legs", path, body, status, answer, n)
		}
	}
}

// A client with a key does not choose the id of a response, by which engines know it: it may be another client's.
func TestResponseIDsOfKeys(t *testing.T) {
	var legs sglLegs
	take := func(w http.ResponseWriter, r *http.Request) {
		legs.take(r)
		fmt.Fprint(w, `{"id":"resp_1","output":[]}`)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/v1/responses", take)
	plain := serveMux(t, mux)
	url, _ := startProxy(t, proxy.Options{Keys: keyFile(t, keyLine("alice", "sa", "")), Engines: []string{plain}, HealthInterval: 20 * time.Millisecond})
	reach(t, url)
	paired, _ := startMockedPair(t, oneRankSGLang, proxy.Options{Keys: keyFile(t, keyLine("alice", "sa", ""))}, take, take)
	for i, u := range []string{url, paired} {
		status, answer, _ := do(t, http.MethodPost, u+"/v1/responses", "sa", `{"input":"x","request_id":"resp_of_bob"}`)
		testkit.Eventually(t, "the engines are asked", func() bool { return len(legs.all()) == 1+2*i })
		if text := strings.Join(legs.all(), " "); status != 200 || strings.Contains(text, "resp_of_bob") {
			t.Errorf("%d %s: %s", status, answer, text)
		}
	}
}

// P and D of SGLang demand an API key that the proxy does not have: the proxy reports the reason.
func TestSGLangWantsKey(t *testing.T) {
	locked := serveMux(t, func() *http.ServeMux {
		mux := http.NewServeMux()
		mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
		mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(401) })
		return mux
	}())
	for _, o := range []proxy.Options{{Dialect: proxy.SGLang}, {Detect: true}} {
		o.HealthInterval = 20 * time.Millisecond
		o.Prefill = []proxy.Prefill{{URL: locked, Registry: locked}}
		o.Decode = []string{locked}
		_, p := startProxy(t, o)
		testkit.Eventually(t, "the reason is known", func() bool { return strings.Contains(p.Problem(locked), "--engine-api-key") })
	}
}

// A simulated engine is as strict as SGLang. It refuses an id that it already has; the first request continues. An abort of an id ends all
// requests whose ids begin with it. A D that meets a P of another page size ends.
func TestSimulatedSGLangIsStrict(t *testing.T) {
	start := func(mode string, o engine.Options) *sgl {
		x := startSGLang(t, mode, o)
		t.Cleanup(func() { x.stop(t) })
		return x
	}
	x := start("null", engine.Options{StepTime: 50 * time.Millisecond})
	body := `{"text":"tell me more","rid":"r","sampling_params":{"max_new_tokens":200}}`
	var first sync.WaitGroup
	for _, body := range []string{body, strings.Replace(body, `"r"`, `"r2"`, 1)} { // whose id begins with the other one's
		first.Go(func() {
			if status, answer := askSGLang(t, x.web.URL, "/generate", body); strings.Contains(answer, `"completion_tokens":200`) {
				t.Errorf("it was not ended: %d %.200s", status, answer)
			}
		})
	}
	testkit.Eventually(t, "both run", func() bool { return x.Stats().Running == 2 })
	for range 2 {
		if status, answer := askSGLang(t, x.web.URL, "/generate", body); status != 400 || !strings.Contains(answer, "Duplicate request ID") {
			t.Errorf("%d %s", status, answer)
		}
	}
	if status, _ := askSGLang(t, x.web.URL, "/abort_request", `{"rid":"r"}`); status != 200 {
		t.Error(status)
	}
	first.Wait()

	p, d := start("prefill", engine.Options{}), start("decode", engine.Options{})
	d.api = api.NewSGLang(d.Engine, api.SGLangOptions{Mode: "decode", Page: 32, Timeout: time.Second})
	t.Cleanup(d.api.Close)
	web := serveMux(t, func() *http.ServeMux { m := http.NewServeMux(); m.Handle("/", d.api); return m }())
	pair := fmt.Sprintf(`{"text":"x","bootstrap_host":"127.0.0.1","bootstrap_port":%d,"bootstrap_room":7}`, p.port)
	if status, answer := askSGLang(t, web, "/generate", pair); status != 500 || !strings.Contains(answer, "page size") {
		t.Errorf("%d %s", status, answer)
	}
	if r, err := http.Get(web + "/ready"); err == nil {
		r.Body.Close()
		t.Error("the process of D goes on")
	}
}
