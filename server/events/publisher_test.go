// SPDX-License-Identifier: Apache-2.0

package events

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/event"
	"github.com/kvasir-kv/kvasir/zmtp"
)

const routerWait = 60 * time.Second // for what comes soon

// publishing is a node whose Book and Publisher run.
type publishing struct {
	*node
	p    *Publisher
	o    PublisherOptions
	dir  string
	stop func()
}

func newPublishing(t *testing.T, chunks int64, o Options, po PublisherOptions) *publishing {
	t.Helper()
	po.ChunkTokens, po.Topic = chunkTokens, "kv@node@"+ModelInTopic
	if po.Heartbeat == 0 {
		po.Heartbeat = 10 * time.Millisecond
	}
	n := &publishing{node: newNode(t, chunks, o), o: po, dir: t.TempDir()}
	n.run()
	t.Cleanup(func() { n.stop() })
	return n
}

func (n *publishing) run() {
	n.t.Helper()
	n.p = NewPublisher(n.book, n.o)
	if _, _, err := n.p.Listen(context.Background(), n.endpoint("events"), n.endpoint("replay")); err != nil {
		n.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{}, 2)
	go func() { n.book.Run(ctx); ended <- struct{}{} }()
	go func() { n.p.Run(ctx); ended <- struct{}{} }()
	n.stop = func() {
		cancel()
		<-ended
		<-ended
		if err := n.p.Close(); err != nil {
			n.t.Error(err)
		}
	}
}

func (n *publishing) endpoint(name string) string { return "ipc://" + filepath.Join(n.dir, name) }

// anotherLife restarts the node and its Publisher.
func (n *publishing) anotherLife(prompts []prompt) {
	n.stop()
	n.node.restart()
	n.book.catchUp()
	for _, p := range prompts {
		n.lookup(p)
	}
	n.run()
}

// wire is one message as a router receives it.
type wire struct {
	topic    string
	sequence uint64
	payload  []byte
}

func received(m zmtp.Message) wire {
	return wire{string(m[0]), binary.BigEndian.Uint64(m[1]), bytes.Clone(m[2])}
}

// router is a small consumer with llm-d's rules: it replays from 0 when it begins and when numbers
// begin anew, from the missing number after a gap, and accepts a replay only without a gap. What a
// replay cannot tell it asks a snapshot for.
type router struct {
	t         *testing.T
	sub       *zmtp.Sub
	dealer    *zmtp.Dealer
	live      chan wire
	replies   chan zmtp.Message
	up        chan struct{} // connections of the replay socket
	lossy     atomic.Bool   // messages get lost on the way
	asked     byte          // requests, counted
	expected  uint64
	epoch     uint64
	has       map[string]bool // topic and hash
	snapshots int
	replays   int
	empty     int // replays without an answer
}

func newRouter(t *testing.T, n *publishing) *router {
	t.Helper()
	return newRouterAs(t, n, nil)
}

// newRouterAs is newRouter for a client that proves who it is.
func newRouterAs(t *testing.T, n *publishing, as *zmtp.PlainClient) *router {
	t.Helper()
	r := &router{t: t, live: make(chan wire, 1<<16), replies: make(chan zmtp.Message, 1<<16), up: make(chan struct{}, 1<<10), has: map[string]bool{}}
	r.sub = zmtp.NewSub(n.endpoint("events"), zmtp.DealerOptions{Plain: as, Handler: func(m zmtp.Message) {
		if w := received(m); !r.lossy.Load() || w.sequence%3 != 0 {
			r.live <- w
		}
	}})
	_ = r.sub.Subscribe("kv@node@")
	r.dealer = zmtp.NewDealer(n.endpoint("replay"), zmtp.DealerOptions{Plain: as, NoWaiting: true, Handler: func(m zmtp.Message) {
		var own zmtp.Message
		for _, f := range m {
			own = append(own, bytes.Clone(f))
		}
		r.replies <- own
	}, OnState: func(up bool, _ error) {
		if up {
			r.up <- struct{}{}
		}
	}})
	for _, err := range []error{r.sub.Start(), r.dealer.Start()} {
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(r.close)
	// A beginning has the numbers before the next message. Asked for all before it came, the router would take its last messages
	// for those that it misses.
	next(t, r.live)
	next(t, r.up)
	r.begin()
	return r
}

func (r *router) close() {
	_ = r.sub.Close()
	_ = r.dealer.Close()
}

func next[T any](t *testing.T, c chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(routerWait):
		t.Fatal("it never came")
	}
	return v
}

