// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

const pubWait = time.Minute // for what comes soon

// startPub returns a listening Pub, and each change of a subscription as "+prefix" or "-prefix".
func startPub(t *testing.T, endpoint string, o PubOptions) (*Pub, string, chan string) {
	t.Helper()
	changes := make(chan string, 4096)
	o.Log = quietLog
	o.OnSubscribe = func(_ *Peer, prefix []byte, on bool) {
		sign := "-"
		if on {
			sign = "+"
		}
		changes <- sign + string(prefix)
	}
	p := NewPub(o)
	t.Cleanup(func() { _ = p.Close() })
	addr, err := p.Listen(t.Context(), endpoint)
	if err != nil {
		t.Fatal(err)
	}
	if addr.Network() == "tcp" {
		endpoint = "tcp://" + addr.String()
	}
	return p, endpoint, changes
}

// startSub returns a Sub and what it gets, frames joined by "|".
func startSub(t *testing.T, endpoint string, prefixes ...string) (*Sub, chan string) {
	t.Helper()
	in := make(chan string, 4096)
	s := NewSub(endpoint, DealerOptions{Handler: func(m Message) { in <- string(bytes.Join(m, []byte("|"))) }})
	t.Cleanup(func() { _ = s.Close() })
	for _, p := range prefixes {
		if err := s.Subscribe(p); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	return s, in
}

func next[T any](t *testing.T, c chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(pubWait):
		t.Fatal("it never came")
	}
	return v
}

func wantNext(t *testing.T, c chan string, want ...string) {
	t.Helper()
	for _, w := range want {
		if got := next(t, c); got != w {
			t.Fatalf("got %.80q, want %.80q", got, w)
		}
	}
}

func publish(p *Pub, frames ...string) int {
	var m [][]byte
	for _, f := range frames {
		m = append(m, []byte(f))
	}
	return p.Publish(m...)
}

// With Hold, messages published for a peer since the begin of a subscription arrive after its Release, except those before DropHeld.
func TestHeldMessagesComeWithTheRelease(t *testing.T) {
	changes := make(chan string, 16)
	var p *Pub
	p = NewPub(PubOptions{Hold: true, Log: quietLog, OnSubscribe: func(peer *Peer, prefix []byte, _ bool) {
		switch string(prefix) {
		case "drop":
			p.DropHeld(peer)
		case "release", "release again":
			if !p.Release(peer) {
				t.Error("some was lost")
			}
		}
		changes <- string(prefix)
	}})
	t.Cleanup(func() { _ = p.Close() })
	addr, err := p.Listen(t.Context(), "tcp://127.0.0.1:*")
	if err != nil {
		t.Fatal(err)
	}
	s, in := startSub(t, "tcp://"+addr.String(), "kv")
	wantNext(t, changes, "kv")
	subscribe := func(prefix string) {
		t.Helper()
		if err := s.Subscribe(prefix); err != nil {
			t.Fatal(err)
		}
		wantNext(t, changes, prefix)
	}
	publish(p, "kv", "dropped")
	subscribe("drop")
	publish(p, "kv", "held")
	subscribe("release")
	publish(p, "kv", "after")
	wantNext(t, in, "kv|held", "kv|after")
	subscribe("more") // holds again
	publish(p, "kv", "held again")
	subscribe("release again")
	wantNext(t, in, "kv|held again")
}

// Two subscribers each get what they subscribed to, in order, and nothing else.
func TestPubSendsToWhoSubscribed(t *testing.T) {
	p, endpoint, changes := startPub(t, "tcp://127.0.0.1:*", PubOptions{})
	a, inA := startSub(t, endpoint, "kv@a")
	wantNext(t, changes, "+kv@a")
	_, inAll := startSub(t, endpoint, "")
	wantNext(t, changes, "+")
	for _, topic := range []string{"kv@a@model", "kv@b@model", "kv@", "kv@a"} {
		publish(p, topic, "x", "")
	}
	wantNext(t, inA, "kv@a@model|x|", "kv@a|x|")
	wantNext(t, inAll, "kv@a@model|x|", "kv@b@model|x|", "kv@|x|", "kv@a|x|")

	if err := a.Subscribe("kv@b"); err != nil {
		t.Fatal(err)
	}
	_ = a.Subscribe("kv@b") // a second time changes nothing
	a.Unsubscribe("kv@a")
	a.Unsubscribe("other")
	wantNext(t, changes, "+kv@b", "-kv@a")
	if n := publish(p, "kv@a", "1"); n != 1 {
		t.Errorf("%d took it", n)
	}
	if n := publish(p, "kv@b", "2"); n != 2 {
		t.Errorf("%d took it", n)
	}
	wantNext(t, inA, "kv@b|2")
	wantNext(t, inAll, "kv@a|1", "kv@b|2")
	if p.Subscribers() != 2 || p.Dropped() != 0 {
		t.Errorf("%d subscribers, %d dropped", p.Subscribers(), p.Dropped())
	}
}

