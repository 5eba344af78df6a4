// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/store/storetest"
)

// A connection that was in use when another one broke also leads to the former master. Later calls must not use it,
// because they would fail.
func TestConnectionOfAFormerMasterIsNotKept(t *testing.T) {
	master := storetest.New(t)
	m := masterOf(t, MasterOptions{Addresses: []string{master.Addr}, CallTimeout: time.Minute})
	defer m.Close()
	var pings atomic.Int64
	asked, goOn := make(chan bool), make(chan bool)
	master.Set(func() {
		master.Before = func(method string) {
			if method == "Ping" && pings.Add(1) == 1 {
				asked <- true
				<-goOn
			}
		}
		master.Answered = func(method string, b []byte) []byte {
			if method == "Remove" {
				return nil
			}
			return b
		}
	})
	done := make(chan error)
	go func() { _, err := m.Ping(t.Context(), NewUUID()); done <- err }()
	<-asked
	if err := m.Remove(t.Context(), "a", false); err == nil {
		t.Fatal("an answer")
	}
	close(goOn)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	master.Forget() // all its connections end
	if _, err := m.Ping(t.Context(), NewUUID()); err != nil {
		t.Error(err)
	}
}

// A call whose context has ended before does not reach the master, and costs no connection.
func TestEndedCallsAreNotMade(t *testing.T) {
	master := storetest.New(t)
	m := masterOf(t, MasterOptions{Addresses: []string{master.Addr}, CallTimeout: time.Minute})
	defer m.Close()
	if _, err := m.Ping(t.Context(), NewUUID()); err != nil {
		t.Fatal(err)
	}
	var came atomic.Int64
	master.Set(func() { master.Before = func(string) { came.Add(1) } })
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 20 {
		if err := m.Remove(ctx, "a", true); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	}
	if _, err := m.Ping(t.Context(), NewUUID()); err != nil {
		t.Fatal(err)
	}
	if n := came.Load(); n != 1 {
		t.Errorf("the master was asked %d times", n)
	}
}

// timedConn is a connection that answers all calls at once, and notes its deadline.
type timedConn struct {
	net.Conn
	seq   byte
	until time.Time
	cut   chan bool // not nil: an answer waits until the deadline of an ended context is set
}

func (c *timedConn) SetDeadline(at time.Time) error {
	c.until = at
	if c.cut != nil && at.Before(time.Now().Add(-time.Hour)) {
		close(c.cut)
	}
	return nil
}

func (c *timedConn) Read(b []byte) (int, error) {
	if c.cut != nil {
		<-c.cut
		c.cut = nil
	}
	clear(b)
	b[0], b[4] = magic, c.seq
	return responseHeader, nil
}

func (c *timedConn) Write(b []byte) (int, error) {
	c.seq = b[4]
	return len(b), nil
}

// Whatever the calls before were, the deadline of a call is in the last eighth of its own time.
func TestDeadlineOfEachCall(t *testing.T) {
	s := &timedConn{}
	c := &conn{c: s}
	call := func(ctx context.Context, timeout time.Duration) {
		t.Helper()
		c.begin(serviceReady, codecs[V0_3_13].forms[serviceReady], 0)
		begin := time.Now()
		if _, err := c.call(ctx, serviceReady, timeout); err != nil {
			t.Fatal(err)
		}
		ended := s.until.Before(begin.Add(-time.Hour)) && ctx.Err() != nil
		if !ended && (s.until.Before(begin.Add(timeout-timeout/8)) || s.until.After(time.Now().Add(timeout))) {
			t.Errorf("a call of %v ends after %v", timeout, s.until.Sub(begin))
		}
	}
	for _, timeout := range []time.Duration{time.Minute, time.Minute, time.Hour, time.Hour, time.Minute, 50 * time.Minute, time.Hour} {
		call(t.Context(), timeout)
	}
	for range 3 {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		s.cut = make(chan bool)
		call(ctx, time.Hour) // its answer came nevertheless
		call(t.Context(), time.Hour)
	}
}

// A caller that waited too long for a connection makes no call. The rest of its time would be too short, and a call that times out
// costs the other callers their connections and the known release.
func TestWaitForAConnectionTakesNothingOfTheCall(t *testing.T) {
	master := storetest.New(t)
	m := masterOf(t, MasterOptions{Addresses: []string{master.Addr}, CallTimeout: time.Minute, DialTimeout: 20 * time.Millisecond, MaxConns: 1})
	defer m.Close()
	if _, err := m.Ping(t.Context(), NewUUID()); err != nil {
		t.Fatal(err)
	}
	c, _, err := m.acquire(t.Context(), time.Now().Add(time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	var came atomic.Int64
	master.Set(func() {
		master.Before = func(string) { came.Add(1) }
	})
	done := make(chan error)
	go func() { _, err := m.Ping(t.Context(), NewUUID()); done <- err }()
	select {
	case err = <-done:
	case <-time.After(30 * time.Second): // wrong: it still waits, in the time for the call
		m.release(c, keep)
		err = <-done
		c = nil
	}
	if _, unsent := errors.AsType[*unsentError](err); !unsent || came.Load() != 0 {
		t.Error(err, came.Load())
	}
	if c != nil {
		m.release(c, keep)
	}
	if _, err := m.Ping(t.Context(), NewUUID()); err != nil {
		t.Error(err)
	}
}
