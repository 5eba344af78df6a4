package bootstrap

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"
)

func dialTest(t *testing.T, base string) *conn {
	t.Helper()
	c, err := dial(strings.TrimPrefix(base, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(30 * time.Second)) // a hang fails
	return c
}

func wantAnswer(t *testing.T, c *conn, request string, status int, body string) {
	t.Helper()
	if got, text, err := c.do([]byte(request)); err != nil || got != status || string(text) != body {
		t.Fatalf("%q: %d %s %v, want %d %s", request, got, text, err, status, body)
	}
}

const plain = "GET /query HTTP/1.1\r\nHost: x\r\n\r\n"

// One connection: queries in pieces and several at once, then everything else
// through net/http, which goes on with queries too.
func TestFront(t *testing.T) {
	r := open(t, Options{})
	base := serve(t, r)
	c := dialTest(t, base)
	wantAnswer(t, c, plain, 200, `{}`)
	if err := r.Register(t.Context(), Registration{EngineID: "e", Addr: "a"}, false); err != nil {
		t.Fatal(err)
	}
	one := `{"0":{"engine_id":"e","worker_addr":{"0":{"0":"a"}}}}`
	for i := 1; i < len(plain); i++ {
		if _, err := c.Write([]byte(plain[:i])); err != nil {
			t.Fatal(err)
		}
		wantAnswer(t, c, plain[i:], 200, one)
	}
	wantAnswer(t, c, strings.Repeat(plain, 200), 200, one) // more than the buffer holds
	for range 199 {
		wantAnswer(t, c, "", 200, one)
	}
	// A query and the start of something else in one piece, split at each place.
	second := "GET /query?tp=1 HTTP/1.1\r\nHost: x\r\n\r\n"
	for i := range len(second) {
		c := dialTest(t, base)
		wantAnswer(t, c, plain+second[:i], 200, one)
		wantAnswer(t, c, second[i:], 200, one)
		wantAnswer(t, c, plain, 200, one)
	}
	wantAnswer(t, c, "GET /nope HTTP/1.1\r\nHost: x\r\n\r\n", 404, `{"detail":"Not Found"}`)
	wantAnswer(t, c, plain, 200, one)
	f := func(request string, status int) {
		t.Helper()
		c := dialTest(t, base)
		if got, text, err := c.do([]byte(request)); err != nil || got != status {
			t.Errorf("%.200q: %d %s %v, want %d", request, got, text, err, status)
		}
	}
	f("GET /query HTTP/1.1\r\n\r\n", 400) // no Host
	f("GET /query HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400)
	f("GET /query HTTP/1.0\r\n\r\n", 200)
	f("GET /query HTTP/1.1\r\nHost: x\r\nX: "+strings.Repeat("y", 5000)+"\r\n\r\n", 200)
	f("GET /query HTTP/1.1\r\nHost: x\r\nX: "+strings.Repeat("y", 50000)+"\r\n\r\n", 431)
	f("\x16\x03\x01\r\n\r\n", 400)
	c = dialTest(t, base)
	wantAnswer(t, c, "GET /query HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 200, one)
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
}

// The front's headers say what net/http's do.
func TestFrontHeaders(t *testing.T) {
	r := open(t, Options{})
	base := serve(t, r)
	get := func(path string) http.Header {
		t.Helper()
		c := &http.Client{Transport: &http.Transport{DisableKeepAlives: path != "/query"}}
		defer c.CloseIdleConnections()
		resp, err := c.Get(base + path)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if _, err := http.ParseTime(resp.Header.Get("Date")); err != nil {
			t.Fatal(resp.Header, err)
		}
		resp.Header.Del("Date")
		resp.Header.Del("Connection")
		return resp.Header
	}
	fast, slow := get("/query"), get("/query?x=1")
	for name := range slow {
		if fast.Get(name) != slow.Get(name) {
			t.Errorf("%s: %q, net/http has %q", name, fast.Get(name), slow.Get(name))
		}
	}
	if len(fast) != len(slow) || fast.Get(GenerationHeader) == "" {
		t.Error(fast, slow)
	}
}

// Connections that say nothing, or stop in the middle, or do not read, end.
func TestFrontTimeouts(t *testing.T) {
	r := open(t, Options{})
	r.readTimeout, r.idleTimeout = 50*time.Millisecond, 100*time.Millisecond
	base := serve(t, r)
	for _, start := range []string{"", "GET /qu", plain + "GET", "POST /register HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{"} {
		c := dialTest(t, base)
		if _, err := c.Write([]byte(start)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("%q: still open", start)
		}
	}
	if err := r.Register(t.Context(), Registration{EngineID: strings.Repeat("e", 1000), Addr: strings.Repeat("a", 1000)}, false); err != nil {
		t.Fatal(err)
	}
	c := dialTest(t, base)
	var err error
	for err == nil { // asks and never reads, until the server gives up
		_, err = c.Write([]byte(strings.Repeat(plain, 100)))
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal("still open")
	}
}

// A request may wait longer than one may take to be read.
func TestWaitOutlivesReadTimeout(t *testing.T) {
	r := open(t, Options{})
	r.readTimeout = 20 * time.Millisecond
	c := dialTest(t, serve(t, r))
	go func() {
		for r.waiters.Load() == 0 {
			time.Sleep(time.Millisecond)
		}
		time.Sleep(10 * r.readTimeout)
		if err := r.Register(context.Background(), Registration{EngineID: "e", Addr: "a"}, false); err != nil {
			t.Error(err)
		}
	}()
	wantAnswer(t, c, "GET /query?wait=30 HTTP/1.1\r\nHost: x\r\n\r\n", 200, `{"0":{"engine_id":"e","worker_addr":{"0":{"0":"a"}}}}`)
}

func TestFrontConnLimit(t *testing.T) {
	r := open(t, Options{MaxConns: 2})
	base := serve(t, r)
	a, b := dialTest(t, base), dialTest(t, base)
	wantAnswer(t, a, plain, 200, `{}`)
	wantAnswer(t, b, plain, 200, `{}`)
	if _, _, err := dialTest(t, base).do([]byte(plain)); err == nil {
		t.Fatal("a third connection is served")
	}
	a.Close()
	for { // its place is free as soon as the server has noticed
		if status, _, err := dialTest(t, base).do([]byte(plain)); err == nil && status == 200 {
			break
		}
	}
	if r.n.connsRefused.Load() == 0 {
		t.Fatal("not counted")
	}
}

// The end: idle connections close, requests that wait are answered, also those
// whose connection net/http has.
func TestServeStops(t *testing.T) {
	r := open(t, Options{})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Serve(ctx, l) }()
	base := "http://" + l.Addr().String()
	idle, waiting, old := dialTest(t, base), dialTest(t, base), dialTest(t, base)
	wantAnswer(t, idle, plain, 200, `{}`)
	wantAnswer(t, old, "GET /query?x=1 HTTP/1.1\r\nHost: x\r\n\r\n", 200, `{}`)
	answer := make(chan string, 1)
	go func() {
		status, text, err := waiting.do([]byte("GET /query?wait=60 HTTP/1.1\r\nHost: x\r\n\r\n"))
		if status != 503 || err != nil {
			t.Error(status, err)
		}
		answer <- string(text)
	}()
	for r.waiters.Load() == 0 {
		time.Sleep(time.Millisecond)
	}
	cancel()
	if got := <-answer; !strings.Contains(got, "no engine is shown") {
		t.Error(got)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	for _, c := range []*conn{idle, old} {
		if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error(err)
		}
	}
	if _, err := net.Dial("tcp", l.Addr().String()); err == nil {
		t.Error("still listening")
	}
}
