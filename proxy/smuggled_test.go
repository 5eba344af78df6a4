// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
	"github.com/kvasir-kv/kvasir/proxy/keys"
)

// ask sends a request with fields and returns the status.
func ask(t *testing.T, url, body string, fields ...string) int {
	t.Helper()
	r, _ := http.NewRequest(http.MethodPost, url, strings.NewReader(body))
	for i := 0; i < len(fields); i += 2 {
		r.Header.Add(fields[i], fields[i+1])
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	return resp.StatusCode
}

// An engine gets one rank at most. Where the proxy knows P's ranks, P gets the same rank that D gets as P's rank. A client's choice
// of a rank passes only to an engine that does the whole request, and only without API keys.
func TestClientsDoNotChooseRanks(t *testing.T) {
	engine := func(l *legs) string {
		return mock(t, func(w http.ResponseWriter, r *http.Request) {
			l.note(r)
			fmt.Fprint(w, `{"kv_transfer_params":{"a":1}}`)
		})
	}
	ranksOf := func(heads []http.Header) (out []string) {
		for _, h := range heads {
			out = append(out, strings.Join(h.Values("X-Data-Parallel-Rank"), "+"))
		}
		return out
	}
	client := []string{"X-Data-Parallel-Rank", "7", "x-data-parallel-rank", "8", "X-Prefiller-Host-Port", "evil:1"}
	pd := func(o proxy.Options, ranks int, wantP, wantD string) {
		t.Helper()
		var ps, ds legs
		p := proxy.Prefill{URL: engine(&ps)}
		if o.Dialect == proxy.Mooncake {
			p.Registry = mockRegistry(t, `{"0":{"engine_id":"e0","worker_addr":{"0":{"0":"tcp://h:1"}}},"1":{"engine_id":"e1","worker_addr":{"0":{"0":"tcp://h:2"}}}}`)
			if ranks == 1 {
				p.Registry = mockRegistry(t, `{"0":{"engine_id":"e0","worker_addr":{"0":{"0":"tcp://h:1"}}}}`)
			}
		}
		o.Prefill, o.Decode, o.HealthInterval = []proxy.Prefill{p}, []string{engine(&ds)}, time.Hour
		url, _ := startProxy(t, o)
		reach(t, url)
		for range 2 {
			if status := ask(t, url+"/v1/completions", `{"prompt":"a"}`, client...); status != 200 {
				t.Fatal(status)
			}
		}
		testkit.Eventually(t, "P has its part", func() bool { return ps.count() == 2 })
		bodies, headD := ds.all()
		_, headP := ps.all()
		gotP, gotD := ranksOf(headP), ranksOf(headD)
		if strings.Join(gotP, " ") != wantP && (wantP != "either" || gotP[0] == gotP[1]) || strings.Join(gotD, " ") != wantD {
			t.Errorf("%v: P at ranks %q, D at ranks %q", o.Dialect, gotP, gotD)
		}
		for i := range bodies {
			if params, _ := bodies[i]["kv_transfer_params"].(map[string]any); wantP == "either" && params["remote_engine_id"] != "e0" && params["remote_engine_id"] != "e1" {
				t.Errorf("%v", bodies[i])
			}
			if headD[i].Get("X-Prefiller-Host-Port")+headP[i].Get("X-Prefiller-Host-Port") != "" {
				t.Error("a client names another P")
			}
		}
	}
	pd(proxy.Options{Dialect: proxy.Mooncake}, 2, "either", " ")
	pd(proxy.Options{Dialect: proxy.Mooncake}, 1, " ", " ")
	pd(proxy.Options{Dialect: proxy.NIXL}, 0, " ", " ")
	pd(proxy.Options{Dialect: proxy.Mooncake013, DPSize: 2}, 0, "1 0", "1 0")

	alone := func(o proxy.Options, want string, more ...string) {
		t.Helper()
		var es legs
		o.Engines, o.HealthInterval = []string{engine(&es)}, time.Hour
		url, _ := startProxy(t, o)
		reach(t, url)
		if status := ask(t, url+"/v1/completions", `{"prompt":"a"}`, append(more, client...)...); status != 200 {
			t.Fatal(status)
		}
		if _, heads := es.all(); ranksOf(heads)[0] != want {
			t.Errorf("an engine alone is at rank %q, %q is wanted", ranksOf(heads)[0], want)
		}
	}
	alone(proxy.Options{}, "7")
	alone(proxy.Options{DPSize: 2}, "1")
	file := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(file, fmt.Appendf(nil, "alice %x\n", sha256.Sum256([]byte("secret"))), 0o600); err != nil {
		t.Fatal(err)
	}
	k, err := keys.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	alone(proxy.Options{Keys: k}, "", "Authorization", "Bearer secret")
}

// A rank that is out of range is refused in the engine's own words where an engine does the whole request. Through P and D it decides
// nothing. Neither leaves anything behind.
func TestRanksOutOfRange(t *testing.T) {
	x := deploy(t, 1, 0)
	plain, p := startProxy(t, proxy.Options{Engines: []string{x.d[0].web.URL}, HealthInterval: 50 * time.Millisecond})
	reach(t, plain)
	for _, rank := range []string{"7", "-1", "1", "99999999999999999999", "x"} {
		for _, more := range []string{"", `,"stream":true`} {
			asked := func(url string) (int, string) {
				r, _ := http.NewRequest(http.MethodPost, url+"/v1/completions", strings.NewReader(body(3, 2, more)))
				r.Header.Set("Content-Type", "application/json")
				r.Header.Set("X-Data-Parallel-Rank", rank)
				resp, err := http.DefaultClient.Do(r)
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				text, _ := io.ReadAll(resp.Body)
				if resp.StatusCode == 200 {
					return 200, ""
				}
				return resp.StatusCode, string(text)
			}
			wantStatus, want := asked(x.d[0].web.URL)
			if status, text := asked(plain); status != wantStatus || text != want {
				t.Errorf("rank %s%s: %d %s, alone %d %s", rank, more, status, text, wantStatus, want)
			}
			if status, text := asked(x.url); status != 200 {
				t.Errorf("rank %s%s through P and D: %d %s", rank, more, status, text)
			}
		}
	}
	x.idle()
	testkit.Eventually(t, "no place is taken", func() bool {
		return x.proxy.Taken()+p.Taken() == "" && x.proxy.Stats().InFlight+p.Stats().InFlight == 0
	})
}

// Parameters of transfers do not reach an engine inside vllm_xargs, however they are written, by any path; a client's
// ec_transfer_params reach neither P nor D.
func TestTransferParametersAreNotSmuggled(t *testing.T) {
	var es, ps, ds legs
	serve := func(l *legs) string {
		mux := http.NewServeMux()
		mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
		mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodPost {
				l.note(r)
			}
			fmt.Fprint(w, `{"kv_transfer_params":{"a":1}}`)
		})
		return serveMux(t, mux)
	}
	url, _ := startProxy(t, proxy.Options{Engines: []string{serve(&es)}, HealthInterval: time.Hour})
	reach(t, url)
	for _, path := range []string{"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"} {
		for _, args := range []string{
			`"vllm_xargs":{"kv_transfer_params":["x"]}`, `"vllm_xargs":{"a":1,"kv_tr\u0061nsfer_params":"x"}`, `"vllm_xargs":{"ec_transfer_params":{}}`,
			`"vllm_x\u0061rgs":{"kv_transfer_params":null}`, `"vllm_xargs":{"kv_transfer_params":1,"kv_transfer_params":2}`,
			`"vllm_xargs":{"a":0},"vllm_xargs": {"kv_transfer_params":2}`,
		} {
			if status := ask(t, url+path, `{"prompt":"a",`+args+`}`); status != 400 {
				t.Errorf("%s %s: %d", path, args, status)
			}
		}
	}
	for _, sampling := range []string{
		`{"extra_args":{"kv_transfer_params":["x"]}}`, `{"n":1,"extr\u0061_args": {"a":1,"kv_tr\u0061nsfer_params":"x"}}`, `{"extra_args":{"ec_transfer_params":{}}}`,
		`{"extra_args":{"kv_transfer_params":1},"extra_args":{"kv_transfer_params":2}}`, `{"extra_args":{}},"sampling_params":{"extra_args":{"kv_transfer_params":1}}`,
	} {
		if status := ask(t, url+"/inference/v1/generate", `{"token_ids":[1],"sampling_params":`+sampling+`}`); status != 400 {
			t.Errorf("generate %s: %d", sampling, status)
		}
	}
	const plain, args = "multipart/form-data; boundary=b", `{"a":1,"kv_tr\u0061nsfer_params":["x"]}`
	part := func(disposition, text string) string {
		return "--b\r\nContent-Disposition: " + disposition + "\r\n\r\n" + text + "\r\n"
	}
	model, xargs := part(`form-data; name="model"`, "m"), part(`form-data; name="vllm_xargs"`, args)
	for kind, form := range map[string]string{
		plain:                                model + xargs,
		plain + " ":                          xargs + model,
		plain + "; charset=utf-8":            model + part(`form-data; name=vllm_xargs`, " "+args),
		plain + "; charset=utf-16":           model + part("form-data; name=\"v\x00l\x00\"", "x"),
		"multipart/form-data;boundary=b":     model + part(`attachment; name="vllm_xargs"`, args),
		"multipart/form-data;boundary=\"b\"": model + part("form-data; name=\"a\"\r\nContent-Disposition: form-data; name=\"vllm_xargs\"", args),
	} {
		for _, path := range []string{"/v1/audio/transcriptions", "/v1/audio/translations"} {
			if status := ask(t, url+path, form+"--b--\r\n", "Content-Type", kind); status != 400 {
				t.Errorf("%s %s %q: %d", path, kind, form, status)
			}
		}
	}
	if es.count() != 0 {
		t.Fatal("an engine got one")
	}
	if status := ask(t, url+"/v1/audio/transcriptions", model+part(`form-data; name="vllm_xargs"`, `{"a":"kv_transfer_params"}`)+part(`form-data; name="file"; filename="f"`, args)+"--b--\r\n", "Content-Type", plain); status != 200 {
		t.Errorf("a form without such parameters: %d", status)
	}
	if status := ask(t, url+"/inference/v1/generate", `{"token_ids":[1],"sampling_params":{"extra_args":{"a":1},"n":1}}`); status != 200 {
		t.Errorf("extra_args without such parameters: %d", status)
	}
	for _, args := range []string{`"vllm_xargs":{"a":1}`, `"vllm_xargs":null`, `"vllm_xargs":{"a":"kv_transfer_params"}`, `"user":"vllm_xargs kv_transfer_params"`} {
		if status := ask(t, url+"/v1/completions", `{"prompt":"a",`+args+`}`); status != 200 {
			t.Errorf("%s: %d", args, status)
		}
	}
	pd, _ := startProxy(t, proxy.Options{Dialect: proxy.NIXL, Prefill: []proxy.Prefill{{URL: serve(&ps)}}, Decode: []string{serve(&ds)}, HealthInterval: time.Hour})
	reach(t, pd)
	for _, path := range []string{"/v1/completions", "/v1/responses"} {
		if status := ask(t, pd+path, `{"prompt":"a","ec_transfer_params":{"x":1},"ec_tr\u0061nsfer_params":2}`); status != 200 {
			t.Fatal(status)
		}
	}
	bodies, _ := ds.all()
	more, _ := ps.all()
	for _, b := range append(bodies, more...) {
		if text, _ := json.Marshal(b); strings.Contains(string(text), "ec_transfer_params") {
			t.Errorf("%s", text)
		}
	}
	if len(bodies) != 2 || len(more) != 2 {
		t.Error(len(bodies), len(more))
	}
}

