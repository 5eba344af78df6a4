// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/server/admin"
	"github.com/kvasir-kv/kvasir/store/tenant"
)

// The answer names the source of each value. A setting is kept where there is a file, and said to be only in effect where the write fails.
func TestSources(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "dir")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "state")
	flags := make(tenant.Flags)
	_ = flags.SetQuota("a", 8192)
	_ = flags.SetTTL("", time.Minute)
	book, err := tenant.OpenTerms(path, flags, nil)
	if err != nil {
		t.Fatal(err)
	}
	s := newServer(t)
	if err := book.Apply(s.Store()); err != nil {
		t.Fatal(err)
	}
	h := admin.Handler(s, admin.Options{Terms: book, Flags: map[string]string{"port": "1", "host": "h"}, Sources: map[string]string{"port": "kvasir.yaml line 3", "host": "default"}})
	sources := func() (c admin.Config) {
		t.Helper()
		if code, body := ask(h, "GET", "http://localhost/config?sources=true", ""); code != 200 || json.Unmarshal([]byte(body), &c) != nil {
			t.Fatalf("%d %s", code, body)
		}
		return c
	}
	f := func(method, path, body string, code int, want string) {
		t.Helper()
		if got, text := ask(h, method, "http://localhost"+path, body, jsonType...); got != code || !strings.Contains(text, want) {
			t.Errorf("%s %s %s: %d %s, want %d %s", method, path, body, got, text, code, want)
		}
	}
	c := sources()
	if len(c.Flags) != 2 || c.Flags["port"] != (admin.Setting{Value: "1", From: "kvasir.yaml line 3"}) || c.State == nil || *c.State != path {
		t.Errorf("%+v", c)
	}
	if len(c.Tenants) != 2 || c.Tenants[0].Salt != "_default" || c.Tenants[0].Field != "ttl_seconds" || *c.Tenants[0].Value != 60 || c.Tenants[0].From != "flag" || c.Tenants[0].At != nil {
		t.Errorf("%+v", c.Tenants)
	}
	f("PUT", "/tenants/a", `{"quota_bytes": 16384, "pin_limit_bytes": 4096}`, 200, `"kept_in":"`+path+`"`)
	f("DELETE", "/tenants/_default", "", 200, "removed")
	f("PUT", "/quota/b", `{"limit_gb": 0.00001}`, 200, `"status":"ok"`)
	var got []string
	for _, x := range sources().Tenants {
		if x.At == nil || time.Since(*x.At) > time.Hour {
			t.Errorf("%+v", x)
		}
		value := "none"
		if x.Value != nil {
			value = strings.TrimSuffix(time.Duration(*x.Value).String(), "ns")
		}
		got = append(got, x.Salt+" "+string(x.Field)+" "+value+" "+x.From)
	}
	if text := strings.Join(got, "; "); text != "_default ttl_seconds none set while running; a pin_limit_bytes 4.096µs set while running; a quota_bytes 16.384µs set while running; b quota_bytes 10.737µs set while running" {
		t.Error(text)
	}
	metric := func(want string) {
		t.Helper()
		if _, text := ask(h, "GET", "http://localhost/metrics", ""); !strings.Contains(text, "\nkvasir_tenant_settings_unkept "+want+"\n") {
			t.Errorf("kvasir_tenant_settings_unkept is not %s", want)
		}
	}
	metric("0")
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	f("PUT", "/quota/c", `{"limit_gb": 0.00001}`, 500, "it is in effect, and not kept for a restart: open "+path+".tmp: no such file or directory")
	f("PUT", "/tenants/c", `{"quota_bytes": 4096, "ttl_seconds": 60}`, 500, "it is in effect, and not kept for a restart")
	f("DELETE", "/quota/b", "", 500, "it is in effect, and not kept")
	f("DELETE", "/tenants/a", "", 500, "it is in effect, and not kept")
	f("PUT", "/tenants/c", `{"quota_bytes": -1}`, 400, "quota_bytes: tenant: a quota below 0")
	metric("1")
	if list := tenantsOf(t, h); len(list) != 1 || list[0].Salt != "c" || *list[0].Quota != 4096 || *list[0].TTL != 60 {
		t.Errorf("%+v", list)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := book.Close(); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(path); err != nil || !strings.Contains(string(text), `"cache_salt":"c"`) || strings.Contains(string(text), `"cache_salt":"b"`) {
		t.Errorf("%v %s", err, text)
	}
}
