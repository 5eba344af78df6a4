// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
)

// stored starts an engine that has the response resp_1. f answers requests for that response and for /version.
func stored(t testing.TB, f http.HandlerFunc) string {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("POST /v1/responses", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"id":"resp_1"}`) })
	mux.HandleFunc("/v1/responses/", f)
	mux.HandleFunc("/version", f)
	return serveMux(t, mux)
}

var forwarded = map[string]string{"/version": http.MethodGet, "/v1/responses/resp_1": http.MethodGet, "/v1/responses/resp_1/cancel": http.MethodPost}

// A query that would end the request line to an engine early is refused on each path that is passed on.
func TestBlanksInForwardedQueriesAreRefused(t *testing.T) {
	asked := 0
	url, p := startProxy(t, proxy.Options{Engines: []string{stored(t, func(w http.ResponseWriter, r *http.Request) { asked++; fmt.Fprint(w, r.RequestURI) })}, HealthInterval: time.Hour})
	reach(t, url)
	if status := ask(t, url+"/v1/responses", `{"input":"a"}`); status != 200 {
		t.Fatal(status)
	}
	for path, method := range forwarded {
		for _, query := range []string{"a b HTTP/1.1", "a\tb", "a\x7f", "\r\n", "stream=true&a=%20"} {
			r := httptest.NewRequest(method, path, nil)
			r.URL.RawQuery = query
			w := httptest.NewRecorder()
			before := asked
			p.ServeHTTP(w, r)
			if bad := query[0] != 's'; bad && (w.Code != 400 || !strings.Contains(w.Body.String(), "the query has") || asked != before) || !bad && (w.Code != 200 || w.Body.String() != path+"?"+query) {
				t.Errorf("%s %q: %d %s", path, query, w.Code, w.Body)
			}
		}
	}
}

// An engine that takes a request and is silent, or falls silent in its answer, ends it at the limits of other requests.
func TestSilentEnginesEndForwardedRequests(t *testing.T) {
	const limit = 100 * time.Millisecond
	for _, begun := range []bool{false, true} {
		e := stored(t, func(w http.ResponseWriter, r *http.Request) {
			if begun {
				_, _ = io.WriteString(w, "a part")
				_ = http.NewResponseController(w).Flush()
			}
			<-r.Context().Done()
		})
		o := proxy.Options{Engines: []string{e}, HealthInterval: time.Hour, FirstByte: limit, Stall: time.Hour}
		if begun {
			o.FirstByte, o.Stall = time.Hour, limit
		}
		url, _ := startProxy(t, o)
		reach(t, url)
		testkit.Eventually(t, "a response", func() bool { return ask(t, url+"/v1/responses", `{"input":"a"}`) == 200 }) // limit holds for it, too
		client := http.Client{Timeout: time.Minute}
		for path, method := range forwarded {
			r, _ := http.NewRequest(method, url+path, nil)
			resp, err := client.Do(r)
			if err != nil {
				t.Fatal(path, err)
			}
			text, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if begun && (err == nil || string(text) != "a part") || !begun && (err != nil || resp.StatusCode != 504) {
				t.Errorf("%s: %d %q %v", path, resp.StatusCode, text, err)
			}
			if err != nil && isTimeout(err) {
				t.Errorf("%s: %v", path, err)
			}
		}
	}
}

func isTimeout(err error) bool {
	e, ok := err.(interface{ Timeout() bool })
	return ok && e.Timeout()
}
