// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
)

// takeOver takes a request's connection from its server.
func takeOver(t *testing.T, w http.ResponseWriter, r *http.Request) net.Conn {
	_, _ = io.Copy(io.Discard, r.Body)
	c, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		t.Error(err)
	}
	return c
}

// hasEnded reports whether the other side has closed a connection, without waiting.
func hasEnded(t *testing.T, c net.Conn) (ended bool) {
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Error(err)
		return false
	}
	if err := raw.Control(func(fd uintptr) {
		n, _, err := unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
		ended = err == nil && n == 0 || errors.Is(err, unix.ECONNRESET)
	}); err != nil {
		t.Error(err)
	}
	return ended
}

// When a client leaves, the proxy closes D's connection before P's. A P whose request ends alone does not notify D, which then keeps the
// prompt's memory for its whole waiting timeout.
func TestSGLangLeavesDFirst(t *testing.T) {
	for _, stream := range []bool{false, true} {
		conns := make(chan net.Conn, 1)
		var pEnded sync.WaitGroup
		pEnded.Add(1)
		arrived := make(chan struct{}, 2)
		url, s := startMockedPair(t, oneRankSGLang, proxy.Options{}, func(w http.ResponseWriter, r *http.Request) {
			defer pEnded.Done()
			c := takeOver(t, w, r)
			defer c.Close()
			d := <-conns
			defer d.Close()
			arrived <- struct{}{}
			if n, err := c.Read(make([]byte, 1)); n > 0 || err == nil {
				t.Errorf("P got more of the request: %v", err)
			}
			if !hasEnded(t, d) {
				t.Errorf("stream %v: P's leg has ended, D's has not", stream)
			}
		}, func(w http.ResponseWriter, r *http.Request) {
			c := takeOver(t, w, r)
			if stream {
				fmt.Fprint(c, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
			}
			conns <- c
		})
		ctx, cancel := context.WithCancel(t.Context())
		var client sync.WaitGroup
		client.Go(func() {
			r, _ := http.NewRequestWithContext(ctx, http.MethodPost, url+"/generate", strings.NewReader(fmt.Sprintf(`{"text":"x","stream":%v}`, stream)))
			if resp, err := http.DefaultClient.Do(r); err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
		})
		<-arrived
		cancel()
		client.Wait()
		pEnded.Wait()
		testkit.Eventually(t, "no place is taken", func() bool { return s.Taken() == "" })
	}
}

// D answers while P's leg goes on: the client has D's answer at once, and P's place is free for the next request.
func TestSGLangAnswersBeforePEnds(t *testing.T) {
	release := make(chan struct{})
	url, s := startMockedPair(t, oneRankSGLang, proxy.Options{}, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		select {
		case <-release:
		case <-r.Context().Done():
		}
		fmt.Fprint(w, `{}`)
	}, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		fmt.Fprint(w, `{"text":"a","meta_info":{"prompt_tokens":1,"completion_tokens":1}}`)
	})
	for range 2 {
		if status, answer := askSGLang(t, url, "/generate", `{"text":"x"}`); status != 200 || !strings.Contains(answer, `"text":"a"`) {
			t.Errorf("%d %s", status, answer)
		}
		testkit.Eventually(t, "no place is taken", func() bool { return s.Taken() == "" })
	}
	close(release)
}
