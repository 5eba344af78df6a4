// SPDX-License-Identifier: Apache-2.0

package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// fake runs a handler as the server.
func fake(t *testing.T, h http.HandlerFunc) string {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s.URL
}

func newClient(t *testing.T, base string, o ClientOptions) *Client {
	t.Helper()
	if o.RegisterWait == 0 {
		o.RegisterWait = time.Millisecond
	}
	if o.QueryWait == 0 {
		o.QueryWait = time.Millisecond
	}
	c, err := NewClient(base, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func TestClientAgainstRegistry(t *testing.T) {
	r := open(t, Options{Token: "secret", Guard: GuardAll})
	c := newClient(t, serve(t, r)+"/", ClientOptions{Token: "secret"})
	in := Registration{EngineID: "e", DPRank: 1, TPRank: 2, PPRank: 3, Addr: "tcp://h:1"}
	for range 2 {
		if err := c.Register(t.Context(), in); err != nil {
			t.Fatal(err)
		}
	}
	in.Addr = "ipc://x"
	err := c.Register(t.Context(), in)
	se, ok := errors.AsType[*statusError](err)
	if !ok || se.status != 400 || se.detail != "Worker with dp_rank=1, tp_rank=2, pp_rank=3 is already registered at tcp://h:1, but still want to register at ipc://x" {
		t.Fatal(err)
	}
	want := Directory{1: {"e", map[int]map[int]string{2: {3: "tcp://h:1"}}}}
	if d, err := c.Query(t.Context()); err != nil || !reflect.DeepEqual(d, want) {
		t.Fatal(d, err)
	}
	if ok, err := c.Unregister(t.Context(), "e", 1, -1, -1); !ok || err != nil {
		t.Fatal(ok, err)
	}
	if ok, err := c.Unregister(t.Context(), "e", 1, -1, -1); ok || err != nil {
		t.Fatal(ok, err)
	}
}

// The client repeats some failed requests and not others.
func TestRetries(t *testing.T) {
	register := func(c *Client) error { return c.Register(t.Context(), Registration{EngineID: "e"}) }
	query := func(c *Client) error { _, err := c.Query(t.Context()); return err }
	f := func(name string, h http.HandlerFunc, call func(*Client) error, want int32, check func(error) bool) {
		t.Helper()
		limit := time.Minute
		if strings.HasSuffix(name, "timeout") {
			limit = 100 * time.Millisecond
		}
		var n atomic.Int32
		c := newClient(t, fake(t, func(w http.ResponseWriter, r *http.Request) {
			n.Add(1)
			_, _ = io.Copy(io.Discard, r.Body) // or the end of the request is not noticed
			h(w, r)
		}), ClientOptions{Timeout: limit})
		err := call(c)
		if limit < time.Minute { // on a busy machine some requests may not arrive in time
			if n.Load() > want || !check(err) || !strings.Contains(err.Error(), fmt.Sprint("attempt ", want)) {
				t.Errorf("%s: %d requests, want %d at most, error %v", name, n.Load(), want, err)
			}
			return
		}
		testkit.Eventually(t, "the requests arrive", func() bool { return n.Load() >= want })
		if n.Load() != want || !check(err) {
			t.Errorf("%s: %d requests, want %d, error %v", name, n.Load(), want, err)
		}
	}
	unreachable := func(err error) bool { return errors.Is(err, errUnreachable) }
	status := func(err error) bool { _, ok := errors.AsType[*statusError](err); return ok && !unreachable(err) }
	noDirectory := func(err error) bool { return errors.Is(err, errDirectory) }
	hang := func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	cut := func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }
	say := func(code int, body string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code); _, _ = w.Write([]byte(body)) }
	}
	f("register, timeout", hang, register, 3, unreachable)
	f("register, connection cut", cut, register, 1, unreachable)
	f("register, 500", say(500, "Internal Server Error"), register, 1, status)
	f("query, timeout", hang, query, 3, unreachable)
	f("query, connection cut", cut, query, 3, unreachable)
	f("query, 404", say(404, `{"detail":"Not Found"}`), query, 1, status)
	f("query, redirect", say(307, ""), query, 1, status)
	for _, body := range []string{"", "x", "null", "[]", `{"0":{}}`, `{"x":{"engine_id":"e","worker_addr":{}}}`, `{"00":{"engine_id":"e","worker_addr":{}}}`, `{"0":{"engine_id":"e","worker_addr":{"0":{"0":5}}}}`, `{"0":{"engine_id":"e","worker_addr":{"0":{"-0":"a"}}}}`} {
		f("query, "+body, say(200, body), query, 1, noDirectory)
	}
	f("query, endless", func(w http.ResponseWriter, r *http.Request) {
		chunk := []byte(strings.Repeat(" ", 1<<16))
		for r.Context().Err() == nil {
			if _, err := w.Write(chunk); err != nil {
				return
			}
		}
	}, query, 1, noDirectory)

	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	c := newClient(t, "http://"+l.Addr().String(), ClientOptions{})
	if err := register(c); !unreachable(err) || !strings.Contains(err.Error(), "attempt 3") {
		t.Error(err)
	}
}

func TestNewClientRefuses(t *testing.T) {
	for _, base := range []string{"", "127.0.0.1:8998", "ftp://x:1", "http://", "http://h:1/?x=1", "http://h:1/#f", "http://\x7f"} {
		if _, err := NewClient(base, ClientOptions{}); err == nil {
			t.Errorf("%q is accepted", base)
		}
	}
}

// Overlapping queries are one request; a caller that leaves does not end it for
// the others, and when all have left it ends.
func TestQueryShared(t *testing.T) {
	var n atomic.Int32
	arrived, release, gone := make(chan struct{}, 10), make(chan struct{}), make(chan struct{}, 10)
	c := newClient(t, fake(t, func(w http.ResponseWriter, r *http.Request) {
		n.Add(1)
		arrived <- struct{}{}
		select {
		case <-release:
			_, _ = w.Write([]byte(`{}`))
		case <-r.Context().Done():
			gone <- struct{}{}
		}
	}), ClientOptions{})
	ctx, cancel := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() { _, err := c.Query(ctx); left <- err }()
	<-arrived
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			if _, err := c.Query(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	for joined := 0; joined != 51; { // all have joined
		c.mu.Lock()
		joined = c.mu.flight.waiter
		c.mu.Unlock()
	}
	cancel()
	if err := <-left; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	close(release)
	wg.Wait()
	if n.Load() != 1 {
		t.Fatalf("%d requests", n.Load())
	}
	release = make(chan struct{})
	ctx, cancel = context.WithCancel(t.Context())
	go func() { _, err := c.Query(ctx); left <- err }()
	<-arrived
	cancel()
	<-left
	<-gone
	go func() { _, err := c.Query(t.Context()); left <- err }()
	<-arrived
	c.Close()
	if err := <-left; !errors.Is(err, errClosed) {
		t.Fatal(err)
	}
	if _, err := c.Query(t.Context()); !errors.Is(err, errClosed) {
		t.Fatal(err)
	}
}
