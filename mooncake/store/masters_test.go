// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/store/storetest"
)

// peer accepts connections and sends each of them text, then nothing more.
func peer(t *testing.T, text string) (addr string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { c.Close() })
			if text != "" {
				_, _ = c.Write([]byte(text))
			}
		}
	}()
	return l.Addr().String()
}

// A Master skips addresses that accept connections and then send nothing, or send another protocol, like
// addresses that refuse connections. It uses only a master that answers.
func TestMastersThatDoNotAnswerArePassedOver(t *testing.T) {
	master := storetest.New(t)
	m := masterOf(t, MasterOptions{
		Addresses:   []string{peer(t, ""), peer(t, "HTTP/1.1 400 Bad Request\r\n\r\n"), master.Addr},
		DialTimeout: 4 * time.Second, CallTimeout: 60 * time.Second,
	})
	defer m.Close()
	if _, err := m.Ping(t.Context(), NewUUID()); err != nil {
		t.Fatal(err)
	}
}

// CallTimeout bounds a call whole: what it takes to find out the master's release is a part of it.
func TestCallTimeoutCoversTheProbe(t *testing.T) {
	master := storetest.New(t)
	master.Before = func(string) { time.Sleep(900 * time.Millisecond) } // three questions: 2.7 s
	m := masterOf(t, MasterOptions{Addresses: []string{master.Addr}, DialTimeout: time.Second, CallTimeout: time.Second})
	defer m.Close()
	if _, err := m.Ping(t.Context(), NewUUID()); err == nil {
		t.Fatal("the call outlived its time")
	}
}

// A caller that gives up costs the others neither their connections nor a new look at the master.
func TestCallerThatGivesUpCostsNoOther(t *testing.T) {
	master := storetest.New(t)
	var probes, pings atomic.Int64
	ctx, cancel := context.WithCancel(t.Context())
	first, gaveUp := make(chan bool), make(chan bool)
	master.Set(func() {
		master.Before = func(method string) {
			switch {
			case method == "PutStart":
				probes.Add(1)
			case method == "Ping" && pings.Add(1) == 1:
				first <- true
				<-first
			case method == "BatchExistKey":
				cancel()
				<-gaveUp
			}
		}
	})
	m := masterOf(t, MasterOptions{Addresses: []string{master.Addr}, CallTimeout: 30 * time.Second})
	defer m.Close()
	done := make(chan error)
	go func() { _, err := m.Ping(t.Context(), NewUUID()); done <- err }()
	<-first
	if _, err := m.Ping(t.Context(), NewUUID()); err != nil { // a second connection, which is idle afterwards
		t.Fatal(err)
	}
	first <- true
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	err := m.Exists(ctx, []string{"a"}, make([]bool, 1))
	close(gaveUp)
	if !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if _, err := m.Ping(t.Context(), NewUUID()); err != nil {
		t.Fatal(err)
	}
	if n := probes.Load(); n != 1 {
		t.Errorf("the release was asked for %d times", n)
	}
}

// slowConn is a connection on which a context ends while the answer comes.
type slowConn struct {
	net.Conn
	cancel  func()
	begun   chan bool // the deadline of the ended context is about to be set
	settled atomic.Bool
}

func (c *slowConn) SetDeadline(at time.Time) error {
	if at.Before(time.Now().Add(-time.Hour)) {
		close(c.begun)
		time.Sleep(100 * time.Millisecond)
		c.settled.Store(true)
	}
	return nil
}

func (c *slowConn) Read(b []byte) (int, error) {
	c.cancel()
	<-c.begun
	clear(b)
	b[0], b[4] = magic, 1 // an answer without a body
	return responseHeader, nil
}

func (c *slowConn) Write(b []byte) (int, error) { return len(b), nil }

// A context that ends as its answer comes does not cut the next call on that connection short.
func TestEndedContextTouchesNoLaterCall(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	s := &slowConn{cancel: cancel, begun: make(chan bool)}
	c := &conn{c: s}
	c.begin(serviceReady, codecs[V0_3_13].forms[serviceReady], 0)
	_, _ = c.call(ctx, serviceReady, time.Minute)
	if !s.settled.Load() {
		t.Error("the call returned, and its context still sets the connection's deadline")
	}
}

// A connection does not keep the memory of one large answer while it is idle.
func TestIdleConnectionHoldsLittle(t *testing.T) {
	master := storetest.New(t)
	m := masterOf(t, MasterOptions{Addresses: []string{master.Addr}, CallTimeout: time.Minute})
	defer m.Close()
	keys := make([]string, 4096)
	for i := range keys {
		keys[i] = strings.Repeat("k", 1000)
	}
	if err := m.Exists(t.Context(), keys, make([]bool, len(keys))); err != nil {
		t.Fatal(err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range m.mu.idle {
		if n := cap(c.body) + cap(c.w.B); n > 2*maxHeld {
			t.Errorf("%d bytes", n)
		}
	}
	if len(m.mu.idle) != 1 {
		t.Error(len(m.mu.idle))
	}
}
