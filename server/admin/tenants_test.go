// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/server/admin"
)

// jsonType is what a body needs.
var jsonType = []string{"Content-Type", "application/json"}

// tenantsOf asks for all tenants.
func tenantsOf(t *testing.T, h http.Handler) []admin.Tenant {
	t.Helper()
	var got admin.Tenants
	if code, body := ask(h, "GET", "http://localhost/tenants", ""); code != 200 || json.Unmarshal([]byte(body), &got) != nil || got.Tenants == nil {
		t.Fatalf("%d %s", code, body)
	}
	return got.Tenants
}

// What a body names is set, null takes it away, and the rest stays; what the server knows of the tenant follows at once.
func TestTenantRoutes(t *testing.T) {
	s := newServer(t) // 64 pages, of which the tenant without a salt has two
	h := admin.Handler(s, admin.Options{})
	f := func(method, path, body string, code int, want string) {
		t.Helper()
		if got, text := ask(h, method, "http://localhost/tenants"+path, body, jsonType...); got != code || !strings.Contains(text, want) {
			t.Errorf("%s %s %s: %d %s, want %d %s", method, path, body, got, text, code, want)
		}
	}
	f("GET", "", "", 200, `{"tenants":[]}`)
	f("PUT", "/_default", `{"quota_bytes": 8192}`, 200, `{"cache_salt":"_default","quota_bytes":8192,"bytes":8192,"objects":2,"evicted_objects":0,"evicted_bytes":0,"ttl_seconds":null,`)
	f("PUT", "/_default", `{"ttl_seconds": 90.5, "pin_limit_bytes": 4096}`, 200, `"quota_bytes":8192,"bytes":8192,"objects":2,"evicted_objects":0,"evicted_bytes":0,"ttl_seconds":91,"expired_objects":0,"pin_limit_bytes":4096,"pinned_bytes":0,"pinned_objects":0,"kept_in":""}`)
	f("PUT", "/_default", `{"quota_bytes": null}`, 200, `"quota_bytes":null,"bytes":0,"objects":0,"evicted_objects":0,"evicted_bytes":0,"ttl_seconds":91,`)
	f("PUT", "/__default", `{"ttl_seconds": -1}`, 200, `{"cache_salt":"__default","quota_bytes":null,"bytes":0,"objects":0,"evicted_objects":0,"evicted_bytes":0,"ttl_seconds":-1,`)
	got := ""
	for _, x := range tenantsOf(t, h) {
		got += fmt.Sprintf("%s %v %d; ", x.Salt, *x.TTL, x.PinLimit)
	}
	if got != "_default 91 4096; __default -1 0; " {
		t.Errorf("the tenants are %s", got)
	}
	_, metrics := ask(h, "GET", "http://localhost/metrics", "")
	for _, line := range []string{
		`kvasir_tenant_pin_limit_bytes{cache_salt="_default"} 4096`, `kvasir_tenant_pinned_bytes{cache_salt="_default"} 0`,
		`kvasir_tenant_expired_chunks_total{cache_salt="__default"} 0`, `kvasir_expired_chunks_total 0`,
	} {
		if !strings.Contains(metrics, line+"\n") {
			t.Errorf("no %s in the metrics", line)
		}
	}
	f("PUT", "/x", `{"quota_bytes": 1e300}`, 400, "quota_bytes: tenant: the quotas do not fit into the pool")
	f("PUT", "/x", `{"quota_bytes": -1}`, 400, "quota_bytes: tenant: a quota below 0")
	f("PUT", "/x", `{"quota_bytes": "x"}`, 400, "quota_bytes: it is no number")
	f("PUT", "/x", `{"pin_limit_bytes": 1e18}`, 400, "pin_limit_bytes: tenant: the quotas do not fit")
	for _, few := range []string{"-0.5", "-1e-300", "-1e300"} {
		f("PUT", "/x", `{"quota_bytes": `+few+`}`, 400, "quota_bytes: tenant: a quota below 0")
		f("PUT", "/x", `{"pin_limit_bytes": `+few+`}`, 400, "pin_limit_bytes: tenant: a quota below 0")
	}
	f("PUT", "/x", `{"pin_limit_bytes": -5}`, 400, "pin_limit_bytes: tenant: a quota below 0")
	for _, ttl := range []string{"0", "0.5", "-2", "1e300", "[]"} {
		f("PUT", "/x", `{"ttl_seconds": `+ttl+`}`, 400, "ttl_seconds: it is n")
	}
	for _, body := range []string{"", "{", "[]", `{"quota": 1}`, `{"quota_bytes": 1` + strings.Repeat(" ", 5000) + `}`} {
		f("PUT", "/x", body, 400, `{"error":"body is not`)
	}
	for _, salt := range []string{"a%40b", "a%2Fb", "%ff", strings.Repeat("x", 200)} {
		f("PUT", "/"+salt, `{"ttl_seconds": 5}`, 400, "error")
	}
	if len(tenantsOf(t, h)) != 2 {
		t.Error("what was refused is there")
	}
	for _, method := range []string{"PUT", "DELETE", "POST"} {
		path := "/tenants/_default"
		if method == "POST" {
			path = "/cache/pins"
		}
		if code, _ := ask(h, method, "http://evil.example"+path, `{}`, jsonType...); code != 403 {
			t.Errorf("a web page may %s %s: %d", method, path, code)
		}
	}
	f("DELETE", "/_default", "", 200, `{"cache_salt":"_default","status":"removed"}`)
	f("DELETE", "/_default", "", 200, `{"cache_salt":"_default","status":"not_found"}`)
	f("DELETE", "/__default", "", 200, `"removed"`)
	f("GET", "", "", 200, `{"tenants":[]}`)
}

