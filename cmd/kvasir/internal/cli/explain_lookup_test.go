// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/server/admin"
	"github.com/kvasir-kv/kvasir/server/explain"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// explain asks a server for one request and for all; --json is its answer.
func TestExplainOfALiveServer(t *testing.T) {
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: 1 << 20, Dir: t.TempDir(), ChunkTokens: 256})
	if err != nil {
		t.Fatal(err)
	}
	st := store.New(p, store.Options{})
	s := server.New(st, server.Options{})
	defer func() { _, _ = s.Close(), st.Close() }()
	page := httptest.NewServer(admin.Handler(s, admin.Options{}))
	defer page.Close()
	url := page.URL
	if code, stdout, stderr := run(t, "explain", "--url", url); code != 0 || stderr != "" || stdout != "No lookup found less than it asked for.\n" {
		t.Errorf("exit %d, %s%s", code, stdout, stderr)
	}
	for _, model := range []string{"one", "two"} {
		k := &lmcache.Key{Model: model, WorldSize: 1, Worker: lmcache.AllWorkers, Tokens: make([]uint32, 512), End: 512, RequestID: "req-" + model, Salt: "green", Readers: 1}
		s.Answer([][]byte{{0}, lmcache.AppendOp(nil, lmcache.OpLookup), k.Append(nil), lmcache.AppendInt(nil, 1)})
	}
	code, stdout, stderr := run(t, "explain", "req-one", "--url", url)
	if code != 0 || stderr != "" || !strings.Contains(stdout, "req-one  one (salt \"green\")\n  the lookup was declined: no worker is registered") ||
		!strings.Contains(stdout, "What to do:\n- no worker of its model") || !strings.Contains(stdout, "\nWhat it asked for, ") || !strings.Contains(stdout, "\n  lookup ") || strings.Contains(stdout, "req-two") {
		t.Errorf("exit %d, %s%s", code, stdout, stderr)
	}
	var got explain.Explanation
	if code, stdout, _ = run(t, "explain", "--url", url, "--json"); code != 0 || json.Unmarshal([]byte(stdout), &got) != nil || len(got.Lookups) != 2 || got.Lookups[0].Request != "req-two" {
		t.Errorf("--json: exit %d, %s", code, stdout)
	}
	if code, stdout, stderr = run(t, "explain", "nobody", "--url", url); code != 1 || stdout != "" || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, "request nobody is not remembered: it is older than the last 1024") {
		t.Errorf("exit %d, %s%s", code, stdout, stderr)
	}
}

// A server that is not kvasir, and wrong flags, are reported in one line. Nothing in an answer moves the terminal's cursor.
func TestExplainOfSomethingElse(t *testing.T) {
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/evil") {
			_, _ = w.Write([]byte(`{"reasons": {}, "lookups": [{"request_id": "a\nb\u001b[2J", "reason": "x", "text": "\u0007c"}], "advice": {"x": {"what": "d\r", "do": "e"}}}`))
			return
		}
		_, _ = w.Write([]byte(`{"status": "ok"}`))
	}))
	defer other.Close()
	if code, stdout, stderr := run(t, "explain", "--url", other.URL+"/evil"); code != 0 || strings.ContainsAny(stdout, "\x1b\a\r") {
		t.Errorf("exit %d, %q%s", code, stdout, stderr)
	}
	f := func(code int, want string, args ...string) {
		t.Helper()
		got, stdout, stderr := run(t, append([]string{"explain"}, args...)...)
		if got != code || stdout != "" || !strings.Contains(stderr, want) {
			t.Errorf("%v: exit %d, want %d and %q:\n%s%s", args, got, code, want, stdout, stderr)
		}
	}
	f(1, "not answered by a kvasir server", "--url", other.URL)
	f(2, "not http://HOST:PORT", "--url", "localhost")
	f(2, "--limit 0", "--limit", "0")
	f(2, "--timeout -1", "--timeout=-1")
}
