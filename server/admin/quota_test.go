// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/admin"
)

// LMCache's routes of quotas, in its shapes; the empty salt and a tenant called _default have
// quotas of their own.
func TestQuotaRoutes(t *testing.T) {
	s := newServer(t) // 64 pages, of which the tenant without a salt has two
	h := admin.Handler(s, admin.Options{})
	f := func(method, path, body string, code int, want string) {
		t.Helper()
		if got, text := ask(h, method, "http://localhost"+path, body, "Content-Type", "application/json"); got != code || strings.TrimSpace(text) != want {
			t.Errorf("%s %s: %d %s, want %d %s", method, path, got, text, code, want)
		}
	}
	const mib = "0.0009765625" // of a GiB
	f("GET", "/quota", "", 200, `{"users":{}}`)
	f("GET", "/quota/_default", "", 200, `{"cache_salt":"_default","current_usage_gb":0,"exists":false,"limit_gb":0}`)
	f("PUT", "/quota/_default", `{"limit_gb": 0.000030517578125}`, 200, `{"cache_salt":"_default","limit_gb":0.000030517578125,"status":"ok"}`)
	key := lmcache.Key{Model: "m", WorldSize: 1, Tokens: make([]uint32, 32), End: 32, RequestID: "r", Readers: 1}
	s.Answer([][]byte{{0}, lmcache.AppendOp(nil, lmcache.OpLookup), key.Append(nil), lmcache.AppendInt(nil, 1)})
	f("GET", "/quota/_default", "", 200, `{"cache_salt":"_default","current_usage_gb":0.00000762939453125,"exists":true,"limit_gb":0.000030517578125}`)
	f("PUT", "/quota/__default", `{"limit_gb": "0.00006103515625"}`, 200, `{"cache_salt":"__default","limit_gb":0.00006103515625,"status":"ok"}`)
	f("GET", "/quota/__default", "", 200, `{"cache_salt":"__default","current_usage_gb":0,"exists":true,"limit_gb":0.00006103515625}`)
	f("GET", "/quota", "", 200, `{"users":{"__default":{"current_usage_gb":0,"limit_gb":0.00006103515625},"_default":{"current_usage_gb":0.00000762939453125,"limit_gb":0.000030517578125}}}`)
	var salts []string
	for _, u := range s.Store().Tenants() {
		salts = append(salts, u.Salt)
	}
	if got := fmt.Sprintf("%q", salts); got != `["" "_default"]` {
		t.Errorf("the tenants are %s", got)
	}
	f("PUT", "/quota/x", `{"limit_gb": `+mib+`}`, 400, `{"error":"tenant: the quotas do not fit into the pool: with this one they are 1.1 MiB of 256 KiB"}`)
	f("PUT", "/quota/x", `{"limit_gb": 1e300}`, 400, `{"error":"tenant: the quotas do not fit into the pool: with this one they are 4194304.0 TiB of 256 KiB"}`)
	for _, body := range []string{``, `{`, `[]`, `{}`, `{"limit_gb": -1}`, `{"limit_gb": null}`, `{"limit_gb": "nan"}`, `{"limit_gb": "x"}`, `{"limit_gb": "` + strings.Repeat("1", 5000) + `"}`} {
		if code, text := ask(h, "PUT", "http://localhost/quota/x", body, "Content-Type", "application/json"); code != 400 || !strings.Contains(text, `{"error":"`) {
			t.Errorf("body %.40q: %d %s", body, code, text)
		}
	}
	for _, salt := range []string{"a%40b", "a%2Fb", "%ff", strings.Repeat("x", 200)} {
		if code, text := ask(h, "PUT", "http://localhost/quota/"+salt, `{"limit_gb": 0}`, "Content-Type", "application/json"); code != 400 {
			t.Errorf("salt %q: %d %s", salt, code, text)
		}
	}
	if code, _ := ask(h, "PUT", "http://evil.example/quota/x", `{"limit_gb": 0}`); code != 403 {
		t.Errorf("a web page sets a quota: %d", code)
	}

	var st admin.Status
	if code, body := ask(h, "GET", "http://localhost/status", ""); code != 200 || json.Unmarshal([]byte(body), &st) != nil {
		t.Fatal(code, body)
	}
	got := ""
	for _, x := range st.Tenants {
		got += fmt.Sprintf("%s %d %d %d; ", x.Salt, *x.Quota, x.Bytes, x.Objects)
	}
	if got != "_default 32768 8192 2; __default 65536 0 0; " {
		t.Errorf("status has %s", got)
	}
	_, metrics := ask(h, "GET", "http://localhost/metrics", "")
	for _, line := range []string{`kvasir_tenant_bytes{cache_salt="_default"} 8192`, `kvasir_tenant_quota_bytes{cache_salt="__default"} 65536`, `kvasir_tenant_objects{cache_salt="_default"} 2`} {
		if !strings.Contains(metrics, line+"\n") {
			t.Errorf("no %s in the metrics", line)
		}
	}

	f("DELETE", "/quota/__default", "", 200, `{"cache_salt":"__default","status":"removed"}`)
	f("DELETE", "/quota/__default", "", 200, `{"cache_salt":"__default","status":"not_found"}`)
	f("DELETE", "/quota/_default", "", 200, `{"cache_salt":"_default","status":"removed"}`)
	f("GET", "/quota", "", 200, `{"users":{}}`)
}
