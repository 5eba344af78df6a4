// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"bytes"
	"context"
	"errors"
	"syscall"
	"testing"
	"time"
)

func startReq(t *testing.T, endpoint string) *Req {
	t.Helper()
	r := NewReq(endpoint, DealerOptions{})
	if err := r.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

func askReq(t *testing.T, r *Req) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	for i, size := range []int{0, 1, 255, 256, 160 << 10, 1 << 20} {
		body := bytes.Repeat([]byte{byte(i + 1)}, size)
		got, err := r.Do(ctx, []byte("q"), body)
		if err != nil || len(got) != 2 || string(got[0]) != "q" || !bytes.Equal(got[1], body) {
			t.Fatalf("%d bytes: %d frames, %v", size, len(got), err)
		}
	}
}

func TestReqPyzmq(t *testing.T) {
	for _, kind := range []string{"REP", "ROUTER"} {
		t.Run(kind, func(t *testing.T) {
			p := startPython(t, "bound", "tcp://127.0.0.1:*", kind)
			askReq(t, startReq(t, p.line()))
			p.end()
		})
	}
}

func TestReq(t *testing.T) {
	router := NewRouter(func(p *Peer, m Message) {
		switch {
		case len(m) == 3:
			_ = p.Send(m...)
		case len(m) == 2 && string(m[1]) == "odd":
			_ = p.Send([]byte("no empty frame"))
		case len(m) == 2 && string(m[1]) == "twice":
			_ = p.Send(nil, []byte("1"))
			_ = p.Send(nil, []byte("2"))
		case len(m) == 2 && string(m[1]) == "bye":
			p.Close()
		}
	}, RouterOptions{})
	addr, err := router.Listen(t.Context(), "tcp://127.0.0.1:*")
	if err != nil {
		t.Fatal(err)
	}
	defer router.Close()
	endpoint := "tcp://" + addr.String()
	r, second := NewReq(endpoint, DealerOptions{}), make(chan struct{})
	deliver := r.d.role.deliver
	r.d.role.deliver = func(p *Peer, m Message) {
		deliver(p, m)
		if len(m) == 2 && string(m[1]) == "2" {
			close(second)
		}
	}
	if err := r.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	askReq(t, r)

	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	if m, err := r.Do(ctx, []byte("twice")); err != nil || len(m) != 1 || string(m[0]) != "1" {
		t.Fatal(m, err)
	}
	select { // as with libzmq, a request that is sent before a surplus answer arrives takes that for its own
	case <-second:
	case <-ctx.Done():
		t.Fatal("the second answer does not come")
	}
	if m, err := r.Do(ctx, []byte("a"), []byte("b")); err != nil || len(m) != 2 || string(m[0]) != "a" { // not the second answer
		t.Fatalf("%q %v", m, err)
	}
	if _, err := r.Do(ctx, []byte("odd")); !errors.Is(err, errProtocol) {
		t.Fatal(err)
	}
	if _, err := r.Do(ctx, []byte("a"), nil); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	if _, err := startReq(t, endpoint).Do(ctx, []byte("bye")); Reason(err) != "eof" {
		t.Fatal(err)
	}
	short, done := context.WithTimeout(ctx, 20*time.Millisecond)
	defer done()
	if _, err := startReq(t, endpoint).Do(short, []byte("no answer")); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	if _, err := startReq(t, "tcp://127.0.0.1:1").Do(ctx, []byte("x")); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Fatal(err)
	}
	c := startReq(t, endpoint)
	go func() { time.Sleep(10 * time.Millisecond); c.Close() }()
	if _, err := c.Do(ctx, []byte("no answer")); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
}
