// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/proxy"
)

// A body that is malformed or ends early is answered 400 and closes the connection; no engine sees it. An empty 200 would pass
// for success with a balancer in between.
func TestBrokenBodiesAre400(t *testing.T) {
	var es legs
	e := mock(t, func(w http.ResponseWriter, r *http.Request) { es.note(r); fmt.Fprint(w, `{}`) })
	url, p := startProxy(t, proxy.Options{Engines: []string{e}, HealthInterval: time.Hour})
	reach(t, url)
	const head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
	const chunked = head + "Transfer-Encoding: chunked\r\n\r\n"
	for _, text := range []string{
		chunked + "zz\r\n", chunked + "5\r\n{}  x{}\r\n0\r\n\r\n", chunked + "2;a=\n\r\n{}\r\n0\r\n\r\n", chunked + "2\r\n{}\r\n",
		head + "Content-Length: 100\r\n\r\n{\"prompt\":",
	} {
		nc, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(nc, text)
		_ = nc.(*net.TCPConn).CloseWrite()
		_ = nc.SetReadDeadline(time.Now().Add(30 * time.Second))
		got, _ := io.ReadAll(nc)
		nc.Close()
		if !strings.HasPrefix(string(got), "HTTP/1.1 400") || !strings.Contains(string(got), "Connection: close") || !strings.Contains(string(got), "body") {
			t.Errorf("%q: %q", text, got)
		}
	}
	if es.count() != 0 || p.Stats().InFlight != 0 {
		t.Errorf("%d at the engine, %+v", es.count(), p.Stats())
	}
}

// A 503 shows clients neither addresses of engines nor texts of engines.
func TestClientsSeeNoAddressesOfEngines(t *testing.T) {
	bad := mock(t, func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "secret words", 500) })
	for _, o := range []proxy.Options{{Engines: []string{bad}}, {Dialect: proxy.NIXL, Prefill: []proxy.Prefill{{URL: bad}}, Decode: []string{bad}}} {
		o.HealthInterval = time.Hour
		url, _ := startProxy(t, o)
		reach(t, url)
		status, text, _ := post(t, url, `{"prompt":"a"}`)
		if status != 503 || strings.Contains(text, "secret") || strings.Contains(text, "127.0.0.1") || strings.Contains(text, "http") {
			t.Errorf("%d %s", status, text)
		}
	}
}

// x-api-key is a key like a bearer token. With keys no secret of a client reaches an engine, in whatever field it came;
// without keys and without a key of the engines it does.
func TestCredentialsEndAtTheProxy(t *testing.T) {
	var es legs
	e := mock(t, func(w http.ResponseWriter, r *http.Request) { es.note(r); fmt.Fprint(w, `{}`) })
	secrets := []string{"X-Api-Key", "s", "Api-Key", "other secret", "Cookie", "session=secret"}
	reaches := func(o proxy.Options, want bool, fields ...string) {
		t.Helper()
		o.Engines, o.HealthInterval = []string{e}, time.Hour
		url, _ := startProxy(t, o)
		reach(t, url)
		before := es.count()
		if status := ask(t, url+"/v1/completions", `{"prompt":"a"}`, fields...); status != 200 {
			t.Fatal(status)
		}
		_, heads := es.all()
		for _, k := range []string{"X-Api-Key", "Api-Key", "Cookie"} {
			if got := heads[before].Get(k) != ""; got != want {
				t.Errorf("%s reaches the engine: %v", k, got)
			}
		}
		if o.EngineKey != "" && heads[before].Get("Authorization") != "Bearer "+o.EngineKey {
			t.Error(heads[before])
		}
	}
	k := keyFile(t, keyLine("ada", "s", ""))
	reaches(proxy.Options{Keys: k}, false, secrets...)
	reaches(proxy.Options{Keys: k}, false, append(secrets, "Authorization", "Bearer s")...)
	reaches(proxy.Options{Keys: k}, false, append(secrets, "Authorization", "Basic x")...)
	reaches(proxy.Options{EngineKey: "engines"}, false, secrets...)
	reaches(proxy.Options{}, true, secrets...)

	url, _ := startProxy(t, proxy.Options{Keys: k, Engines: []string{e}, HealthInterval: time.Hour})
	reach(t, url)
	for _, fields := range [][]string{{"X-Api-Key", "wrong"}, {"X-Api-Key", ""}, {"Api-Key", "s"}, {"Authorization", "Basic s"}} {
		if status := ask(t, url+"/v1/completions", `{"prompt":"a"}`, fields...); status != 401 {
			t.Errorf("%v: %d", fields, status)
		}
	}
}

// The admin token counts under Bearer alone.
func TestAdminTokenIsABearerToken(t *testing.T) {
	e := mock(t, func(http.ResponseWriter, *http.Request) {})
	_, p := startProxy(t, proxy.Options{Engines: []string{e}, HealthInterval: time.Hour})
	for scheme, want := range map[string]int{"Bearer tok": 200, "bearer tok": 200, "Basic tok": 401, "tok": 401, "Token tok": 401, "Bearer": 401} {
		r := httptest.NewRequest(http.MethodGet, "/engines", nil)
		r.Header.Set("Authorization", scheme)
		w := httptest.NewRecorder()
		if p.Admin("tok").ServeHTTP(w, r); w.Code != want {
			t.Errorf("%q: %d", scheme, w.Code)
		}
	}
}

// Header fields of the engine's connection do not reach the client.
func TestFieldsOfTheEnginesConnectionEndHere(t *testing.T) {
	e := mock(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Connection", "X-Hop, keep-alive")
		w.Header().Set("X-Hop", "1")
		w.Header().Set("X-End", "2")
		fmt.Fprint(w, `{}`)
	})
	url, _ := startProxy(t, proxy.Options{Engines: []string{e}, HealthInterval: time.Hour})
	reach(t, url)
	_, _, head := do(t, http.MethodPost, url+"/v1/completions", "", `{"prompt":"a"}`)
	if head.Get("X-Hop") != "" || head.Get("X-End") != "2" {
		t.Errorf("%v", head)
	}
}

// Header fields with an engine's address do not reach the client, whatever the status: from an engine alone, from P and from D.
func TestRedirectsShowNoAddressesOfEngines(t *testing.T) {
	away := func(status int) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			for _, name := range []string{"Location", "Content-Location", "Alt-Svc", "Refresh"} {
				w.Header().Set(name, "http://10.1.2.3:8000/")
			}
			w.WriteHeader(status)
			fmt.Fprint(w, `{"kv_transfer_params":{"a":1}}`)
		}
	}
	good := mock(t, away(200))
	for _, status := range []int{200, 201, 307, 308, 404} {
		bad := mock(t, away(status))
		pd := func(p, d string) proxy.Options {
			return proxy.Options{Dialect: proxy.NIXL, Prefill: []proxy.Prefill{{URL: p}}, Decode: []string{d}}
		}
		for _, o := range []proxy.Options{{Engines: []string{bad}}, pd(bad, good), pd(good, bad)} {
			o.HealthInterval = time.Hour
			url, _ := startProxy(t, o)
			reach(t, url)
			r, _ := http.NewRequest(http.MethodPost, url+"/v1/completions", strings.NewReader(`{"prompt":"a"}`))
			resp, err := http.DefaultTransport.RoundTrip(r)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != status || strings.Contains(fmt.Sprint(resp.Header), "10.1.2.3") {
				t.Errorf("%d: %d %v", status, resp.StatusCode, resp.Header)
			}
		}
	}
}
