// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/auth"
)

// With keys a request needs one of them, in either header; the page and probes need none.
func TestAPIKeys(t *testing.T) {
	h := newGate(auth.Options{Keys: []string{"one", "two"}}).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) }))
	ask := func(path, name, value string) *httptest.ResponseRecorder {
		r := httptest.NewRequest(http.MethodGet, path, nil)
		if name != "" {
			r.Header.Set(name, value)
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w
	}
	for _, c := range []struct {
		path, name, value string
		ok                bool
	}{
		{"/status", "", "", false},
		{"/status", "Authorization", "Bearer one", true},
		{"/status", "Authorization", "bEARER two", true},
		{"/status", "Authorization", "Basic one", false},
		{"/status", "Authorization", "Bearer three", false},
		{"/status", "Authorization", "Bearer ", false},
		{"/status", "X-LMCache-API-Key", "two", true},
		{"/status", "X-LMCache-API-Key", "tw", false},
		{"/metrics", "", "", false},
		{"//healthcheck", "", "", false},
		{"/", "", "", true},
		{"/healthcheck", "", "", true},
		{"/healthz", "", "", true},
		{"/readyz", "", "", true},
	} {
		w := ask(c.path, c.name, c.value)
		if ok := w.Code == http.StatusTeapot; ok != c.ok {
			t.Errorf("%s with %s %q: %d", c.path, c.name, c.value, w.Code)
		}
		if !c.ok {
			body, _ := io.ReadAll(w.Body)
			if w.Code != http.StatusUnauthorized || w.Header().Get("WWW-Authenticate") != "Bearer" || strings.TrimSpace(string(body)) != `{"detail":"Invalid or missing API key"}` {
				t.Errorf("%s: %d %v %s", c.path, w.Code, w.Header(), body)
			}
		}
	}
}

// Keys come from files and from the environment, the newer names before the older. A file without one key is an error.
func TestReadKeys(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	env := map[string]string{
		"LMCACHE_API_KEY_FILE": file("c", "c\n"), "LMCACHE_HTTP_API_KEY_FILE": file("x", "x"), "LMCACHE_HTTP_API_KEY": "d",
	}
	keys, err := ReadKeys([]string{file("a", "a\n"), file("b", " b ")}, func(n string) string { return env[n] })
	if err != nil || strings.Join(keys, " ") != "a b c d" {
		t.Errorf("%q, %v", keys, err)
	}
	public := file("public", "k\n")
	if err := os.Chmod(public, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{public, file("empty", "\n"), file("two", "a\nb\n"), file("long", strings.Repeat("k", 5000)), filepath.Join(dir, "none")} {
		if _, err := ReadKeys([]string{bad}, func(string) string { return "" }); err == nil || !strings.Contains(err.Error(), bad) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}
