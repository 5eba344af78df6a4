// SPDX-License-Identifier: Apache-2.0

package httpserver

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"
)

func TestGuard(t *testing.T) {
	own, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	h := Guard{AllowHosts: []string{"cache.example"}}.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusOK)
	}))
	f := func(want int, method, host, body string, header ...string) {
		t.Helper()
		r := httptest.NewRequest(method, "http://localhost/x", strings.NewReader(body))
		r.Host = host
		for i := 0; i < len(header); i += 2 {
			r.Header.Add(header[i], header[i+1])
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code != want {
			t.Errorf("%s to %q with %q and %q: %d, want %d", method, host, body, header, w.Code, want)
		}
	}
	for _, host := range []string{"localhost", "localhost:8080", "127.0.0.1:8080", "[::1]:8080", "10.1.2.3", own, own + ":8080", "Cache.Example:8080", "LOCALHOST."} {
		f(200, "GET", host, "")
		f(200, "POST", host, "{}", "Content-Type", "application/json; charset=utf-8")
	}
	for _, host := range []string{"attacker.example", "attacker.example:8080", own + ".attacker.example", "localhost.attacker.example", "127.0.0.1.attacker.example", "", "evil.cache.example"} {
		f(403, "GET", host, "")
	}
	f(403, "POST", "localhost", "", "Origin", "https://evil.example")
	f(403, "POST", "localhost", "", "Origin", "null")
	f(403, "POST", "localhost:8080", "", "Origin", "http://localhost:9090")
	f(403, "POST", "localhost", "", "Sec-Fetch-Site", "cross-site")
	f(403, "POST", "localhost", "", "Sec-Fetch-Site", "same-site")
	f(403, "GET", "localhost", "", "Sec-Fetch-Site", "cross-site")
	f(200, "POST", "localhost:8080", "", "Origin", "http://localhost:8080", "Sec-Fetch-Site", "same-origin")
	f(200, "GET", "localhost", "", "Sec-Fetch-Site", "none")
	f(200, "POST", "localhost", "")
	f(415, "POST", "localhost", "{}")
	f(415, "POST", "localhost", "{}", "Content-Type", "text/plain")
	f(415, "POST", "localhost", "a=b", "Content-Type", "application/x-www-form-urlencoded")
	f(415, "POST", "localhost", "{}", "Content-Type", "multipart/form-data")
}

// At the limit, new connections of a host replace its own older ones. The connection of another host
// stays.
func TestLimit(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	limited := &listener{Listener: l, max: 4}
	srv := NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "here") }))
	go func() { _ = srv.Serve(limited) }()
	t.Cleanup(func() { _ = srv.Close() })
	dial := func(from string) net.Conn {
		t.Helper()
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
		c, err := d.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		_ = c.SetDeadline(time.Now().Add(60 * time.Second))
		return c
	}
	ask := func(c net.Conn) string {
		_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
		b := make([]byte, 4096)
		n, _ := c.Read(b)
		return string(b[:n])
	}
	quiet := dial("127.0.0.2")
	if got := ask(quiet); !strings.Contains(got, "here") {
		t.Fatalf("%q", got)
	}
	var last net.Conn
	for i := range 40 {
		last = dial("127.0.0.3")
		if i > 3 {
			continue
		}
		if got := ask(last); !strings.Contains(got, "here") {
			t.Fatalf("connection %d: %q", i, got)
		}
	}
	for name, c := range map[string]net.Conn{"quiet": quiet, "last": last, "new": dial("127.0.0.4")} {
		if got := ask(c); !strings.Contains(got, "here") {
			t.Errorf("%s: %q", name, got)
		}
	}
}