// A Sub sends its subscriptions again when the publisher was restarted.
func TestSubAsksEachLifeOfThePublisher(t *testing.T) {
	endpoint := "ipc://" + filepath.Join(t.TempDir(), "s")
	first, _, changes := startPub(t, endpoint, PubOptions{})
	_, in := startSub(t, endpoint, "a", "b")
	wantNext(t, changes, "+a", "+b")
	publish(first, "a", "1")
	wantNext(t, in, "a|1")
	_ = first.Close()
	second, _, changes := startPub(t, endpoint, PubOptions{})
	wantNext(t, changes, "+a", "+b")
	publish(second, "b", "2")
	wantNext(t, in, "b|2")
}

// subscriber is a SUB at the level of bytes.
func subscriber(t *testing.T, endpoint string) *client {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(endpoint, "tcp://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(pubWait))
	c := &client{t: t, Conn: conn}
	c.send(appendReady(appendGreeting(nil), typeSub, nil))
	want := appendReady(appendGreeting(nil), typePub, nil)
	got := make([]byte, len(want))
	if _, err := io.ReadFull(conn, got); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("hello of the PUB: %v, %x", err, got)
	}
	return c
}

// Subscriptions come as messages from peers of ZMTP 3.0 and as commands from those of
// 3.1. A Pub ignores messages that are neither.
func TestPubAcceptsMessagesAndCommands(t *testing.T) {
	p, endpoint, changes := startPub(t, "tcp://127.0.0.1:*", PubOptions{})
	c := subscriber(t, endpoint)
	c.send(frames("\x01old"))
	c.send([]byte("\x04\x0d\x09SUBSCRIBEnew"))
	c.send(frames("\x01old"))           // again
	c.send(frames("\x02for an XPUB"))   // not for a PUB
	c.send(frames(""))                  //
	c.send(frames("\x01two", "frames")) //
	c.send([]byte("\x04\x0a\x06CANCELold"))
	c.send([]byte("\x04\x0a\x06CANCELold"))
	c.send(frames("\x00new"))
	c.send(frames("\x01last"))
	wantNext(t, changes, "+old", "+new", "-old", "-new", "+last")
	if n := publish(p, "new", "1") + publish(p, "old", "2") + publish(p, "last", "3"); n != 1 {
		t.Errorf("%d were sent", n)
	}
	for i, want := range []string{"last", "3"} {
		flags, body, err := 0, make([]byte, 2+len(want)), error(nil)
		if _, err = io.ReadFull(c.Conn, body); err != nil || string(body[2:]) != want || int(body[0]) != 1-i {
			t.Errorf("%d %q %v", flags, body, err)
		}
	}
}

