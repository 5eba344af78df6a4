// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/server/events"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/zmtp"
)

const streamWait = 30 * time.Second // for what comes soon

// startStreaming is a node that serves event streams, of chunks of 16 tokens.
func startStreaming(t *testing.T, dir string, chunks int, o events.Options) (n *node, stop func()) {
	t.Helper()
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: int64(chunks) * 4096, Dir: dir, ChunkTokens: 16})
	if err != nil {
		t.Fatal(err)
	}
	n = &node{store: store.New(p, store.Options{TrustUnsummed: true}), dir: dir, log: new(logBuffer), url: "ipc://" + filepath.Join(dir, "socket")}
	n.Server = server.New(n.store, server.Options{ChunkTokens: 16, Events: events.New(n.store, o)})
	if _, err := n.Listen(t.Context(), n.url); err != nil {
		t.Fatal(err)
	}
	return n, run(t, n.Server, n.store)
}

// run has a server work in the background until the end.
func run(t *testing.T, s *server.Server, st *store.Store) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.Run(ctx)
	}()
	return func() {
		cancel()
		<-ended
		if err := errors.Join(s.Close(), st.Close()); err != nil {
			t.Error(err)
		}
	}
}

// subscriber is a client's socket with event streams.
type subscriber struct {
	t       *testing.T
	dealer  *zmtp.Dealer
	replies chan [][]byte
	up      chan struct{}      // a value for each connection
	has     map[kv.Hash][]byte // tokens by hash, of the stream with uid 1
	life    uint64
	lost    int
}

func subscribe(t *testing.T, url string, instance int64, limit int) *subscriber {
	t.Helper()
	c := &subscriber{t: t, replies: make(chan [][]byte, 4096), up: make(chan struct{}, 100), has: map[kv.Hash][]byte{}}
	c.dealer = zmtp.NewDealer(url, zmtp.DealerOptions{Handler: func(m zmtp.Message) {
		var own [][]byte
		for _, f := range m {
			own = append(own, bytes.Clone(f))
		}
		c.replies <- own
	}, OnState: func(up bool, _ error) {
		if up {
			c.up <- struct{}{}
		}
	}})
	if err := c.dealer.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.dealer.Close() })
	c.connected()
	c.subscribe(1, instance, "m", 0, limit)
	return c
}

// connected waits for the next connection.
func (c *subscriber) connected() {
	c.t.Helper()
	select {
	case <-c.up:
	case <-time.After(streamWait):
		c.t.Fatal("no connection")
	}
}

func (c *subscriber) send(frames ...[]byte) {
	c.t.Helper()
	if err := c.dealer.Send(frames...); err != nil {
		c.t.Fatal(err)
	}
}

func (c *subscriber) subscribe(uid byte, instance int64, model string, cursor uint64, limit int) {
	c.t.Helper()
	c.send([]byte{uid}, lmcache.AppendOp(nil, lmcache.OpSubscribeKVEvents), lmcache.AppendInt(nil, instance),
		lmcache.AppendString(nil, model), lmcache.AppendInt(nil, int64(cursor)), lmcache.AppendInt(nil, int64(limit)))
}

func (c *subscriber) control(uid byte, what string) { c.send([]byte{uid}, nil, []byte(what)) }

func (c *subscriber) reply() [][]byte {
	c.t.Helper()
	select {
	case m := <-c.replies:
		return m
	case <-time.After(streamWait):
		c.t.Fatal("no reply")
		return nil
	}
}

// batch is the next batch, which is applied as LMCache's adapter does.
func (c *subscriber) batch() lmcache.KVEventBatch {
	c.t.Helper()
	m := c.reply()
	if len(m) != 3 {
		c.t.Fatalf("reply %x", m)
	}
	b, err := lmcache.DecodeKVEventBatch(m[2])
	if err != nil || !b.Enabled {
		c.t.Fatalf("%v %+v", err, b)
	}
	if b.Lost || c.life != b.Incarnation {
		clear(c.has)
	}
	if c.life = b.Incarnation; b.Lost {
		c.lost++
	}
	for _, e := range b.Events {
		for _, h := range e.Hashes {
			switch _, there := c.has[h]; {
			case e.Removed == !there:
				c.t.Fatalf("%x: removed %v though it is there: %v", h, e.Removed, there)
			case e.Removed:
				delete(c.has, h)
			default:
				c.has[h] = e.Tokens
			}
		}
	}
	return b
}

