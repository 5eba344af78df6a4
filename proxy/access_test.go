// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	neturl "net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/otlp"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
	"github.com/kvasir-kv/kvasir/proxy/keys"
)

func keyFile(t testing.TB, lines ...string) *keys.Set {
	t.Helper()
	path := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := keys.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func keyLine(name, secret, more string) string {
	return fmt.Sprintf("%s %x %s", name, sha256.Sum256([]byte(secret)), more)
}

// do sends a request with a bearer token.
func do(t testing.TB, method, url, token, body string) (int, string, http.Header) {
	t.Helper()
	r, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(text), resp.Header
}

// With secrets for salts the proxy signs each request's salt: one salt per key, one for all clients without a key, and one per
// part that a client names. A client that sends the signed salt of another tenant, with any key or without one, gets a tenant of its own.
func TestSignedSalts(t *testing.T) {
	path := filepath.Join(t.TempDir(), "salts")
	if err := os.WriteFile(path, []byte(strings.Repeat("s", 32)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	salts, err := auth.OpenSaltSecrets(path)
	if err != nil {
		t.Fatal(err)
	}
	var seen legs
	e := mock(t, func(w http.ResponseWriter, r *http.Request) { seen.note(r); fmt.Fprint(w, `{}`) })
	with := proxy.Options{
		Engines: []string{e}, HealthInterval: 20 * time.Millisecond, Salts: salts,
		Keys: keyFile(t, keyLine("ada", "s1", ""), keyLine("bob", "s2", ""), keyLine("eve", "s3", "salt=off"), keyLine("eli", "s4", "salt=off")),
	}
	keyed, _ := startProxy(t, with)
	with.Keys = nil
	open, _ := startProxy(t, with)
	reach(t, keyed)
	reach(t, open)
	ask := func(url, secret, salt string) (tenant string) {
		t.Helper()
		body := `{"prompt":"a"}`
		if salt != "" {
			body = fmt.Sprintf(`{"prompt":"a","cache_salt":%q}`, salt)
		}
		if status, text, _ := do(t, http.MethodPost, url+"/v1/completions", secret, body); status != 200 {
			t.Fatal(status, text)
		}
		bodies, _ := seen.all()
		sent, _ := bodies[len(bodies)-1]["cache_salt"].(string)
		of, ok := salts.Tenant([]byte(sent))
		if !ok || len(sent) > 128 || sent == salt {
			t.Errorf("the engine gets the salt %q", sent)
		}
		return string(of)
	}
	signed := func(tenant string) string {
		salt, err := salts.Sign(tenant)
		if err != nil {
			t.Fatal(err)
		}
		return salt
	}
	ada, bob := ask(keyed, "s1", ""), ask(keyed, "s2", "")
	if ada == bob || ask(keyed, "s1", "") != ada {
		t.Errorf("%q, %q", ada, bob)
	}
	if eve, eli, none := ask(keyed, "s3", ""), ask(keyed, "s4", ""), ask(open, "", ""); eve != "shared" || eli != eve || none != eve {
		t.Errorf("%q, %q, %q, want shared", eve, eli, none)
	}
	for _, stolen := range []string{signed(ada), ada, signed("shared")} {
		for _, c := range [][2]string{{keyed, "s2"}, {keyed, "s3"}, {open, ""}} {
			if got := ask(c[0], c[1], stolen); got == ada || got == "shared" || got == bob {
				t.Errorf("with the salt %q the tenant is %q", stolen, got)
			}
		}
	}
}

// A client without a key gets 401. Each key has a salt of its own; a client can divide it into parts but
// cannot choose it. Engines never see the clients' keys.
func TestAPIKeys(t *testing.T) {
	var seen legs
	e := mock(t, func(w http.ResponseWriter, r *http.Request) { seen.note(r); fmt.Fprint(w, `{}`) })
	o := proxy.Options{
		Engines: []string{e}, EngineKey: "inner", HealthInterval: 20 * time.Millisecond,
		Keys: keyFile(t, keyLine("ada", "s1", ""), keyLine("bob", "s2", ""), keyLine("eve", "s3", "salt=off")),
	}
	url, s := startProxy(t, o)
	reach(t, url)
	f := func(token, body string, want int) {
		t.Helper()
		if status, text, h := do(t, http.MethodPost, url+"/v1/completions", token, body); status != want || want == 401 && h.Get("WWW-Authenticate") == "" {
			t.Errorf("%q: %d %s", token, status, text)
		}
	}
	f("", `{"prompt":"a"}`, 401)
	f("s", `{"prompt":"a"}`, 401)
	f("s1", `{"prompt":"a"}`, 200)
	f("s1", `{"prompt":"a","cache_salt":null}`, 200)
	f("s2", `{"prompt":"a"}`, 200)
	f("s1", `{"prompt":"a","cache_salt":"mine"}`, 200)
	f("s3", `{"prompt":"a","cache_salt":"free"}`, 200)
	f("s3", `{"prompt":"a","kv_transfer_params":{"remote_host":"evil"}}`, 200)
	bodies, _ := seen.all()
	if _, there := bodies[5]["kv_transfer_params"]; there {
		t.Error("who has only a key chooses from where an engine loads")
	}
	if len(bodies) != 6 {
		t.Fatal(len(bodies))
	}
	f("s2", fmt.Sprintf(`{"prompt":"a","cache_salt":%q}`, bodies[0]["cache_salt"]), 200)
	bodies, heads := seen.all()
	var salts []string
	for i, b := range bodies {
		salt, _ := b["cache_salt"].(string)
		salts = append(salts, salt)
		if heads[i].Get("Authorization") != "Bearer inner" {
			t.Error(heads[i].Get("Authorization"))
		}
	}
	if salts[0] == "" || salts[0] != salts[1] || salts[2] == salts[0] || salts[3] == salts[0] || salts[3] == "mine" || salts[4] != "free" || salts[6] == salts[0] || salts[6] == salts[2] {
		t.Errorf("%q", salts)
	}
	if status, _, _ := do(t, http.MethodGet, url+"/v1/models", "", ""); status != 401 {
		t.Error("models are shown to strangers")
	}
	if status, _, _ := do(t, http.MethodGet, url+"/v1/models", "s1", ""); status != 200 {
		t.Error("models are not shown")
	}
	if st := s.Stats(); st.Requests["unauthorized"] != 2 || st.Requests["ok"] != 7 {
		t.Errorf("%+v", st.Requests)
	}
}

// Each key has its own limits. A request that ends gives its place back, also when the client leaves.
func TestKeyLimits(t *testing.T) {
	release := make(chan bool)
	e := mock(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		select {
		case <-release:
		case <-r.Context().Done():
		}
		fmt.Fprint(w, `{}`)
	})
	url, s := startProxy(t, proxy.Options{
		Engines: []string{e}, HealthInterval: 20 * time.Millisecond, Keys: keyFile(t, keyLine("one", "s1", "concurrent=1"), keyLine("slow", "s2", "rate=0.001"), keyLine("free", "s3", "")),
	})
	reach(t, url)
	var wg sync.WaitGroup
	ask := func(ctx context.Context, token string) {
		wg.Go(func() {
			r, _ := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", strings.NewReader(`{"prompt":"a"}`))
			r.Header.Set("Authorization", "Bearer "+token)
			if resp, err := http.DefaultClient.Do(r); err == nil {
				resp.Body.Close()
			}
		})
	}
	running := func(n int64) {
		t.Helper()
		testkit.Eventually(t, "they run", func() bool { return s.Stats().Engine[e] == n })
	}
	limited := func(token string) {
		t.Helper()
		if status, text, h := do(t, http.MethodPost, url+"/v1/completions", token, `{"prompt":"a"}`); status != 429 || h.Get("Retry-After") == "" {
			t.Errorf("%d %s", status, text)
		}
	}
	ctx, leave := context.WithCancel(t.Context())
	ask(ctx, "s1")
	running(1)
	limited("s1")
	leave()
	running(0)
	testkit.Eventually(t, "it has left", func() bool { return s.Stats().Requests["client_left"] == 1 })
	ask(t.Context(), "s1")
	ask(t.Context(), "s2")
	ask(t.Context(), "s3")
	running(3)
	limited("s1")
	limited("s2")
	close(release)
	wg.Wait()
	limited("s2")
	if status, text, _ := do(t, http.MethodPost, url+"/v1/completions", "s1", `{"prompt":"a"}`); status != 200 {
		t.Error(status, text)
	}
	if n := s.Stats().Requests["limited"]; n != 4 {
		t.Error(n)
	}
}

// A caller with the token can add and remove engines while requests are served.
func TestAdmin(t *testing.T) {
	release := make(chan bool)
	one := mock(t, func(w http.ResponseWriter, _ *http.Request) { <-release; fmt.Fprint(w, `{"one":1}`) })
	two := mock(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"two":2}`) })
	url, p := startProxy(t, proxy.Options{HealthInterval: 20 * time.Millisecond})
	admin := httptest.NewServer(p.Admin("token"))
	t.Cleanup(admin.Close)
	call := func(method, path, body string, want int) string {
		t.Helper()
		status, text, _ := do(t, method, admin.URL+path, "token", body)
		if status != want {
			t.Errorf("%s %s %s: %d %s", method, path, body, status, text)
		}
		return text
	}
	for _, token := range []string{"", "tok", "tokens"} {
		if status, _, _ := do(t, http.MethodGet, admin.URL+"/engines", token, ""); status != 401 {
			t.Errorf("token %q: %d", token, status)
		}
	}
	if status, _, _ := post(t, url, `{"prompt":"a"}`); status != 503 {
		t.Error("there is no engine")
	}
	call(http.MethodPost, "/engines", fmt.Sprintf(`{"url":%q,"role":"engine"}`, one), 201)
	call(http.MethodPost, "/engines", fmt.Sprintf(`{"url":%q,"role":"engine"}`, one), 409)
	call(http.MethodPost, "/engines", `{"url":"x","role":"engine"}`, 400)
	call(http.MethodPost, "/engines", `{"url":"http://x","role":"boss"}`, 400)
	call(http.MethodPost, "/engines", `{"url":"http://x","role":"prefill"}`, 400)
	call(http.MethodPost, "/engines", `[`, 400)
	reach(t, url)
	var wg sync.WaitGroup
	wg.Go(func() {
		if status, text, _ := post(t, url, `{"prompt":"a"}`); status != 200 || text != `{"one":1}` {
			t.Error(status, text)
		}
	})
	testkit.Eventually(t, "it runs", func() bool { return p.Stats().Engine[one] == 1 })
	call(http.MethodPost, "/engines", fmt.Sprintf(`{"url":%q,"role":"engine"}`, two), 201)
	testkit.Eventually(t, "it is well", func() bool { return p.Stats().Well[two] == 1 })
	for _, method := range []string{"POST /engines/drain", "POST /engines/undrain", "DELETE /engines"} { // a role that is misspelt is none
		method, path, _ := strings.Cut(method, " ")
		call(method, path+"?role=engines&url="+neturl.QueryEscape(one), "", 404)
	}
	call(http.MethodPost, "/engines/drain?url="+neturl.QueryEscape(one), "", 200)
	for range 4 {
		if status, text, _ := post(t, url, `{"prompt":"a"}`); status != 200 || text != `{"two":2}` {
			t.Error(status, text)
		}
	}
	var list struct{ Engines []proxy.EngineState }
	if err := json.Unmarshal([]byte(call(http.MethodGet, "/engines", "", 200)), &list); err != nil || len(list.Engines) != 2 || !list.Engines[0].Draining || list.Engines[0].Requests != 1 || list.Engines[0].Role != "engine" {
		t.Errorf("%+v %v", list, err)
	}
	call(http.MethodDelete, "/engines?url="+neturl.QueryEscape(one), "", 200)
	call(http.MethodDelete, "/engines?url="+neturl.QueryEscape(one), "", 404)
	close(release)
	wg.Wait()
	call(http.MethodPost, "/engines", fmt.Sprintf(`{"url":%q,"role":"engine"}`, one), 201)
	call(http.MethodPost, "/engines/drain?url="+neturl.QueryEscape(two), "", 200)
	testkit.Eventually(t, "the one that is back serves", func() bool {
		_, text, _ := post(t, url, `{"prompt":"a"}`)
		return text == `{"one":1}`
	})
}

// The proxy uses the engines whose addresses a DNS name has now. A lookup that fails changes nothing.
func TestDNS(t *testing.T) {
	e := mock(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{}`) })
	u, _ := neturl.Parse(e)
	var answer atomic.Pointer[[]string]
	var broken atomic.Bool
	set := func(addresses ...string) { answer.Store(&addresses) }
	set("127.0.0.1")
	o := proxy.WithResolver(proxy.Options{Sources: []proxy.Source{{Role: "engine", URL: "dns+http://engines.test:" + u.Port()}}, HealthInterval: 10 * time.Millisecond},
		func(_ context.Context, host string) ([]string, error) {
			if host != "engines.test" || broken.Load() {
				return nil, errors.New("no such host")
			}
			return *answer.Load(), nil
		})
	url, p := startProxy(t, o)
	reach(t, url)
	if status, text, _ := post(t, url, `{"prompt":"a"}`); status != 200 {
		t.Fatal(status, text)
	}
	set("127.0.0.1", "127.0.0.1", "::1")
	testkit.Eventually(t, "two are known", func() bool { return len(p.Stats().Well) == 2 })
	broken.Store(true)
	time.Sleep(100 * time.Millisecond)
	if len(p.Stats().Well) != 2 {
		t.Error("a failed look takes engines away")
	}
	broken.Store(false)
	set()
	testkit.Eventually(t, "none is known", func() bool { return len(p.Stats().Well) == 0 })
}