// ask sends one request to the replay socket and returns its answers. It asks again when the
// connection was lost meanwhile; the delimiter, which comes back, tells whose answers these are.
func (r *router) ask(request []byte) (out []wire) {
	r.t.Helper()
	end := time.After(routerWait)
	for {
		r.asked++
		if r.dealer.Send([]byte{r.asked}, request) == nil {
			if out, ok := r.answers(end); ok {
				return out
			}
			continue
		}
		select {
		case <-r.up:
		case <-end:
			r.t.Fatal("no connection")
		}
	}
}

// answers returns what comes until the end of a replay; ok is false when there is another connection.
func (r *router) answers(end <-chan time.Time) (out []wire, ok bool) {
	r.t.Helper()
	for {
		var m zmtp.Message
		select {
		case m = <-r.replies:
		case <-r.up:
			return nil, false
		case <-end:
			r.t.Fatal("no answer")
		}
		if len(m) != 4 || len(m[0]) != 1 {
			r.t.Fatalf("answer %q", m)
		}
		if m[0][0] != r.asked { // of a request that was given up
			continue
		}
		if bytes.Equal(m[2], endFrame) {
			if len(m[1])+len(m[3]) > 0 {
				r.t.Fatalf("end %q", m)
			}
			return out, true
		}
		out = append(out, received(m[1:]))
	}
}

// begin forgets everything and asks for all from number 0.
func (r *router) begin() {
	r.t.Helper()
	r.expected = 0
	clear(r.has)
	r.replay(0)
}

func (r *router) replay(from uint64) {
	r.t.Helper()
	r.replays++
	answers := r.ask(sequenceFrame(from))
	if len(answers) == 0 {
		r.empty++
		r.snapshot()
		return
	}
	for i, w := range answers {
		if w.sequence != from+uint64(i) {
			r.t.Fatalf("a replay from %d has %d as number %d", from, w.sequence, i)
		}
		if from > 0 && r.decode(w).Epoch != r.epoch { // of another life: the first live message of that begins it
			return
		}
		r.apply(w)
		r.expected = w.sequence + 1
	}
}

func (r *router) decode(w wire) event.Batch {
	r.t.Helper()
	batch, err := event.Decode(w.payload)
	if err != nil {
		r.t.Fatal(err)
	}
	return batch
}

// snapshot replaces what the router knows. It stands before the first number that it tells.
func (r *router) snapshot() {
	r.t.Helper()
	r.snapshots++
	clear(r.has)
	for _, w := range r.ask([]byte(snapshotRequest)) {
		r.apply(w)
		r.expected = w.sequence
	}
}

// read takes one message.
func (r *router) read() {
	r.t.Helper()
	w := next(r.t, r.live)
	batch := r.decode(w)
	switch {
	case batch.Epoch < r.epoch: // an earlier life's, that waited in the socket
	case batch.Epoch != r.epoch:
		r.begin()
	case w.sequence > r.expected:
		r.replay(r.expected)
	case w.sequence == r.expected:
		r.apply(w)
		r.expected++
	}
}

