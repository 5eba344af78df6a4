// SPDX-License-Identifier: Apache-2.0

package events

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/event"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// lateRouter is a consumer without a replay socket that allows no gap: each connection begins
// with AllBlocksCleared, and each message has the number after the one before.
type lateRouter struct {
	t    *testing.T
	sub  *zmtp.Sub
	live chan wire // a zero wire for each new connection
	next uint64
	new  bool // the connection: nothing came yet
	has  map[string]bool

	epoch uint64 // of the server's life
}

func newLateRouter(t *testing.T, n *publishing, prefix string) *lateRouter {
	t.Helper()
	return newLateRouterAs(t, n, prefix, nil)
}

// newLateRouterAs is newLateRouter for a client that proves who it is.
func newLateRouterAs(t *testing.T, n *publishing, prefix string, as *zmtp.PlainClient) *lateRouter {
	t.Helper()
	r := &lateRouter{t: t, live: make(chan wire, 1<<16), has: map[string]bool{}}
	r.sub = zmtp.NewSub(n.endpoint("events"), zmtp.DealerOptions{
		Plain:   as,
		Handler: func(m zmtp.Message) { r.live <- received(m) },
		OnState: func(up bool, _ error) {
			if up {
				r.live <- wire{}
			}
		},
	})
	_ = r.sub.Subscribe(prefix)
	if err := r.sub.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.close)
	return r
}

func (r *lateRouter) close() { _ = r.sub.Close() }

func (r *lateRouter) read() {
	r.t.Helper()
	w := next(r.t, r.live)
	if w.payload == nil {
		r.new = true
		return
	}
	batch, err := event.Decode(w.payload)
	if err != nil {
		r.t.Fatal(err)
	}
	if w.sequence > 1<<62 {
		r.t.Fatalf("message %d: less than 0", int64(w.sequence))
	}
	if r.new {
		if len(batch.Events) != 1 || batch.Events[0].Kind != event.Cleared {
			r.t.Fatalf("a connection begins with %+v", batch.Events)
		}
	} else if w.sequence != r.next {
		r.t.Fatalf("message %d comes after %d", w.sequence, r.next-1)
	}
	r.new, r.next, r.epoch = false, w.sequence+1, batch.Epoch
	for _, e := range batch.Events {
		if e.Kind == event.Cleared {
			maps.DeleteFunc(r.has, func(k string, _ bool) bool { return k[:len(w.topic)] == w.topic })
		}
		for _, h := range e.Hashes {
			k := w.topic + "|" + string(h) + e.Medium
			if r.has[k] == (e.Kind == event.Stored) {
				r.t.Fatalf("message %d: %v of %x, which was so before", w.sequence, e.Kind, h)
			}
			if r.has[k] = true; e.Kind == event.Removed {
				delete(r.has, k)
			}
		}
	}
}

func (r *lateRouter) until(n *publishing, prompts []prompt) {
	r.t.Helper()
	want := map[string]bool{}
	for k := range n.truth(prompts) {
		h := kv.SaltedHash(k.salt, k.hash)
		want["kv@node@"+k.model+"|"+string(h[:])+mediumNames[k.medium]] = true
	}
	for end := time.Now().Add(routerWait); r.epoch != n.p.epoch || !maps.Equal(r.has, want); r.read() {
		if time.Now().After(end) {
			r.t.Fatalf("the router has %d chunks, the store %d; %+v, %+v", len(r.has), len(want), n.p.Stats(), n.book.Stats())
		}
	}
}

// Subscribers that come at any time, while chunks come and go and over restarts of the server, know
// exactly what the store has, without a replay socket and without a gap.
func TestLateSubscribersGetABeginning(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	for round, po := range []PublisherOptions{{}, {BatchEvents: 1, Interval: time.Millisecond}, {BatchEvents: 1, QueueBytes: 600}} {
		rnd := rand.New(rand.NewPCG(seed, uint64(round)))
		n := newPublishing(t, 40, Options{}, po)
		prompts := randomPrompts(rnd)
		var all []*lateRouter
		all = append(all, newLateRouter(t, n, "kv@node@"), newLateRouter(t, n, ""))
		for step := range 30 {
			n.storeAll(prompts[rnd.IntN(len(prompts))])
			switch rnd.IntN(8) {
			case 0:
				n.store.Clear(false)
			case 1, 2:
				all = append(all, newLateRouter(t, n, "kv@node@"))
			}
			if step%10 == 9 {
				n.anotherLife(prompts)
				n.p.IntroduceModel("m0") // the workers of both models register again
				n.p.IntroduceModel("m1")
			}
		}
		for _, p := range prompts {
			n.lookup(p)
		}
		for _, r := range all {
			r.until(n, prompts)
			r.close()
		}
		if got := n.p.Stats(); got.Beginnings < 2 {
			t.Errorf("%+v", got)
		}
	}
}