// A blank or line end that HTTP/2 allows in a query never becomes a second request line or a second Host.
func TestBlanksInTheQueryAreRefused(t *testing.T) {
	var es legs
	e := mock(t, func(w http.ResponseWriter, r *http.Request) { es.note(r); fmt.Fprint(w, `{}`) })
	url, p := startProxy(t, proxy.Options{Engines: []string{e}, HealthInterval: time.Hour})
	reach(t, url)
	for _, query := range []string{"a b HTTP/1.1", "a\tb", "a\x7f", "\r\n"} {
		r := httptest.NewRequest(http.MethodPost, "/v1/completions", strings.NewReader(`{"prompt":"a"}`))
		r.URL.RawQuery = query
		w := httptest.NewRecorder()
		if p.ServeHTTP(w, r); w.Code != 400 || !strings.Contains(w.Body.String(), "the query has") || es.count() != 0 { // an engine may refuse it, too
			t.Errorf("%q: %d", query, w.Code)
		}
	}
	r := httptest.NewRequest(http.MethodPost, "/v1/completions?a=b", strings.NewReader(`{"prompt":"a"}`))
	r.Header.Set("Host", "other")
	w := httptest.NewRecorder()
	if p.ServeHTTP(w, r); w.Code != 200 {
		t.Fatal(w.Code, w.Body)
	}
	if _, heads := es.all(); heads[0].Get("Host") != "" {
		t.Error("a second Host passes")
	}
}