func (r *router) apply(w wire) {
	r.t.Helper()
	batch := r.decode(w)
	r.epoch = batch.Epoch
	for _, e := range batch.Events {
		if e.Kind == event.Cleared {
			maps.DeleteFunc(r.has, func(k string, _ bool) bool { return k[:len(w.topic)] == w.topic })
			continue
		}
		for _, h := range e.Hashes {
			k := w.topic + "|" + string(h) + e.Medium
			if r.has[k] == (e.Kind == event.Stored) {
				r.t.Fatalf("message %d: %v of %x, which was so before", w.sequence, e.Kind, h)
			}
			if r.has[k] = true; e.Kind == event.Removed {
				delete(r.has, k)
			} else if len(e.Tokens) != chunkTokens || e.BlockTokens != chunkTokens || e.Medium != event.CPU && e.Medium != event.Storage {
				r.t.Fatalf("%+v", e)
			}
		}
	}
}

// until reads until the router knows exactly what the store has.
func (r *router) until(n *publishing, prompts []prompt) {
	r.t.Helper()
	want := map[string]bool{}
	for k := range n.truth(prompts) {
		h := kv.SaltedHash(k.salt, k.hash)
		want["kv@node@"+k.model+"|"+string(h[:])+mediumNames[k.medium]] = true
	}
	for end := time.Now().Add(routerWait); !maps.Equal(r.has, want); r.read() {
		if time.Now().After(end) {
			all, _ := n.book.Everything()
			r.t.Fatalf("the router has %d chunks, the book %d, the store %d; %+v, %+v", len(r.has), len(all), len(want), n.p.Stats(), n.book.Stats())
		}
	}
}

func randomPrompts(rnd *rand.Rand) (prompts []prompt) {
	for range 12 {
		p := prompt{model: fmt.Sprint("m", rnd.IntN(2)), salt: []string{"", "a", "b"}[rnd.IntN(3)], world: 1 + rnd.IntN(2)}
		for range chunkTokens * (1 + rnd.IntN(6)) {
			p.tokens = append(p.tokens, uint32(rnd.IntN(2))*70000)
		}
		prompts = append(prompts, p)
	}
	return prompts
}

// Over gaps, replays, snapshots, and restarts of either side, what routers know becomes
// exactly what the store has.
func TestRoutersSeeWhatTheStoreHas(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	for round, po := range []PublisherOptions{{}, {Replay: 5, BatchEvents: 3}, {ReplayBytes: 2000, Encoding: event.Encoding{Arrays: true}}} {
		rnd := rand.New(rand.NewPCG(seed, uint64(round)))
		n := newPublishing(t, 40, Options{StoreEvents: 64, Records: 64}, po)
		prompts := randomPrompts(rnd)
		one, two := newRouter(t, n), newRouter(t, n)
		for step := range 40 {
			p := prompts[rnd.IntN(len(prompts))]
			switch rnd.IntN(12) {
			case 0:
				n.store.Clear(false)
			case 1:
				if step%10 == 0 {
					n.anotherLife(prompts)
				}
			case 2:
				two.close()
				two = newRouter(t, n)
			default:
				n.storeAll(p)
			}
			one.lossy.Store(rnd.IntN(2) == 0)
			if rnd.IntN(3) > 0 {
				continue
			}
			for _, p := range prompts {
				n.lookup(p)
			}
			one.lossy.Store(false)
			one.until(n, prompts)
			two.until(n, prompts)
		}
		for _, p := range prompts {
			n.lookup(p)
		}
		one.lossy.Store(false)
		one.until(n, prompts)
		two.until(n, prompts)
		one.close()
		two.close()
	}
}