func TestSubscriptionBytes(t *testing.T) {
	f := func(minor byte, on bool, want string) {
		t.Helper()
		if got := string(appendSubscription(nil, minor, "kv@", on)); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	f(0, true, "\x00\x04\x01kv@")
	f(0, false, "\x00\x04\x00kv@")
	f(1, true, "\x04\x0d\x09SUBSCRIBEkv@")
	f(1, false, "\x04\x0a\x06CANCELkv@")
}

// A subscriber that never reads loses messages and is closed in the end. Its queue is
// bounded, and another subscriber gets every message meanwhile.
func TestPubBoundsSubscriberThatNeverReads(t *testing.T) {
	const queue, size = 64 << 10, 16 << 10
	p, endpoint, changes := startPub(t, "tcp://127.0.0.1:*", PubOptions{SendQueueBytes: queue, WriteTimeout: 2 * time.Second})
	subscriber(t, endpoint).send(frames("\x01"))
	wantNext(t, changes, "+")
	_, in := startSub(t, endpoint, "")
	wantNext(t, changes, "+")
	testkit.Eventually(t, "no handler runs: while one does, a queue may be twice as long", func() bool {
		for _, peer := range p.r.peers(nil) {
			peer.mu.Lock()
			corked := peer.mu.corked
			peer.mu.Unlock()
			if corked {
				return false
			}
		}
		return true
	})
	body := strings.Repeat("b", size)
	// Publish on: otherwise the kernel may take all that is queued, and no subscriber is slow.
	for i, end := 0, time.Now().Add(pubWait); p.Dropped() == 0 || p.Stats().Closed["slow"] == 0; i++ {
		if time.Now().After(end) {
			t.Fatalf("%d dropped: %+v", p.Dropped(), p.Stats())
		}
		publish(p, fmt.Sprint(i), body)
		wantNext(t, in, fmt.Sprint(i)+"|"+body) // one at a time, so that this one never has a queue
		for _, peer := range p.r.peers(nil) {
			if n := peer.queued.Load(); n > queue+2*size {
				t.Fatalf("%d bytes are queued", n)
			}
		}
	}
	if n := publish(p, "after", "x"); n != 1 {
		t.Errorf("%d took it", n)
	}
	wantNext(t, in, "after|x")
}

// The number of subscriptions of a subscriber is bounded. Closing one that has too many does not affect the others.
func TestPubBoundsSubscriptions(t *testing.T) {
	p, endpoint, changes := startPub(t, "tcp://127.0.0.1:*", PubOptions{MaxSubscriptions: 2, MaxPrefixBytes: 10})
	_, in := startSub(t, endpoint, "a", "b")
	wantNext(t, changes, "+a", "+b")
	many, long := subscriber(t, endpoint), subscriber(t, endpoint)
	for i := range 3 {
		many.send(frames("\x01" + fmt.Sprint(i)))
	}
	long.send(frames("\x01eleven byte"))
	for _, c := range []*client{many, long} {
		if _, err := io.Copy(io.Discard, c.Conn); err != nil && Reason(err) != "eof" {
			t.Error(err)
		}
	}
	for end := time.Now().Add(pubWait); p.Stats().Closed["too_large"] < 2; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%+v", p.Stats())
		}
	}
	publish(p, "b", "1")
	wantNext(t, in, "b|1")
}

// A closed Pub keeps nothing of its subscribers.
func TestPubForgetsWhoLeft(t *testing.T) {
	p, endpoint, changes := startPub(t, "tcp://127.0.0.1:*", PubOptions{})
	a, _ := startSub(t, endpoint, "a")
	_, inB := startSub(t, endpoint, "b")
	for range 2 {
		next(t, changes)
	}
	_ = a.Close()
	for end := time.Now().Add(pubWait); p.Subscribers() > 1; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it is still there")
		}
	}
	publish(p, "b", "1")
	wantNext(t, inB, "b|1")
	_ = p.Close()
	if n := publish(p, "b", "2"); n != 0 || p.Subscribers() != 0 {
		t.Errorf("%d took it, %d subscribers", n, p.Subscribers())
	}
}

func TestPubPyzmq(t *testing.T) {
	for _, kind := range []string{"SUB", "XSUB"} {
		t.Run(kind, func(t *testing.T) {
			p, endpoint, changes := startPub(t, "tcp://127.0.0.1:*", PubOptions{})
			child := startPython(t, "subscribes", endpoint, kind)
			wantNext(t, changes, "+a", "+b")
			big := strings.Repeat("x", 1<<20)
			for _, m := range [][]string{{"a1", ""}, {"c", "not wanted"}, {"b", big}, {"end of a"}} {
				publish(p, m...)
			}
			publish(p, "a end")
			wantNext(t, changes, "-a")
			publish(p, "a too late")
			publish(p, "b end")
			child.end()
		})
	}
}

func TestSubPyzmq(t *testing.T) {
	for _, kind := range []string{"PUB", "XPUB"} {
		t.Run(kind, func(t *testing.T) {
			child := startPython(t, "publishes", "tcp://127.0.0.1:*", kind)
			s, in := startSub(t, child.line(), "a", "b")
			for next(t, in) != "a|ready" { // it repeats this until it comes
			}
			_, _ = child.stdin.Write([]byte("go\n"))
			for got := "a|ready"; got != "b|"+strings.Repeat("x", 1<<20); got = next(t, in) {
				if got != "a|ready" {
					t.Fatalf("%.80q", got)
				}
			}
			wantNext(t, in, "a||last")
			s.Unsubscribe("a")
			child.end()
		})
	}
}
