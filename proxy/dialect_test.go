// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
	"github.com/kvasir-kv/kvasir/sim/engine"
)

// pair is a model's engines: P's and D's of one dialect, or engines that do both.
type pair struct {
	model   string
	dialect proxy.Dialect
	p, d    int
}

// pair starts the engines of y and adds them to the options of a proxy.
func (x *deployment) pair(t testing.TB, y pair, o *proxy.Options, step time.Duration) {
	t.Helper()
	o.Dialect = y.dialect
	eo := engine.Options{Model: y.model, StepTime: step, First: y.dialect == proxy.Mooncake013}
	env := func(port int) func(string) (string, bool) {
		return func(name string) (string, bool) {
			switch name {
			case "VLLM_HOST_IP":
				return "127.0.0.1", true
			case "VLLM_MOONCAKE_BOOTSTRAP_PORT":
				return strconv.Itoa(port), true
			}
			return "", false
		}
	}
	for i := range y.p {
		registry, config := "", `{"kv_connector":"MooncakeConnector","kv_role":"kv_producer"}`
		po := eo
		po.Getenv = env(testkit.FreePort(t))
		if y.dialect == proxy.Mooncake {
			registry = startRegistry(t)
			config = producer(registry, fmt.Sprint(y.model, i))
		}
		e := serveWith(t, "", config, po)
		x.p = append(x.p, e)
		o.Prefill = append(o.Prefill, proxy.Prefill{URL: e.web.URL, Registry: registry})
	}
	for range y.d {
		do := eo
		do.Getenv = env(testkit.FreePort(t))
		config := consumer
		if y.p == 0 {
			config = ""
		}
		e := serveWith(t, "", config, do)
		x.d = append(x.d, e)
		if y.p == 0 {
			o.Engines = append(o.Engines, e.web.URL)
		} else {
			o.Decode = append(o.Decode, e.web.URL)
		}
	}
}

// stopAll stops the engines at the end of a test.
func (x *deployment) stopAll() {
	x.t.Cleanup(func() {
		for _, s := range append(x.p, x.d...) {
			s.stop(x.t)
		}
	})
}

// Every pairing: each dialect with several P and D, beside a model whose engines do both, behind
// one proxy. Each answer is that of one engine alone, and D's KV came from P.
func TestDialects(t *testing.T) {
	alone := serve(t, "", "", 0)
	t.Cleanup(func() { alone.stop(t) })
	for _, dialect := range []proxy.Dialect{proxy.Mooncake, proxy.Mooncake013} {
		for _, n := range [][2]int{{1, 1}, {2, 2}, {1, 3}} {
			t.Run(fmt.Sprint(dialect, n), func(t *testing.T) {
				x := &deployment{t: t}
				x.stopAll()
				o := proxy.Options{HealthInterval: 50 * time.Millisecond}
				x.pair(t, pair{model: "m", dialect: dialect, p: n[0], d: n[1]}, &o, 0)
				x.pair(t, pair{model: "both", dialect: dialect, d: 1}, &o, 0)
				x.start(o)
				var wg sync.WaitGroup
				for i := range 12 {
					wg.Go(func() {
						more := `,"model":"m"`
						if i%3 == 0 {
							more = `,"model":"both"`
						}
						if i%2 == 0 {
							more += `,"stream":true`
						}
						_, want, _ := post(t, alone.web.URL, body(i, 9, ""))
						status, got, _ := post(t, x.url, body(i, 9, more))
						if status != 200 || answerText(t, got) != answerText(t, want) {
							t.Errorf("%d %s\nwant %s", status, got, want)
						}
					})
				}
				wg.Wait()
				x.idle()
				var loaded, finished int64
				for _, d := range x.d[:n[1]] {
					s := d.Stats()
					loaded, finished = loaded+s.LoadedTokens, finished+s.Finished
				}
				if s := x.proxy.Stats(); loaded < 8*100 || finished != 8 || x.d[n[1]].Stats().Finished != 4 || s.Requests["ok"] != 12 {
					t.Errorf("%d tokens loaded, %d requests, %+v", loaded, finished, s.Requests)
				}
			})
		}
	}
}