// A replay from a number that is not kept any more is the end alone; from 0 it is whole all the same,
// and a snapshot always is.
func TestReplayOfDroppedRecordsIsTheEndMarker(t *testing.T) {
	n := newPublishing(t, 64, Options{}, PublisherOptions{Replay: 4})
	rnd := rand.New(rand.NewPCG(1, 1))
	prompts := randomPrompts(rnd)
	early := newRouter(t, n)
	for _, p := range prompts {
		n.storeAll(p)
		early.until(n, prompts) // so that there is more than one message
	}
	for early.expected < 30 {
		early.read()
	}
	if got := early.ask(sequenceFrame(1)); len(got) != 0 {
		t.Errorf("%d answers from 1", len(got))
	}
	if got := early.ask(sequenceFrame(1 << 40)); len(got) != 0 {
		t.Errorf("%d answers from what was never published", len(got))
	}
	if got := early.ask(bytes.Repeat([]byte{1}, 100)); len(got) != 0 {
		t.Errorf("%d answers from a very long number", len(got))
	}
	late := newRouter(t, n) // it has asked once
	if late.replays != 1 || late.snapshots != 0 || late.empty != 0 {
		t.Errorf("%d replays, %d snapshots", late.replays, late.snapshots)
	}
	late.until(n, prompts)
	late.snapshot()
	late.until(n, prompts)
	for end := time.Now().Add(routerWait); ; { // the newest message, which heartbeats soon push out
		late.snapshot()
		newest := late.expected - 1
		got := late.ask(sequenceFrame(newest))
		if len(got) > 0 && got[0].sequence == newest {
			break
		}
		if len(got) > 0 || time.Now().After(end) {
			t.Fatalf("%d answers from %d", len(got), newest)
		}
	}
}

// What vLLM's readers are shown: salts in the extra keys of the first block, hashes that no other
// salt shares, parents, and the tokens.
func TestEventsOfASaltedPrompt(t *testing.T) {
	n := newPublishing(t, 64, Options{}, PublisherOptions{})
	tokens := []uint32{1, 2, 3, 4, 5, 6, 7, 70000}
	plain, salted := prompt{model: "m", world: 1, tokens: tokens}, prompt{model: "m", salt: "tenant", world: 1, tokens: tokens}
	r := newRouter(t, n)
	n.storeAll(plain)
	n.storeAll(salted)
	r.until(n, []prompt{plain, salted})
	var events []event.Event
	for _, w := range r.ask(nil) { // from 0
		batch, err := event.Decode(w.payload)
		if err != nil || w.topic != "kv@node@m" && len(batch.Events) > 0 && batch.Events[0].Kind != event.Cleared {
			t.Fatal(err, w.topic)
		}
		events = append(events, batch.Events...)
	}
	bySalt := map[string][]event.Event{}
	hashes := plain.hashes()
	for i := range 2 {
		for _, salt := range []string{"", "tenant"} {
			h := kv.SaltedHash(salt, hashes[i])
			for _, e := range events {
				if len(e.Hashes) == 1 && bytes.Equal(e.Hashes[0], h[:]) {
					bySalt[salt] = append(bySalt[salt], e)
				}
			}
		}
	}
	if len(bySalt[""]) != 2 || len(bySalt["tenant"]) != 2 {
		t.Fatalf("%+v", events)
	}
	for salt, list := range bySalt {
		if list[0].Salt != salt || list[1].Salt != "" || list[0].Parent != nil || !bytes.Equal(list[1].Parent, list[0].Hashes[0]) {
			t.Errorf("%q: %+v", salt, list)
		}
		if !slices.Equal(list[0].Tokens, []int64{1, 2, 3, 4}) || !slices.Equal(list[1].Tokens, []int64{5, 6, 7, 70000}) {
			t.Errorf("%q: %+v", salt, list)
		}
	}
}

// What comes shortly after a message shares the next one: a store costs no message for each subscriber.
func TestMessagesKeepTheirDistance(t *testing.T) {
	const interval = 100 * time.Millisecond
	n := newPublishing(t, 256, Options{}, PublisherOptions{Interval: interval, Heartbeat: time.Hour})
	r := newRouter(t, n)
	defer r.close()
	before, began := n.p.Stats().Messages, time.Now()
	prompts := make([]prompt, 64)
	for i := range prompts {
		prompts[i] = prompt{model: "m", world: 1, tokens: slices.Repeat([]uint32{uint32(i)}, 2*chunkTokens)}
		n.storeAll(prompts[i])
	}
	r.until(n, prompts)
	if got, most := n.p.Stats().Messages-before, uint64(time.Since(began)/interval)+3; got > most {
		t.Errorf("%d messages, want %d at most", got, most)
	}
}
