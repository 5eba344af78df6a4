// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/server/admin"
)

// quota shows and sets the quotas of a real server's tenants. It prints the server's own text when the server refuses.
func TestQuotaOfALiveServer(t *testing.T) {
	s := serve(t, "--quota", "a=1MiB", "--tenant-ttl", "b=90s", "--pin-limit", "_default=64KiB") // of a pool of 10.2 MiB
	url := fmt.Sprintf("http://127.0.0.1:%d", s.http)
	f := func(code int, want string, args ...string) {
		t.Helper()
		got, stdout, stderr := run(t, append(append([]string{"quota"}, args...), "--url", url)...)
		if text := stdout + stderr; got != code || !strings.Contains(strings.Join(strings.Fields(text), " "), want) || code != 0 && (stdout != "" || strings.Count(stderr, "\n") != 1) {
			t.Errorf("quota %v: exit %d, want %d and %s:\n%s", args, got, code, want, text)
		}
	}
	f(0, "TENANT QUOTA HAS EVICTED TTL EXPIRED PINNED MAY PIN _default - - - - - 0 B 64 KiB a 1 MiB 0 B 0 B - - - - b - - - 1m30s 0 chunks - -", "list")
	f(0, "a 2 MiB 0 B 0 B never 0 chunks 0 B 1 MiB", "set", "a", "--size", "2MiB", "--ttl", "never", "--pins", "1MiB")
	f(0, "a - - - never 0 chunks 0 B 1 MiB", "set", "a", "--size", "none")
	f(0, "__default 512 KiB", "set", "__default", "--size", "512KiB")
	f(1, "kvasir: quota_bytes: tenant: the quotas do not fit into the pool: with this one they are 20", "set", "c", "--size", "20GiB")
	f(1, "kvasir: ttl_seconds: kv: salt longer than", "set", "a/b", "--ttl", "5s")
	f(2, `--size "x" is no size`, "set", "a", "--size", "x")
	f(2, `--ttl "soon" is no time`, "set", "a", "--ttl", "soon")
	f(2, "say what to set: --size, --ttl or --pins (see kvasir quota set --help)", "set", "a")
	f(0, "removed what b had of its own", "remove", "b")
	f(1, "tenant b has nothing of its own", "remove", "b")
	var got admin.Tenants
	code, stdout, _ := run(t, "quota", "list", "--json", "--url", url)
	if err := json.Unmarshal([]byte(stdout), &got); code != 0 || err != nil || len(got.Tenants) != 3 || got.Tenants[1].Salt != "__default" || *got.Tenants[1].Quota != 512<<10 {
		t.Errorf("exit %d, %s", code, stdout)
	}
	for _, salt := range []string{"a", "_default", "__default"} {
		f(0, "removed", "remove", salt)
	}
	f(0, "No tenant has a quota", "list")
}

// A server that is away, or that is not kvasir, is reported in one line that says where to look.
func TestQuotaOfSomethingElse(t *testing.T) {
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case strings.HasPrefix(r.URL.Path, "/absent"):
			w.WriteHeader(http.StatusNotFound)
		case strings.HasPrefix(r.URL.Path, "/evil") && r.Method == http.MethodGet:
			_, _ = w.Write([]byte(`{"tenants": [{"cache_salt": "a\nb\u001b[2J", "ttl_seconds": 1e300}]}`))
		case strings.HasPrefix(r.URL.Path, "/evil"):
			w.WriteHeader(http.StatusBadRequest)
			_, _ = w.Write([]byte(`{"error": "no\n\u001b[2J"}`))
		default:
			_, _ = w.Write([]byte(`{"status": "ok"}`))
		}
	}))
	defer other.Close()
	f := func(want, url string) {
		t.Helper()
		for _, args := range [][]string{{"list"}, {"set", "a", "--ttl", "5s"}, {"remove", "a"}} {
			code, stdout, stderr := run(t, append(append([]string{"quota"}, args...), "--url", url, "--timeout", "5")...)
			if code != 1 || stdout != "" || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, want) {
				t.Errorf("%v at %s: exit %d, want one line with %q:\n%s%s", args, url, code, want, stdout, stderr)
			}
		}
	}
	f("nothing listens at", fmt.Sprintf("http://127.0.0.1:%d", testkit.FreePort(t)))
	f("is not answered by a kvasir server", other.URL)
	f("404 Not Found: is that a kvasir server?", other.URL+"/absent")
	for _, args := range [][]string{{"list"}, {"set", "a", "--ttl", "5s"}} {
		if _, stdout, stderr := run(t, append(append([]string{"quota"}, args...), "--url", other.URL+"/evil")...); strings.ContainsAny(stdout+stderr, "\x1b") || strings.Count(stdout+stderr, "\n") > 2 {
			t.Errorf("names of others reach the terminal: %q", stdout+stderr)
		}
	}
	if code, _, stderr := run(t, "quota", "list", "--url", "ftp://localhost:8080"); code != 2 || !strings.Contains(stderr, "is not http://HOST:PORT") {
		t.Errorf("exit %d, %s", code, stderr)
	}
}