// P's are the hosts of a registry, each with the ranks that are there.
func TestRegistryAsSource(t *testing.T) {
	var ps legs
	p := mock(t, func(w http.ResponseWriter, r *http.Request) { ps.note(r); fmt.Fprint(w, `{}`) })
	d := mock(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, `{}`) })
	u, _ := neturl.Parse(p)
	registry := mockRegistry(t, `{"0":{"engine_id":"e0","worker_addr":{"0":{"0":"tcp://127.0.0.1:1"}}},"1":{"engine_id":"e1","worker_addr":{"0":{"0":"tcp://127.0.0.2:2"}}}}`)
	url, s := startProxy(t, proxy.Options{Sources: []proxy.Source{{Role: "prefill", URL: "registry+" + registry + "?port=" + u.Port()}}, Decode: []string{d}, HealthInterval: 20 * time.Millisecond})
	testkit.Eventually(t, "both hosts are known", func() bool { return len(s.Stats().Well) == 3 })
	reachSome(t, url)
	for range 3 {
		if status, text, _ := post(t, url, `{"prompt":"a"}`); status != 200 {
			t.Fatal(status, text)
		}
	}
	for _, bad := range []proxy.Source{{Role: "prefill", URL: "dns+http://x"}, {Role: "decode", URL: "registry+http://x?port=1"}, {Role: "prefill", URL: "registry+http://x"}, {Role: "", URL: "dns+http://x:1"}} {
		if err := (proxy.Options{Sources: []proxy.Source{bad}}).Validate(); err == nil {
			t.Errorf("%+v is taken", bad)
		}
	}
}