// A beginning that has more messages than were published has numbers from 0 on, and empty messages for all take the numbers that are
// missing. The test takes numbers back: a Publisher that has published all has at least as many messages.
func TestBeginningLongerThanWhatWasPublished(t *testing.T) {
	n := newPublishing(t, 64, Options{}, PublisherOptions{Heartbeat: time.Hour})
	var prompts []prompt
	for _, model := range []string{"a", "b", "c", "d"} {
		p := prompt{model: model, world: 1, tokens: []uint32{1, 2, 3, 4}}
		prompts = append(prompts, p)
		n.storeAll(p)
	}
	early := newLateRouter(t, n, "kv@node@")
	early.until(n, prompts)
	n.p.mu.Lock()
	n.p.mu.next = 1
	n.p.mu.Unlock()
	late := newLateRouter(t, n, "kv@node@") // which fails where a number is below 0
	late.until(n, prompts)
	if late.next != 8 { // AllBlocksCleared and the chunks of each model
		t.Errorf("after the beginning the next message is %d", late.next)
	}
	empty := 0
	for empty < 7 { // 1 to 7
		w := next(t, early.live)
		batch, err := event.Decode(w.payload)
		if err != nil || len(batch.Events) > 0 || w.sequence != uint64(empty+1) {
			t.Fatalf("message %d: %+v, %v", w.sequence, batch, err)
		}
		empty++
	}
	more := prompt{model: "a", world: 1, tokens: []uint32{9, 9, 9, 9}}
	n.storeAll(more)
	late.until(n, append(prompts, more)) // without a gap
}

// A subscriber of one model gets the beginning of that model, also where it has nothing, and
// of a second subscription only what the first one does not cover.
func TestBeginningOfOneTopic(t *testing.T) {
	n := newPublishing(t, 64, Options{}, PublisherOptions{Heartbeat: time.Hour})
	a := prompt{model: "a", world: 1, tokens: []uint32{1, 2, 3, 4}}
	b := prompt{model: "b", world: 1, tokens: []uint32{5, 6, 7, 8}}
	whole := newLateRouter(t, n, "kv@node@")
	n.storeAll(a)
	n.storeAll(b)
	whole.until(n, []prompt{a, b})
	f := func(prefix string, want ...string) *lateRouter {
		t.Helper()
		r := newLateRouter(t, n, prefix)
		for i := 0; i < len(want); {
			w := next(t, r.live)
			if w.payload == nil {
				continue
			}
			batch, err := event.Decode(w.payload)
			if err != nil {
				t.Fatal(err)
			}
			if got := fmt.Sprint(w.topic, " ", len(batch.Events), " ", batch.Events[0].Kind == event.Cleared); got != want[i] {
				t.Errorf("%s: message %d is %s, want %s", prefix, i, got, want[i])
			}
			i++
		}
		return r
	}
	f("kv@node@c", "kv@node@c 1 true")
	r := f("kv@node@a", "kv@node@a 1 true", "kv@node@a 1 false")
	if err := r.sub.Subscribe("kv@node@"); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"kv@node@b", "kv@node@b"} {
		if w := next(t, r.live); w.topic != want {
			t.Errorf("after the second subscription: %s, want %s", w.topic, want)
		}
	}
	r.close()
}

// Where all places for subscribers are taken, one of the address that has most gives way.
func TestSubscribersOfOneAddressGiveWay(t *testing.T) {
	p := NewPublisher(newNode(t, 4, Options{}).book, PublisherOptions{MaxSubscribers: 4})
	t.Cleanup(func() { _ = p.Close() })
	at, replay, err := p.Listen(t.Context(), "tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
	if err != nil {
		t.Fatal(err)
	}
	for _, at := range []string{at, replay} {
		for range 8 {
			_ = dialFrom(t, "127.0.0.2", at)
		}
		honest := dialFrom(t, "127.0.0.3", at)
		if b := make([]byte, 10); !readsGreeting(honest, b) {
			t.Errorf("%s: a subscriber of another address is refused", at)
		}
	}
}

func dialFrom(t *testing.T, from, to string) net.Conn {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	c, err := d.DialContext(t.Context(), "tcp", to)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	// the first half of a greeting: the server answers with its own
	if _, err := c.Write(append(append([]byte{0xff}, make([]byte, 8)...), 0x7f, 3)); err != nil {
		return c
	}
	return c
}

// readsGreeting reports whether the server talks to the connection and keeps it.
func readsGreeting(c net.Conn, b []byte) bool {
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := io.ReadFull(c, b); err != nil {
		return false
	}
	_ = c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	for {
		if _, err := c.Read(b); err != nil {
			return errors.Is(err, os.ErrDeadlineExceeded)
		}
	}
}