// until consumes batches until the subscriber has as many chunks as the store.
func (c *subscriber) until(n *node) {
	c.t.Helper()
	for {
		want := map[kv.Hash]bool{}
		keys, _, _ := n.store.Residents(0, nil)
		for _, k := range keys {
			want[k.Chunk] = true
		}
		has := map[kv.Hash]bool{}
		for h := range c.has {
			has[h] = true
		}
		if maps.Equal(has, want) {
			return
		}
		c.batch()
		c.control(1, lmcache.StreamAck)
	}
}

// storePrompt stores all chunks of a prompt through the engine-driven operations.
func storePrompt(t *testing.T, n *node, seed, chunks int) *lmcache.Key {
	t.Helper()
	k := promptKey(seed, chunks)
	if got := prepareStore(t, n.Server, 7, k); len(got.Slots) > 0 && !commitStore(n.Server, 7, k) {
		t.Fatal("not stored")
	}
	return k
}

// What the recorded client got from the reference it gets from us: the same chunks with
// the same hashes and tokens are stored, then removed.
func TestRecordedKVEvents(t *testing.T) {
	var rec testkit.Recording
	testkit.ReadVector(t, "lmcache-mp/kv_events_stream.json", &rec)
	t.Run("0.5.6", func(t *testing.T) { recordedKVEvents(t, &rec, 8192) })
	newer := recorded057(t, "kv_events_stream")
	t.Run("0.5.7", func(t *testing.T) { recordedKVEvents(t, &newer, 1536) })
}

func recordedKVEvents(t *testing.T, rec *testkit.Recording, layerBytes int64) {
	dir := t.TempDir()
	segmentsOf(t, rec, dir, layerBytes)
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: 1 << 20, Dir: dir, ChunkTokens: rec.Meta.ChunkTokens})
	if err != nil {
		t.Fatal(err)
	}
	st := store.New(p, store.Options{TrustUnsummed: true})
	s := server.New(st, server.Options{ChunkTokens: rec.Meta.ChunkTokens, ShmDir: dir, Events: events.New(st, events.Options{})})
	url := "ipc://" + filepath.Join(dir, "socket")
	if _, err := s.Listen(t.Context(), url); err != nil {
		t.Fatal(err)
	}
	defer run(t, s, st)()
	c := &subscriber{t: t, replies: make(chan [][]byte, 64), has: map[kv.Hash][]byte{}}
	c.dealer = zmtp.NewDealer(url, zmtp.DealerOptions{Handler: func(m zmtp.Message) {
		c.replies <- [][]byte{bytes.Clone(m[0]), bytes.Clone(m[1]), bytes.Clone(bytes.Join(m[2:], nil))}
	}})
	if err := c.dealer.Start(); err != nil {
		t.Fatal(err)
	}
	defer c.dealer.Close()

	isBatch := func(f [][]byte) bool { return len(f) == 3 && len(f[2]) > 0 && len(f[1]) > 1 }
	var want, got []lmcache.KVEventRecord
	for _, step := range rec.Steps {
		replies := 0
		for _, f := range step.Frames {
			if f.Direction == "client_to_server" {
				c.send(testkit.Frames(f.Hex)...)
				continue
			}
			replies++
			if frames := testkit.Frames(f.Hex); isBatch(frames) && step.Step != "subscribe_first_batch" {
				b, err := lmcache.DecodeKVEventBatch(frames[2])
				if err != nil {
					t.Fatal(err)
				}
				want = append(want, b.Events...)
			}
		}
		for range replies {
			m := c.reply()
			if !isBatch(m) {
				continue
			}
			b, err := lmcache.DecodeKVEventBatch(m[2])
			if err != nil || !b.Enabled || b.Lost || b.Incarnation == 0 {
				t.Fatalf("%s: %v %+v", step.Step, err, b)
			}
			got = append(got, b.Events...)
		}
	}
	normal := func(list []lmcache.KVEventRecord) (out []string) {
		for _, e := range list {
			hashes := slices.Clone(e.Hashes)
			slices.SortFunc(hashes, func(a, b kv.Hash) int { return bytes.Compare(a[:], b[:]) })
			out = append(out, fmt.Sprintf("removed %v %s %x after %x: %x", e.Removed, e.Model, hashes, e.Parent, e.Tokens))
		}
		slices.Sort(out)
		return out
	}
	removed := func(list []lmcache.KVEventRecord) (out []kv.Hash, rest []lmcache.KVEventRecord) {
		for _, e := range list {
			if e.Removed {
				out = append(out, e.Hashes...)
			} else {
				rest = append(rest, e)
			}
		}
		slices.SortFunc(out, func(a, b kv.Hash) int { return bytes.Compare(a[:], b[:]) })
		return out, rest
	}
	wantGone, wantStored := removed(want)
	gone, stored := removed(got)
	if !slices.Equal(gone, wantGone) || len(gone) == 0 {
		t.Errorf("removed %x, want %x", gone, wantGone)
	}
	if !slices.Equal(normal(stored), normal(wantStored)) || len(stored) == 0 {
		t.Errorf("stored\n%q, want\n%q", normal(stored), normal(wantStored))
	}
}

