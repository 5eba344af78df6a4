// SPDX-License-Identifier: Apache-2.0

package bootstrap

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/peercred"
)

// rawConn speaks HTTP/1.1 piece by piece.
type rawConn struct {
	net.Conn
	r *bufio.Reader
}

func dialRaw(t *testing.T, base string) *rawConn { return dialFrom(t, base, "127.0.0.1") }

// dialFrom connects from an address of this host.
func dialFrom(t *testing.T, base, from string) *rawConn {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	c, err := d.Dial("tcp", strings.TrimPrefix(base, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(60 * time.Second)) // a hang fails
	return &rawConn{c, bufio.NewReader(c)}
}

// answer reads one answer.
func (c *rawConn) answer() (status int, body string, _ error) {
	resp, err := http.ReadResponse(c.r, nil)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

func wantAnswer(t *testing.T, c *rawConn, request string, status int, body string) {
	t.Helper()
	if _, err := io.WriteString(c, request); err != nil {
		t.Fatal(err)
	}
	if got, text, err := c.answer(); err != nil || got != status || text != body {
		t.Fatalf("%q: %d %.300s %v, want %d %.300s", request, got, text, err, status, body)
	}
}

const plain = "GET /query HTTP/1.1\r\nHost: x\r\n\r\n"

func mustRegisterDirect(t *testing.T, r *Registry, in Registration, from peercred.Origin) {
	t.Helper()
	if err := r.register(t.Context(), in, from); err != nil {
		t.Fatal(err)
	}
}

// A request that comes within the idle time has its whole answer also after the end of it,
// however long the client takes to read it.
func TestLateRequestGetsWholeAnswer(t *testing.T) {
	r := open(t, Options{})
	r.idleTimeout = 4 * time.Second
	for dp := range 3000 {
		mustRegisterDirect(t, r, Registration{EngineID: strings.Repeat("e", 1000), DPRank: dp, Addr: strings.Repeat("a", 1000)}, local)
	}
	base := serve(t, r)
	for try := 1; ; try++ {
		begin := time.Now()
		c := dialRaw(t, base)
		wantAnswer(t, c, "GET /healthz HTTP/1.1\r\nHost: a.example\r\n\r\n", 200, `{"status":"ok"}`)
		time.Sleep(r.idleTimeout / 2)
		_, err := io.WriteString(c, plain)
		time.Sleep(r.idleTimeout) // the socket's buffers are full long before the end
		late := time.Since(begin) - r.idleTimeout*3/2
		status, text, answer := c.answer()
		if err = errors.Join(err, answer); err == nil && status == 200 && len(text) >= 5<<20 {
			return
		}
		if late < time.Second || try == 5 || errors.Is(err, os.ErrDeadlineExceeded) { // on a busy machine the request may come after the idle time
			t.Fatalf("%v late: %d, %d bytes, %v", late, status, len(text), err)
		}
	}
}

// A client that sends requests one after the other without a pause is served as long
// as each of them comes whole in time.
func TestPipeliningClientIsNotCut(t *testing.T) {
	r := open(t, Options{})
	r.readTimeout = time.Second
	base := serve(t, r)
	half := len(plain) / 2
	pipeline := func() (pause time.Duration, _ error) {
		begin := time.Now()
		last := begin
		c := dialRaw(t, base)
		defer c.Close()
		_, err := io.WriteString(c, plain[:half])
		for err == nil && time.Since(begin) < 3*r.readTimeout {
			_, err = io.WriteString(c, plain[half:]+plain[:half]) // the next one has always begun
			status, body, answer := c.answer()
			now := time.Now()
			pause, last = max(pause, now.Sub(last)), now
			if err = errors.Join(err, answer); err == nil && (status != 200 || body != "{}") {
				t.Fatalf("%d %.300s", status, body)
			}
			time.Sleep(r.readTimeout / 20)
		}
		return pause, err
	}
	for try := 1; ; try++ {
		pause, err := pipeline()
		if err == nil {
			return
		}
		if pause < r.readTimeout/2 || try == 5 || errors.Is(err, os.ErrDeadlineExceeded) { // on a busy machine the rest of the request may come too late
			t.Fatalf("with pauses of at most %v: %v", pause, err)
		}
	}
}

// The server ends connections that send nothing, stop in the middle of a request, or do not read.
func TestSilentConnectionsEnd(t *testing.T) {
	r := open(t, Options{})
	r.readTimeout, r.idleTimeout = 50*time.Millisecond, 100*time.Millisecond
	base := serve(t, r)
	for _, start := range []string{"", "GET /qu", plain + "GET", "POST /register HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{"} {
		c := dialRaw(t, base)
		if _, err := io.WriteString(c, start); err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("%q: still open", start)
		}
	}
}

// A request may wait longer than one may take to be read.
func TestWaitOutlivesReadTimeout(t *testing.T) {
	r := open(t, Options{})
	r.readTimeout = time.Second
	c := dialRaw(t, serve(t, r))
	go func() {
		for r.waiters.Taken() == 0 {
			time.Sleep(time.Millisecond)
		}
		time.Sleep(2 * r.readTimeout)
		if err := r.register(context.Background(), Registration{EngineID: "e", Addr: "a"}, local); err != nil {
			t.Error(err)
		}
	}()
	wantAnswer(t, c, "GET /query?wait=30 HTTP/1.1\r\nHost: x\r\n\r\n", 200, `{"0":{"engine_id":"e","worker_addr":{"0":{"0":"a"}}}}`)
}

// When one address has opened all the connections that the server takes, the server closes connections of
// that address. Others keep theirs and get new ones.
func TestConnectionsOfOneAddress(t *testing.T) {
	r := open(t, Options{MaxConns: 8})
	base := serve(t, r)
	quiet := dialFrom(t, base, "127.0.0.2")
	wantAnswer(t, quiet, plain, 200, `{}`)
	for range 40 {
		dialFrom(t, base, "127.0.0.3")
	}
	wantAnswer(t, quiet, plain, 200, `{}`)
	wantAnswer(t, dialFrom(t, base, "127.0.0.4"), plain, 200, `{}`)
}

// The end: connections that are idle or have said nothing close at once, requests
// that wait are answered.
func TestServeStops(t *testing.T) {
	for range 20 {
		r := open(t, Options{})
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- r.Serve(ctx, l) }()
		base := "http://" + l.Addr().String()
		idle, silent, waiting := dialRaw(t, base), dialRaw(t, base), dialRaw(t, base)
		wantAnswer(t, idle, plain, 200, `{}`)
		answer := make(chan string, 1)
		go func() {
			_, _ = io.WriteString(waiting, "GET /query?wait=60 HTTP/1.1\r\nHost: x\r\n\r\n") // the read below fails where this fails
			status, text, err := waiting.answer()
			if status != 503 || err != nil {
				t.Error(status, err)
			}
			answer <- text
		}()
		for r.waiters.Taken() == 0 {
			time.Sleep(time.Millisecond)
		}
		begin := time.Now()
		cancel()
		if got := <-answer; !strings.Contains(got, "no engine is shown") {
			t.Error(got)
		}
		if err := <-done; err != nil || time.Since(begin) > drainTimeout*9/10 {
			t.Error(err, time.Since(begin))
		}
		for _, c := range []*rawConn{idle, silent} {
			if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error(err)
			}
		}
		if _, err := net.Dial("tcp", l.Addr().String()); err == nil {
			t.Error("still listening")
		}
	}
}