// Two clients that choose one request id have each its own KV, also where P and D know it by that id.
func TestEqualRequestIDs(t *testing.T) {
	alone := serve(t, "", "", 0)
	t.Cleanup(func() { alone.stop(t) })
	x := &deployment{t: t}
	x.stopAll()
	o := proxy.Options{HealthInterval: 50 * time.Millisecond}
	x.pair(t, pair{model: "m", dialect: proxy.Mooncake013, p: 1, d: 1}, &o, 5*time.Millisecond)
	x.start(o)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			_, want, _ := post(t, alone.web.URL, body(i, 9, ""))
			r, _ := http.NewRequest(http.MethodPost, x.url+"/v1/completions", strings.NewReader(body(i, 9, "")))
			r.Header.Set("X-Request-Id", "same")
			resp, err := http.DefaultClient.Do(r)
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			got, _ := io.ReadAll(resp.Body)
			if resp.StatusCode != 200 || resp.Header.Get("X-Request-Id") != "same" || answerText(t, string(got)) != answerText(t, want) {
				t.Errorf("%d %s", resp.StatusCode, got)
			}
		})
	}
	wg.Wait()
	x.idle()
	if s := x.proxy.Stats(); s.Retries != 0 {
		t.Errorf("%+v", s)
	}
}

// legs records what mock engines were sent.
type legs struct {
	sync.Mutex
	bodies []map[string]any
	heads  []http.Header
}

func (l *legs) note(r *http.Request) map[string]any {
	var m map[string]any
	_ = json.NewDecoder(r.Body).Decode(&m)
	l.Lock()
	defer l.Unlock()
	l.bodies, l.heads = append(l.bodies, m), append(l.heads, r.Header.Clone())
	return m
}

func (l *legs) count() int {
	l.Lock()
	defer l.Unlock()
	return len(l.bodies)
}

func (l *legs) all() ([]map[string]any, []http.Header) {
	l.Lock()
	defer l.Unlock()
	return l.bodies, l.heads
}

// With NIXL, P gets parameters without D's address, and D gets the parameters of P's answer, under the same
// request id. Two data-parallel ranks are asked in turn.
func TestNIXL(t *testing.T) {
	var ps, ds legs
	const answered = `{"do_remote_prefill":true,"remote_block_ids":[[1,2,3]],"remote_engine_id":"e","remote_host":"h","remote_port":5600,"tp_size":1,"odd": 1.50}`
	p := mock(t, func(w http.ResponseWriter, r *http.Request) {
		ps.note(r)
		fmt.Fprintf(w, `{"id":"x","choices":[],"kv_transfer_params":%s}`, answered)
	})
	d := mock(t, func(w http.ResponseWriter, r *http.Request) {
		ds.note(r)
		fmt.Fprint(w, `{"choices":[{"text":"a"}]}`)
	})
	url, _ := startProxy(t, proxy.Options{Dialect: proxy.NIXL, DPSize: 2, Prefill: []proxy.Prefill{{URL: p}}, Decode: []string{d}, HealthInterval: 20 * time.Millisecond})
	reach(t, url)
	for range 4 {
		if status, text, _ := post(t, url, `{"prompt":"a","max_tokens":7,"stream":true,"stream_options":{"include_usage":true},"min_tokens":3,"max_completion_tokens":9}`); status != 200 {
			t.Fatal(status, text)
		}
	}
	toP, headP := ps.all()
	toD, headD := ds.all()
	params, _ := json.Marshal(toP[0]["kv_transfer_params"])
	if string(params) != `{"do_remote_decode":true,"do_remote_prefill":false,"remote_block_ids":null,"remote_engine_id":null,"remote_host":null,"remote_port":null}` {
		t.Errorf("%s", params)
	}
	if toP[0]["max_tokens"] != 1.0 || toP[0]["max_completion_tokens"] != 1.0 || toP[0]["stream"] != false || toP[0]["stream_options"] != nil || toP[0]["min_tokens"] != nil {
		t.Errorf("%v", toP[0])
	}
	got, _ := json.Marshal(toD[0]["kv_transfer_params"])
	var want any
	_ = json.Unmarshal([]byte(answered), &want)
	wanted, _ := json.Marshal(want)
	if string(got) != string(wanted) || toD[0]["max_tokens"] != 7.0 {
		t.Errorf("%v", toD[0])
	}
	ranks := map[string]int{}
	for i := range headP {
		ranks["p"+headP[i].Get("X-Data-Parallel-Rank")]++
		ranks["d"+headD[i].Get("X-Data-Parallel-Rank")]++
		if headP[i].Get("X-Request-Id") != headD[i].Get("X-Request-Id") {
			t.Error("P and D know the request by two ids")
		}
	}
	if len(ranks) != 4 || ranks["p0"] != 2 || ranks["d1"] != 2 {
		t.Error(ranks)
	}
}

