// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/server/admin"
)

// Each route with a body answers any bytes. What does not begin as an object is refused.
func FuzzBody(f *testing.F) {
	routes := [][2]string{
		{"POST", "/cache/clear"},
		{"POST", "/cache/checksums"},
		{"POST", "/tiers/rekey"},
		{"POST", "/tiers/drop"},
		{"DELETE", "/cache/objects"},
		{"POST", "/cache/pins"},
		{"DELETE", "/cache/pins"},
		{"POST", "/cache/prefetches"},
		{"PUT", "/tenants/a"},
		{"PUT", "/quota/a"},
	}
	for i, body := range []string{
		`{"models":["m"],"force":true}`, `{"model":"m","token_ids":[1,2]}`, `{"tier":"memory","rate":1e300}`, `{"tier":"memory","model":"m"}`,
		`{"keys":["m@00000000@0@00"]}`, `{"model":"m","tokens":[0,0,4294967296],"ttl":"-1h"}`, `{"token_ids":[0]}`, `{"model_name":"m","token_ids":[1.5]}`,
		`{"bytes":-1,"share":2}`, `{"limit_gb":1e308}`,
	} {
		f.Add(uint8(i), body)
	}
	f.Add(uint8(0), `[`)
	f.Add(uint8(7), `{"a":`+strings.Repeat("[", 200))
	h := admin.Handler(newServer(f), admin.Options{})
	f.Fuzz(func(t *testing.T, route uint8, body string) {
		to := routes[int(route)%len(routes)]
		w := httptest.NewRecorder()
		h.ServeHTTP(w, listRequest(to[0], to[1], strings.NewReader(body)))
		if w.Code >= 500 && w.Code != http.StatusNotImplemented && w.Code != http.StatusServiceUnavailable {
			t.Errorf("%v of %q: %d %s", to, body, w.Code, w.Body)
		}
		if text := strings.TrimLeft(body, " \t\r\n"); text != "" && text[0] != '{' && text != "null" && w.Code < 400 {
			t.Errorf("%v of %q is taken: %d %s", to, body, w.Code, w.Body)
		}
	})
}