// clear works on a live server, for all models and for one, and names the tiers that keep their chunks.
func TestClearOfALiveServer(t *testing.T) {
	s := serve(t, "--l2-adapter", fmt.Sprintf(`{"type":"fs","base_path":%q}`, t.TempDir()))
	url := fmt.Sprintf("http://127.0.0.1:%d", s.http)
	f := func(code int, want string, args ...string) {
		t.Helper()
		got, stdout, stderr := run(t, append(append([]string{"clear"}, args...), "--url", url)...)
		if text := stdout + stderr; got != code || !strings.Contains(text, want) {
			t.Errorf("clear %v: exit %d, want %d and %s:\n%s", args, got, code, want, text)
		}
	}
	f(0, "cleared the pool and the tiers: 0 chunks left the pool\nwhat stays: the tiers of --l2-adapter", "--model", "m", "--force")
	f(0, "cleared the pool: 0 chunks", "--tier", "l1")
	f(0, "cleared the tiers: 0 chunks", "--tier", "l2", "--model", "a", "--model", "b")
	f(0, `"status":"ok"`, "--json")
	f(2, "--tier must be one of", "--tier", "l3")
	f(1, "is no name of a model", "--model", strings.Repeat("x", 1025))
}

// tier drop removes the objects of a tier of a live server.
func TestTierDropOfALiveServer(t *testing.T) {
	s := serve(t, "--disk", t.TempDir(), "--disk-gb", "1")
	url := fmt.Sprintf("http://127.0.0.1:%d", s.http)
	f := func(code int, want string, args ...string) {
		t.Helper()
		got, stdout, stderr := run(t, append(append([]string{"tier", "drop"}, args...), "--url", url)...)
		if text := stdout + stderr; got != code || !strings.Contains(text, want) {
			t.Errorf("tier drop %v: exit %d, want %d and %s:\n%s", args, got, code, want, text)
		}
	}
	f(0, "removed 0 objects of tier disk", "disk", "--all")
	f(0, `{"removed":0,"tier":"disk"}`, "disk", "--all", "--json")
	f(1, "this server has disk", "redis", "--all")
	f(2, "say what to remove", "disk")
	f(2, "does not look for salts", "disk", "--torn")
}

// Commands that ask a server follow no redirect, and print no control characters of its status line.
func TestCommandsTrustNoAnswer(t *testing.T) {
	reached := false
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached = true }))
	defer elsewhere.Close()
	for _, answer := range []string{
		"HTTP/1.1 302 Found\r\nLocation: " + elsewhere.URL + "/\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
		"HTTP/1.1 500 x\x1b[2J\xc2\x9b\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
	} {
		url, asked := answersWith(t, answer)
		for _, args := range [][]string{{"status"}, {"explain"}, {"quota", "list"}, {"clear"}, {"top", "--once"}} {
			before := asked()
			code, stdout, stderr := run(t, append(args, "--url", url)...)
			if asked() == before {
				t.Errorf("%v did not ask the server", args)
			}
			if code == 0 || strings.ContainsAny(stdout+stderr, "\x1b\u009b") || reached {
				t.Errorf("%v: exit %d, another server was asked: %v: %q", args, code, reached, stdout+stderr)
			}
			if len(stderr) == 0 {
				t.Errorf("%v says nothing", args)
			}
		}
	}
}

// answersWith starts a server that gives these bytes to each request. It returns its address and the number of its requests.
func answersWith(t *testing.T, answer string) (url string, asked func() int64) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	var requests atomic.Int64
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if _, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
				requests.Add(1)
				_, _ = c.Write([]byte(answer))
			}
			c.Close()
		}
	}()
	return "http://" + l.Addr().String(), requests.Load
}