// Two subscribers see what is stored and what is evicted; one that came later has all that is
// there, and one that never acknowledges costs the others nothing.
func TestStreamsSendStoredAndRemoved(t *testing.T) {
	n, stop := startStreaming(t, t.TempDir(), 16, events.Options{})
	defer stop()
	register(t, n.Server, 7, smallLayout)
	first, deaf := subscribe(t, n.url, 1, 2), subscribe(t, n.url, 2, 1024)
	for _, c := range []*subscriber{first, deaf} {
		if b := c.batch(); len(b.Events) != 0 || b.Lost {
			t.Fatalf("%+v", b)
		}
	}
	first.control(1, lmcache.StreamAck)
	k := storePrompt(t, n, 1, 4)
	first.until(n)
	hashes := kv.ChunkHashes(k.Tokens, 16)
	for i, h := range hashes {
		if want := lmcache.AppendTokens(nil, k.Tokens[16*i:16*(i+1)]); !bytes.Equal(first.has[h], want) {
			t.Errorf("chunk %d has tokens %x, want %x", i, first.has[h], want)
		}
	}
	for seed := range 10 { // more than there is room for
		storePrompt(t, n, 2+seed, 3)
	}
	first.until(n)
	if len(first.has) != 16 {
		t.Errorf("%d chunks", len(first.has))
	}
	late := subscribe(t, n.url, 3, 5)
	late.until(n)
	_, _ = n.Clear(server.Clear{Tier: server.ClearL1})
	first.until(n)
	late.until(n)
	if len(deaf.replies) != 0 {
		t.Error("a batch came without an ack")
	}
	if got := experimental(t, n.Server); !slices.Equal(got, []string{lmcache.KVEventStream}) {
		t.Errorf("get_experimental: %q", got)
	}
}