// When P answers without params, D computes the prompt. When P answers garbage, the attempt fails.
func TestAnswersOfPWithoutUsableParams(t *testing.T) {
	var n atomic.Int64
	answers := []string{`{"kv_transfer_params":null}`, `not JSON`, `{"kv_transfer_params":{"a":1}}`, strings.Repeat("x", 9<<20)}
	p := mock(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, answers[int(n.Load())]) })
	var ds legs
	d := mock(t, func(w http.ResponseWriter, r *http.Request) { ds.note(r); fmt.Fprint(w, `{}`) })
	url, s := startProxy(t, proxy.Options{Dialect: proxy.NIXL, Prefill: []proxy.Prefill{{URL: p}}, Decode: []string{d}, Attempts: 2, HealthInterval: 20 * time.Millisecond})
	reach(t, url)
	for i, want := range []int{200, 503, 200, 503} {
		n.Store(int64(i))
		if status, text, _ := post(t, url, `{"prompt":"a","kv_transfer_params":{"remote_host":"evil"}}`); status != want {
			t.Fatal(i, status, text)
		}
	}
	bodies, _ := ds.all()
	if _, there := bodies[0]["kv_transfer_params"]; there || len(bodies) != 2 || bodies[1]["kv_transfer_params"] == nil {
		t.Fatal(bodies)
	}
	if s.Stats().Retries != 2 {
		t.Fatal(s.Stats().Retries)
	}
}

// P with several data-parallel ranks in its registry is asked for each of them.
func TestRanksOfP(t *testing.T) {
	var ps, ds legs
	registry := mockRegistry(t, `{"0":{"engine_id":"e0","worker_addr":{"0":{"0":"tcp://h:1"}}},"1":{"engine_id":"e1","worker_addr":{"0":{"0":"tcp://h:2"}}}}`)
	p := mock(t, func(w http.ResponseWriter, r *http.Request) { ps.note(r); fmt.Fprint(w, `{}`) })
	d := mock(t, func(w http.ResponseWriter, r *http.Request) {
		ds.note(r)
		testkit.Eventually(t, "P has its part", func() bool { return ps.count() == ds.count() })
		fmt.Fprint(w, `{}`)
	})
	url, _ := startProxy(t, proxy.Options{Prefill: []proxy.Prefill{{URL: p, Registry: registry}}, Decode: []string{d}, HealthInterval: 20 * time.Millisecond})
	reach(t, url)
	for range 6 {
		if status, text, _ := post(t, url, `{"prompt":"a"}`); status != 200 {
			t.Fatal(status, text)
		}
	}
	toP, headP := ps.all()
	toD, _ := ds.all()
	engineOf := map[any]string{} // by transfer
	for i := range toP {
		engineOf[toP[i]["kv_transfer_params"].(map[string]any)["transfer_id"]] = "e" + headP[i].Get("X-Data-Parallel-Rank")
	}
	n := map[string]int{}
	for _, b := range toD {
		params := b["kv_transfer_params"].(map[string]any)
		if params["remote_engine_id"] != engineOf[params["transfer_id"]] {
			t.Errorf("D is told of %v, P's rank is %v", params["remote_engine_id"], engineOf[params["transfer_id"]])
		}
		n[engineOf[params["transfer_id"]]]++
	}
	if n["e0"] != 3 || n["e1"] != 3 {
		t.Error(n)
	}
}

// A model that no engine has is refused with vLLM's error text. A request without a model is served where there is
// only one model. All models are listed.
func TestModels(t *testing.T) {
	one, two := serveWith(t, "", "", engine.Options{Model: "one"}), serveWith(t, "", "", engine.Options{Model: "two"})
	t.Cleanup(func() { one.stop(t); two.stop(t) })
	url, s := startProxy(t, proxy.Options{Engines: []string{one.web.URL, two.web.URL}, HealthInterval: 20 * time.Millisecond})
	testkit.Eventually(t, "both are well", func() bool { return s.Stats().Well[one.web.URL]+s.Stats().Well[two.web.URL] == 2 })
	f := func(model string, want int, words string) {
		t.Helper()
		if status, text, _ := post(t, url, body(1, 3, model)); status != want || !strings.Contains(text, words) {
			t.Errorf("%s: %d %s", model, status, text)
		}
	}
	f(`,"model":"one"`, 200, `"model":"one"`)
	f(`,"model":"two"`, 200, `"model":"two"`)
	f(`,"model":"three"`, 404, "{\"error\":{\"code\":404,\"message\":\"The model `three` does not exist.\",\"param\":\"model\",\"type\":\"NotFoundError\"}}")
	f("", 400, "more than one")
	f(`,"model":7`, 400, "must be a text")
	r, err := http.Get(url + "/v1/models")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	var list struct{ Data []struct{ ID string } }
	if err := json.NewDecoder(r.Body).Decode(&list); err != nil || len(list.Data) != 2 {
		t.Fatal(list, err)
	}
	if s := s.Stats(); s.Requests["ok"] != 2 || s.Requests["bad_request"] != 3 {
		t.Fatalf("%+v", s.Requests)
	}
}
