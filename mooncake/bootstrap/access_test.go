// SPDX-License-Identifier: Apache-2.0

package bootstrap

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
)

// A peer on another host cannot learn through the registry whether a third host's port is
// open: the registry does not dial it, and answers the same either way.
func TestProbesRevealNothingToOtherHosts(t *testing.T) {
	f := func(from, addr string, tried bool, networks ...netip.Prefix) {
		t.Helper()
		var answers []string
		for _, outcome := range []error{nil, syscall.ECONNREFUSED} {
			r := open(t, Options{ProbeNetworks: networks})
			dialled := false
			r.prober.dial = func(context.Context, string) error { dialled = true; return outcome }
			for _, id := range []string{"old", "new"} {
				in := Registration{EngineID: id, Addr: addr}
				if id == "new" {
					in.Addr = "tcp://other:1"
				}
				body, err := in.body()
				if err != nil {
					t.Fatal(err)
				}
				_, text := call(r, "POST", "/register", string(body), "From", from)
				answers = append(answers, text)
			}
			if dialled != tried {
				t.Errorf("from %s, %s: dialled %t, want %t", from, addr, dialled, tried)
			}
		}
		if same := answers[1] == answers[3]; same == tried {
			t.Errorf("from %s, %s: answers %q", from, addr, answers)
		}
	}
	f("10.66.6.6:9", "tcp://10.0.0.7:22", false)
	f("10.66.6.6:9", "tcp://127.0.0.1:22", false)
	f("10.66.6.6:9", "tcp://[::1]:22", false)
	f("10.66.6.6:9", "tcp://[::ffff:127.0.0.1]:22", false)
	f("10.66.6.6:9", "tcp://0.0.0.0:22", false)
	f("10.66.6.6:9", "tcp://10.66.6.6.evil.example:22", false)
	f("10.66.6.6:9", "tcp://localhost:22", false)
	f("10.66.6.6:9", "tcp://10.66.6.6:22", true) // its own
	f("[2001:db8::1]:9", "tcp://[2001:db8::1]:22", true)
	f("[2001:db8::1]:9", "tcp://[2001:db8::2]:22", false)
	f("127.0.0.1:9", "tcp://10.0.0.7:22", true) // a process of this host could dial that port itself
	f("10.66.6.6:9", "tcp://10.0.0.7:22", true, netip.MustParsePrefix("10.0.0.0/24"))
	f("10.66.6.6:9", "tcp://10.0.1.7:22", false, netip.MustParsePrefix("10.0.0.0/24"))
}

// A DELETE without a token must come from this host, must have one of this host's names or an allowed
// one as Host, and must not come from a web page. Registrations and queries may use any Host.
func TestForeignHostsAndPages(t *testing.T) {
	f := func(method, path string, want int, header ...string) {
		t.Helper()
		r := open(t, Options{AllowHosts: []string{"registry.example"}})
		mustRegister(t, r, Registration{EngineID: "e", Addr: "a"})
		code, text := call(r, method, path, `{"engine_id":"e","dp_rank":0,"tp_rank":0,"pp_rank":0,"addr":"a"}`, header...)
		if code != want {
			t.Errorf("%s %s %v: %d %s, want %d", method, path, header, code, text, want)
		}
	}
	del := "/register?engine_id=e"
	f("DELETE", del, 200)
	f("DELETE", del, 200, "Host", "localhost:8998")
	f("DELETE", del, 200, "Host", "registry.example")
	f("DELETE", del, 403, "Host", "attacker.example")
	f("DELETE", del, 403, "Host", "127.0.0.1.attacker.example")
	f("DELETE", del, 403, "Origin", "https://evil.example")
	f("DELETE", del, 403, "Origin", "null")
	f("DELETE", del, 403, "Sec-Fetch-Site", "cross-site")
	f("DELETE", del, 403, "From", "10.0.0.7:1")
	f("POST", "/register", 200, "Host", "registry.ns.svc")
	f("POST", "/register", 422, "Content-Type", "text/plain", "Origin", "https://evil.example") // all that a page may send unasked
	f("GET", "/query", 200, "Host", "registry.ns.svc")
	f("GET", "/healthz", 200, "Host", "registry.ns.svc")
	f("GET", "/healthcheck", 200, "Host", "registry.ns.svc")

	r := open(t, Options{})
	mustRegister(t, r, Registration{EngineID: "e", Addr: "a"})
	if _, text := call(r, "GET", "/healthz", "", "Host", "attacker.example"); strings.Contains(text, "workers") {
		t.Error(text)
	}
}

// Only Bearer is a token's scheme.
func TestTokenScheme(t *testing.T) {
	r := open(t, Options{Token: "s"})
	for _, header := range []string{"s", "bearer s", "Basic s", "Bearer", "Bearer  s"} {
		if code, text := call(r, "DELETE", "/register?engine_id=e", "", "Authorization", header); code != 401 {
			t.Errorf("%q: %d %s", header, code, text)
		}
	}
}