// A request has a span below the client's span, and each leg has a span below that one. The engine gets the leg's span in its header.
func TestSpans(t *testing.T) {
	type span = map[string]any
	var mu sync.Mutex
	spans := map[string]span{}
	collector := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		var all struct {
			ResourceSpans []struct{ ScopeSpans []struct{ Spans []span } }
		}
		_ = json.NewDecoder(r.Body).Decode(&all)
		mu.Lock()
		defer mu.Unlock()
		for _, s := range all.ResourceSpans[0].ScopeSpans[0].Spans {
			spans[s["name"].(string)] = s
		}
	}))
	defer collector.Close()
	x, err := otlp.Open(collector.URL, "kvasir-proxy", testLog())
	if err != nil {
		t.Fatal(err)
	}
	var ps, ds legs
	p := mock(t, func(w http.ResponseWriter, r *http.Request) {
		ps.note(r)
		fmt.Fprint(w, `{"kv_transfer_params":{"a":1}}`)
	})
	d := mock(t, func(w http.ResponseWriter, r *http.Request) { ds.note(r); fmt.Fprint(w, `{}`) })
	url, _ := startProxy(t, proxy.Options{Dialect: proxy.NIXL, Spans: x, Prefill: []proxy.Prefill{{URL: p}}, Decode: []string{d}, HealthInterval: 20 * time.Millisecond})
	reach(t, url)
	r, _ := http.NewRequest(http.MethodPost, url+"/v1/completions", strings.NewReader(`{"prompt":"a"}`))
	r.Header.Set("Traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	x.Close()
	whole := spans["POST /v1/completions"]
	if len(spans) != 3 || whole["parentSpanId"] != "b7ad6b7169203331" || whole["traceId"] != "0af7651916cd43dd8448eb211c80319c" {
		t.Fatalf("%v", spans)
	}
	_, toP := ps.all()
	_, toD := ds.all()
	for name, h := range map[string]http.Header{"prefill": toP[0], "decode": toD[0]} {
		want := fmt.Sprintf("00-0af7651916cd43dd8448eb211c80319c-%v-01", spans[name]["spanId"])
		if spans[name]["parentSpanId"] != whole["spanId"] || len(h["Traceparent"]) != 1 || h.Get("Traceparent") != want {
			t.Errorf("%s: %v, %v", name, spans[name], h["Traceparent"])
		}
	}
}