// Settings that a body has before a refused value take effect, also for what the tenant has
// already.
func TestSettingsBeforeARefusedValueAreApplied(t *testing.T) {
	s := newServer(t) // the tenant without a salt has two pages
	h := admin.Handler(s, admin.Options{})
	code, text := ask(h, "PUT", "http://localhost/tenants/_default", `{"quota_bytes": 8192, "ttl_seconds": 0}`, jsonType...)
	if code != 400 || !strings.Contains(text, "ttl_seconds: it is neither") {
		t.Fatalf("%d %s", code, text)
	}
	if got := tenantsOf(t, h); len(got) != 1 || got[0].Quota == nil || *got[0].Quota != 8192 || got[0].Bytes != 8192 || got[0].Objects != 2 {
		t.Errorf("%+v", got)
	}
}

// Pins of a prompt, in the shapes of LMCache's coordinator: within the tenant's limit, listed in pages, and ended.
func TestPinRoutes(t *testing.T) {
	s := newServer(t) // two chunks of the tokens 0, 0, …
	h := admin.Handler(s, admin.Options{})
	body := func(tokens int, more string) string {
		return `{"model_name": "m", "world_size": 1, "token_ids": [0` + strings.Repeat(",0", tokens-1) + `]` + more + `}`
	}
	f := func(method, body string, code int, want string) {
		t.Helper()
		if got, text := ask(h, method, "http://localhost/cache/pins", body, jsonType...); got != code || !strings.Contains(text, want) {
			t.Errorf("%s %.90s: %d %s, want %d %s", method, body, got, text, code, want)
		}
	}
	f("POST", body(50, ""), 409, `"affected":0,"status":"pinned","ttl_seconds":3600,"error":"tenant: the tenant has no limit of pins, so it may pin nothing: start the server with --pin-limit _default=SIZE, or PUT`)
	if err := s.Store().SetPinLimit("", 4096); err != nil {
		t.Fatal(err)
	}
	f("POST", body(50, ""), 409, `{"requested":3,"affected":1,"status":"pinned","ttl_seconds":3600,"error":"tenant: the tenant has pinned as much as it may"}`)
	if err := s.Store().SetPinLimit("", 8192); err != nil {
		t.Fatal(err)
	}
	f("POST", body(50, `,"ttl_seconds": 60`), 200, `{"requested":3,"affected":2,"status":"pinned","ttl_seconds":60}`)
	f("POST", body(50, `,"cache_salt": "green"`), 200, `"affected":0,`)
	f("POST", strings.Replace(body(50, ""), `"m"`, `"x"`, 1), 200, `"affected":0,`)
	f("POST", strings.Replace(body(50, ""), `"world_size": 1`, `"world_size": 2`, 1), 200, `"affected":0,`)
	f("POST", body(15, ""), 200, `{"requested":0,"affected":0,`)

	var page struct {
		Total int
		Pins  []struct {
			Key struct {
				Chunk string `json:"chunk_hash_hex"`
			}
			Count int     `json:"pin_count"`
			Bytes int64   `json:"size_bytes"`
			Left  float64 `json:"seconds_left"`
		}
	}
	list := func(query string, total, n int) {
		t.Helper()
		page.Pins = nil
		code, text := ask(h, "GET", "http://localhost/cache/pins"+query, "")
		if err := json.Unmarshal([]byte(text), &page); code != 200 || err != nil || page.Total != total || len(page.Pins) != n {
			t.Errorf("%s: %d %s", query, code, text)
		}
	}
	list("", 2, 2)
	for _, p := range page.Pins {
		if len(p.Key.Chunk) != 64 || p.Count != 1 || p.Bytes != 4096 || p.Left <= 0 || p.Left > 3601 {
			t.Errorf("%+v", p)
		}
	}
	list("?limit=1", 2, 1)
	list("?offset=1&limit=5", 2, 1)
	list("?model_name=m", 2, 2)
	list("?model_name=x", 0, 0)
	list("?cache_salt=green", 0, 0)
	if got, err := s.Clear(server.Clear{Tier: server.ClearL1}); got.Chunks != 0 || err != nil {
		t.Errorf("a clear dropped %d pinned chunks", got.Chunks)
	}
	f("DELETE", body(32, ""), 200, `{"requested":2,"affected":2,"status":"unpinned"}`)
	list("", 0, 0)
	if got, err := s.Clear(server.Clear{Tier: server.ClearL1}); got.Chunks != 2 || err != nil {
		t.Errorf("a clear dropped %d chunks that are pinned no more", got.Chunks)
	}

	for _, bad := range []string{
		"", "[]", "{", body(3, `,"ttl_seconds": 0`), body(3, `,"ttl_seconds": 604801`), body(3, `,"ttl_seconds": "x"`), `{"model_name": "m", "token_ids": []}`,
		`{"model_name": "m", "world_size": 1, "token_ids": [-1]}`, `{"model_name": "m", "world_size": 1, "token_ids": [4294967296]}`, `{"world_size": 1, "token_ids": []}`,
		`{"model_name": "m", "world_size": 99999, "token_ids": []}`, body(1<<20+1, ""),
	} {
		f("POST", bad, 400, `{"error":"`)
	}
	for _, q := range []string{"?limit=0", "?limit=10001", "?offset=-1", "?offset=x"} {
		if code, text := ask(h, "GET", "http://localhost/cache/pins"+q, ""); code != 400 {
			t.Errorf("%s: %d %s", q, code, text)
		}
	}
}
