// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/proxy"
	"github.com/kvasir-kv/kvasir/proxy/keys"
)

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func ask(t *testing.T, method, url, token string) (int, string) {
	t.Helper()
	r, err := http.NewRequest(method, url, strings.NewReader(`{"prompt":"a"}`))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+token)
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(text)
}

// With keys, metrics and the list of engines are on the admin port. At the end a request in progress finishes,
// and no port listens any more.
func TestServe(t *testing.T) {
	release, arrived := make(chan bool), make(chan bool, 1)
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/completions" {
			arrived <- true
			<-release
		}
		_, _ = io.WriteString(w, "{}")
	}))
	defer engine.Close()
	path := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(path, fmt.Appendf(nil, "ada %x", sha256.Sum256([]byte("s"))), 0o600); err != nil {
		t.Fatal(err)
	}
	known, err := keys.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	p, err := proxy.New(proxy.Options{Engines: []string{engine.URL}, Keys: known, HealthInterval: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	s := Server{
		Proxy: p, Listener: listen(t), Admin: listen(t), AdminToken: "t", Keys: known, MaxConns: 100, Drain: time.Minute, Log: slog.New(slog.DiscardHandler),
		Metrics: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "figures") }),
	}
	url, admin := "http://"+s.Listener.Addr().String(), "http://"+s.Admin.Addr().String()
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx) }()
	for end := time.Now().Add(60 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if status, _ := ask(t, "GET", url+"/health", ""); status == 200 {
			break
		} else if time.Now().After(end) {
			t.Fatal("never well")
		}
	}
	f := func(method, url, token string, want int, words string) {
		t.Helper()
		if status, text := ask(t, method, url, token); status != want || !strings.Contains(text, words) {
			t.Errorf("%s %s: %d %s", method, url, status, text)
		}
	}
	f("GET", url+"/metrics", "s", 404, "")
	f("GET", url+"/engines", "t", 404, "")
	f("POST", url+"/v1/completions", "no", 401, "")
	f("GET", admin+"/metrics", "", 200, "figures")
	f("GET", admin+"/engines", "s", 401, "")
	f("GET", admin+"/engines", "t", 200, engine.URL)
	answer := make(chan string, 1)
	go func() {
		status, text := ask(t, "POST", url+"/v1/completions", "s")
		answer <- fmt.Sprint(status, text)
	}()
	<-arrived
	stop()
	for end := time.Now().Add(60 * time.Second); ; time.Sleep(5 * time.Millisecond) { // the listener closes first
		nc, err := net.Dial("tcp", s.Listener.Addr().String())
		if err != nil {
			break
		}
		nc.Close()
		if time.Now().After(end) {
			t.Fatal("it listens on")
		}
	}
	close(release)
	if got := <-answer; got != "200{}" {
		t.Error(got)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
	http.DefaultClient.CloseIdleConnections()
}

// A page of another site cannot read metrics on either port, neither through a name of its own that resolves to this host nor across
// sites. CORS never covers them.
func TestMetricsAreGuarded(t *testing.T) {
	engine := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer engine.Close()
	for _, admin := range []bool{false, true} {
		p, err := proxy.New(proxy.Options{Engines: []string{engine.URL}, CORS: proxy.CORS{Origins: []string{"*"}}})
		if err != nil {
			t.Fatal(err)
		}
		s := &Server{
			Proxy: p, Listener: listen(t), MaxConns: 10, Drain: time.Second, Log: slog.New(slog.DiscardHandler), AllowHosts: []string{"proxy.example"},
			Metrics: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "figures") }),
		}
		at := s.Listener
		if admin {
			s.Admin, s.AdminToken = listen(t), "tok"
			at = s.Admin
		}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- s.Serve(ctx) }()
		f := func(host, site, origin string, want int) {
			t.Helper()
			r, _ := http.NewRequest(http.MethodGet, "http://"+at.Addr().String()+"/metrics", nil)
			r.Host = host
			for k, v := range map[string]string{"Sec-Fetch-Site": site, "Origin": origin} {
				if v != "" {
					r.Header.Set(k, v)
				}
			}
			resp, err := http.DefaultClient.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			if text, _ := io.ReadAll(resp.Body); resp.StatusCode != want || want != 200 && strings.Contains(string(text), "figures") || resp.Header.Get("Access-Control-Allow-Origin") != "" {
				t.Errorf("admin %v, %s %s %s: %d %s", admin, host, site, origin, resp.StatusCode, text)
			}
		}
		f("", "", "", 200)
		f("localhost", "", "", 200)
		f("proxy.example:8000", "none", "", 200)
		f("evil.example", "", "", 403)
		f("localhost", "cross-site", "", 403)
		f("localhost", "", "http://evil.example", 403)
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		p.Close()
	}
	http.DefaultClient.CloseIdleConnections()
}