// Texts of peers stay within their line, and one peer cannot fill the log.
func TestLogOfPeers(t *testing.T) {
	var out bytes.Buffer
	r := open(t, Options{Log: slog.New(slog.NewTextHandler(&out, nil))})
	for dp := range 2000 {
		in := Registration{EngineID: "e\r\nforged \x1b[2J" + strings.Repeat("x", 900), DPRank: dp, Addr: "tcp://h:1\nlevel=ERROR"}
		mustRegisterDirect(t, r, in, remote("10.66.6.6"))
		in.EngineID = "f\nforged"
		_ = r.register(t.Context(), in, remote("10.66.6.6")) // has the old one's address, so replaces it
	}
	if n := strings.Count(out.String(), "\n"); n > 1000 {
		t.Errorf("%d lines", n)
	}
	for line := range strings.Lines(out.String()) {
		if !strings.HasPrefix(line, "time=") || strings.ContainsAny(strings.TrimSuffix(line, "\n"), "\r\n\x1b") || len(line) > 2500 {
			t.Fatalf("%q", line)
		}
	}
}

// The start and the end are in the log, in the words of vLLM's own server.
func TestServeLogsStartAndEnd(t *testing.T) {
	var out bytes.Buffer
	r := open(t, Options{Log: slog.New(slog.NewTextHandler(&out, nil))})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.Serve(ctx, l); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), `msg="Mooncake Bootstrap Server started at `+l.Addr().String()+`"`) || !strings.Contains(out.String(), "Mooncake Bootstrap Server stopped.") {
		t.Error(&out)
	}
}

// Every violation is reported.
func TestOptionsValidate(t *testing.T) {
	_, err := Open(Options{TP: -1, PP: maxSize + 1, Settle: -1, ProbeTimeout: 6e9, MaxWorkers: -5, Token: "a b", Guard: GuardAll})
	if err == nil || strings.Count(err.Error(), "\n") != 5 {
		t.Fatal(err)
	}
	if _, err := Open(Options{Guard: GuardAll}); err == nil {
		t.Fatal("a guard without a token")
	}
}

// Behind a gate with tokens, stock vLLM registers and queries without one, as --token-guards says; the rest needs a scope, from any address
// of the networks, and Options.Token allows everything.
func TestGateOfTheRegistry(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tokens")
	reader, lineR, _ := auth.NewToken("r", auth.Read, time.Time{})
	writer, lineW, _ := auth.NewToken("w", auth.Write, time.Time{})
	if err := os.WriteFile(path, []byte(lineR+"\n"+lineW+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	tokens, err := auth.OpenTokens(path)
	if err != nil {
		t.Fatal(err)
	}
	networks := auth.NewNetworks([]netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}, nil)
	f := func(guard Guard, from, secret, want string) {
		t.Helper()
		r, err := Open(Options{Token: "own", Guard: guard, Access: auth.Options{Tokens: tokens, Networks: networks}})
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		got := ""
		for _, route := range []string{"GET /healthz", "POST /register", "GET /query", "GET /metrics", "DELETE /register?engine_id=e"} {
			method, path, _ := strings.Cut(route, " ")
			body := `{"engine_id":"e","dp_rank":0,"tp_rank":0,"pp_rank":0,"addr":"tcp://127.0.0.1:41233"}`
			req := httptest.NewRequest(method, path, strings.NewReader(body))
			req.Header.Set("Content-Type", "application/json")
			req.RemoteAddr = from
			if secret != "" {
				req.Header.Set("Authorization", "Bearer "+secret)
			}
			w := httptest.NewRecorder()
			r.ServeHTTP(w, req)
			got += fmt.Sprint(" ", w.Code)
		}
		if got[1:] != want {
			t.Errorf("guard %d from %s with %q: %s, want %s", guard, from, secret, got[1:], want)
		}
	}
	f(GuardDelete, "10.0.0.9:1", "", "200 200 200 401 401")
	f(GuardDelete, "10.0.0.9:1", reader, "200 200 200 200 403")
	f(GuardDelete, "10.0.0.9:1", writer, "200 200 200 200 200")
	f(GuardDelete, "10.0.0.9:1", "own", "200 200 200 200 200")
	f(GuardWrites, "10.0.0.9:1", "", "200 401 200 401 401")
	f(GuardAll, "10.0.0.9:1", reader, "200 403 200 200 403")
	f(GuardAll, "10.0.0.9:1", "wrong", "200 401 401 401 401")
	f(GuardDelete, "192.0.2.1:1", "own", "200 401 401 401 401")
}

// Where queries need the token, /healthz answers a caller without it only that the registry serves. With the token, or where queries need
// none, the answer has the number of engines.
func TestHealthTellsNoMoreThanQueries(t *testing.T) {
	f := func(guard Guard, token, secret string, more bool) {
		t.Helper()
		r, err := Open(Options{Token: token, Guard: guard})
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		req := httptest.NewRequest("GET", "/healthz", nil)
		req.Host, req.RemoteAddr = "127.0.0.1", "127.0.0.1:1"
		if secret != "" {
			req.Header.Set("Authorization", "Bearer "+secret)
		}
		w := httptest.NewRecorder()
		r.ServeHTTP(w, req)
		if has := strings.Contains(w.Body.String(), `"engines"`); w.Code != 200 || has != more {
			t.Errorf("guard %d, token %q, with %q: %d %s", guard, token, secret, w.Code, w.Body)
		}
	}
	f(GuardAll, "own", "", false)
	f(GuardAll, "own", "wrong", false)
	f(GuardAll, "own", "own", true)
	f(GuardWrites, "own", "", true)
	f(GuardDelete, "", "", true)
}