func experimental(t *testing.T, s *server.Server) (out []string) {
	t.Helper()
	m := s.Answer([][]byte{{1}, lmcache.AppendOp(nil, lmcache.OpGetExperimental)})
	size, b, err := msgp.ReadArrayHeaderBytes(m[2])
	for range size {
		var name string
		name, b, err = msgp.ReadStringBytes(b)
		out = append(out, name)
	}
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// Where the records that a subscriber needs next are not kept any more, it is told so, and
// gets all that is there.
func TestLaggingStreamGetsASnapshot(t *testing.T) {
	n, stop := startStreaming(t, t.TempDir(), 64, events.Options{Records: 4})
	defer stop()
	register(t, n.Server, 7, smallLayout)
	c, other := subscribe(t, n.url, 1, 3), subscribe(t, n.url, 2, 3)
	c.batch()
	other.batch()
	for seed := range 10 { // no ack meanwhile
		storePrompt(t, n, seed, 3)
	}
	storePrompt(t, n, 100, 4)
	for _, c := range []*subscriber{c, other} {
		c.control(1, lmcache.StreamAck)
		c.until(n)
		if c.lost == 0 {
			t.Error("it was not told")
		}
	}
}

// After a restart the subscriber finds another life, and what the pool kept, once a
// prompt shows its tokens.
func TestStreamAfterRestart(t *testing.T) {
	dir := t.TempDir()
	n, stop := startStreaming(t, dir, 64, events.Options{})
	register(t, n.Server, 7, smallLayout)
	c := subscribe(t, n.url, 1, 100)
	c.batch()
	c.control(1, lmcache.StreamAck)
	k := storePrompt(t, n, 1, 4)
	storePrompt(t, n, 2, 2)
	c.until(n)
	life := c.life
	stop()
	n, stop = startStreaming(t, dir, 64, events.Options{})
	defer stop()
	c.connected()
	c.subscribe(1, 1, "m", 0, 100)
	for c.life == life { // what the first life sent last may stand before
		c.batch()
	}
	c.control(1, lmcache.StreamAck)
	for i := 0; len(c.replies) == 0; i++ { // the first lookups may come before the server has looked through its pool
		lookup(n, k, fmt.Sprint("again", i))
		time.Sleep(time.Millisecond)
	}
	for len(c.has) < 4 {
		c.batch()
		c.control(1, lmcache.StreamAck)
	}
	for _, h := range kv.ChunkHashes(k.Tokens, 16) {
		if c.has[h] == nil {
			t.Errorf("chunk %x is not announced", h)
		}
	}
}

// lookup looks a prompt up, under a request of its own.
func lookup(n *node, k *lmcache.Key, request string) {
	own := *k
	own.Worker, own.RequestID = lmcache.AllWorkers, request
	n.Answer([][]byte{{1}, lmcache.AppendOp(nil, lmcache.OpLookup), own.Append(nil), lmcache.AppendInt(nil, 1)})
}

// A stream ends with a reply without a result: when its client cancels it, and when the
// same instance subscribes again. Others go on, and ack and cancel of no stream do nothing.
func TestStreamsEnd(t *testing.T) {
	n, stop := startStreaming(t, t.TempDir(), 64, events.Options{})
	defer stop()
	register(t, n.Server, 7, smallLayout)
	a, b := subscribe(t, n.url, 1, 100), subscribe(t, n.url, 2, 100)
	a.batch()
	b.batch()
	b.control(9, lmcache.StreamAck)
	b.control(9, lmcache.StreamCancel)
	b.control(1, lmcache.StreamAck)

	a.subscribe(2, 1, "m", 0, 100)
	seen := map[byte]int{}
	for range 2 { // in either order
		m := a.reply()
		seen[m[0][0]] = len(m)
	}
	if seen[1] != 2 || seen[2] != 3 {
		t.Errorf("frames by uid: %v", seen)
	}
	a.control(1, lmcache.StreamCancel) // of the stream that has ended
	a.control(2, lmcache.StreamCancel)
	if m := a.reply(); m[0][0] != 2 || len(m) != 2 {
		t.Errorf("reply %x", m)
	}
	storePrompt(t, n, 1, 2)
	b.until(n)
	if len(a.replies) > 0 {
		t.Errorf("reply %x of a stream that has ended", <-a.replies)
	}
}

// One user has half of the streams at most; what is refused is told to go without for good.
func TestStreamsAreBounded(t *testing.T) {
	n, stop := startStreaming(t, t.TempDir(), 64, events.Options{})
	defer stop()
	c := subscribe(t, n.url, 1, 1)
	refused := 0
	for i := range 600 {
		c.subscribe(2, int64(10+i), "m", 0, 1) // the same uid: the one before ends
	}
	many := subscribe(t, n.url, 2, 1)
	for i := range 600 {
		many.send(lmcache.AppendInt(nil, int64(1000+i)), lmcache.AppendOp(nil, lmcache.OpSubscribeKVEvents), lmcache.AppendInt(nil, int64(1000+i)),
			lmcache.AppendString(nil, "m"), lmcache.AppendInt(nil, 0), lmcache.AppendInt(nil, 1))
	}
	for range 601 {
		m := many.reply()
		b, err := lmcache.DecodeKVEventBatch(m[2])
		if err != nil {
			t.Fatal(err)
		}
		if !b.Enabled {
			refused++
		}
	}
	if refused < 50 || refused > 300 {
		t.Errorf("%d of 601 were refused", refused)
	}
}

// The tokens of all prompts are for those who could read them in the pool.
func TestStreamsAreForThoseWhoMayOpenThePool(t *testing.T) {
	n, stop := startStreaming(t, t.TempDir(), 64, events.Options{})
	defer stop()
	for _, who := range []*visitor{{t, n.Server, remoteHost, 1}, {t, n.Server, anotherUser, 2}} {
		b, err := lmcache.DecodeKVEventBatch(who.call(lmcache.OpSubscribeKVEvents, lmcache.AppendInt(nil, who.id), lmcache.AppendString(nil, "m"),
			lmcache.AppendInt(nil, 0), lmcache.AppendInt(nil, 64)))
		if err != nil || b.Enabled {
			t.Errorf("%v %+v", err, b)
		}
	}
	if got := n.Stats().Declined["no_events"]; got != 2 {
		t.Errorf("%d were refused for it", got)
	}
}
