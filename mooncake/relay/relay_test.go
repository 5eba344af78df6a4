// SPDX-License-Identifier: Apache-2.0

package relay_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/mooncake/relay"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/zmtp"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const (
	layers  = 4
	blocks  = 64
	payload = 512
)

// memory is an engine's KV cache: two groups, layer i in group i%2; blocks lie
// twice as far apart in D as in P.
func memory(stride uint64) *mooncake.Cache {
	c := &mooncake.Cache{Kinds: []mooncake.GroupKind{mooncake.Attention, mooncake.Attention}, KVHeads: 8}
	for i := range layers {
		base := uint64(i+1) << 32
		c.Storages = append(c.Storages, mooncake.Storage{Addr: base, Mem: make([]byte, blocks*stride)})
		c.Regions = append(c.Regions, wire.Region{
			Layer: fmt.Sprint("layers.", i), Index: i, Base: base, Stride: stride, Payload: payload,
			Group: i % 2, Shared: []int{i % 2}, RowOffset: wire.NoRow,
		})
	}
	return c
}

func block(c *mooncake.Cache, group, id int) []byte {
	var all []byte
	for _, r := range c.Regions {
		if r.Group == group {
			all = append(all, c.Bytes(r.Base+uint64(id)*r.Stride, r.Payload)...)
		}
	}
	return all
}

// world is a P, a relay and a D.
type world struct {
	t        *testing.T
	p, d     *mooncake.Cache
	sender   *mooncake.Sender
	client   *transfer.Client
	upstream *httptest.Server
	relay    *relay.Relay
	web      *httptest.Server
	target   *transfer.Target
	receiver *mooncake.Receiver

	mu   sync.Mutex
	dir  string
	hold chan bool // answers of the registry wait for two messages; nil: none does
}

func logger() *slog.Logger {
	if testing.Verbose() {
		return slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	return slog.New(slog.DiscardHandler)
}

func newWorld(t *testing.T, o relay.Options) *world {
	w := &world{t: t, p: memory(payload), d: memory(2 * payload), client: transfer.New(transfer.Options{Secrets: o.Secrets})}
	t.Cleanup(w.client.Close)
	for i, s := range w.p.Storages {
		rand.NewChaCha8([32]byte{byte(i + 1)}).Read(s.Mem)
	}
	w.upstream = httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		w.mu.Lock()
		dir, hold := w.dir, w.hold
		w.mu.Unlock()
		if hold != nil {
			hold <- true
			<-hold
		}
		io.WriteString(rw, dir)
	}))
	t.Cleanup(w.upstream.Close)
	w.startP("e1")
	o.Upstream, o.Log = w.upstream.URL, cmp.Or(o.Log, logger())
	o.MemoryPath = t.TempDir() + "/memory"
	o.RefreshEvery = time.Millisecond
	var err error
	if w.relay, err = relay.Open(o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.relay.Close() })
	if _, err := os.Stat(o.MemoryPath); err == nil {
		t.Fatal("the memory has a name")
	}
	w.web = httptest.NewServer(w.relay)
	t.Cleanup(w.web.Close)
	if w.target, err = transfer.Listen(transfer.TargetOptions{Secrets: o.Secrets}, transfer.NewTable()); err != nil {
		t.Fatal(err)
	}
	target := w.target // a test may take another
	t.Cleanup(func() { target.Close() })
	w.receiver = w.newD(w.d, w.target)
	return w
}

func (w *world) newD(c *mooncake.Cache, target *transfer.Target) *mooncake.Receiver {
	r, err := mooncake.NewReceiver(c, mooncake.ReceiverOptions{Target: target, Log: logger(), Timeout: 20 * time.Second})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { r.Close() })
	return r
}

// startP starts a P engine, in the place of the one before.
func (w *world) startP(id string) {
	s, err := mooncake.NewSender(w.p, mooncake.SenderOptions{
		Engine: mooncake.Engine{ID: id}, Transfer: w.client, Log: logger(), AbortTimeout: 20 * time.Second,
	})
	if err != nil {
		w.t.Fatal(err)
	}
	if err := s.Start(w.t.Context()); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { s.Close() })
	w.sender = s
	w.mu.Lock()
	w.dir = fmt.Sprintf(`{"0":{"engine_id":%q,"worker_addr":{"0":{"0":%q}}}}`, id, s.Addr())
	w.mu.Unlock()
}

// source is what D's request would carry: the relay's engine, the relay's address.
func (w *world) source() mooncake.Source {
	w.t.Helper()
	c, err := bootstrap.NewClient(w.web.URL, bootstrap.ClientOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	defer c.Close()
	d, err := c.Query(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	return mooncake.Source{EngineID: d[0].ID, Bootstrap: w.web.URL}
}

// sideChannel is where D finds the relay, as the directory says.
func (w *world) sideChannel() string {
	w.t.Helper()
	c, err := bootstrap.NewClient(w.web.URL, bootstrap.ClientOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	defer c.Close()
	d, err := c.Query(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	return d[0].Workers[0][0]
}

func (w *world) pull(id string, wanted ...[]int) error {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), 30*time.Second)
	defer cancel()
	failed, err := w.receiver.Pull(ctx, w.source(), map[string]wire.Wanted{"d-" + id: {TransferID: id, Blocks: wanted}})
	if err != nil {
		w.t.Fatal(err)
	}
	return failed["d-"+id]
}

func (w *world) check(group int, d, p []int) {
	w.t.Helper()
	w.target.Table().Observe()
	for i := range d {
		if !bytes.Equal(block(w.d, group, d[i]), block(w.p, group, p[i])) {
			w.t.Fatalf("group %d: D's block %d is not P's block %d", group, d[i], p[i])
		}
	}
}

// D gets a transfer through the relay, and again without P: other blocks, and only
// the last of them.
func TestRelay(t *testing.T) {
	t.Parallel() // it waits for deadlines
	w := newWorld(t, relay.Options{})
	w.sender.Offer("p", "x", [][]int{{3, 4, 5}, {10, 11, 12, 13}})
	if err := w.pull("x", []int{0, 1, 2}, []int{7, 8, 9, 20}); err != nil { // block 0 is a block like any
		t.Fatal(err)
	}
	w.check(0, []int{0, 1, 2}, []int{3, 4, 5})
	w.check(1, []int{7, 8, 9, 20}, []int{10, 11, 12, 13})
	if got := w.sender.Finished(); !slices.Equal(got, []string{"p"}) {
		t.Fatalf("finished %v", got)
	}
	pushed := w.sender.Stats().Pushed
	clear(w.d.Storages[1].Mem)
	if err := w.pull("x#2", nil, []int{30, 31, 33}); err != nil {
		t.Fatal(err)
	}
	w.check(1, []int{30, 31, 33}, []int{11, 12, 13})
	s := w.relay.Stats()
	if w.sender.Stats().Pushed != pushed || s.Pulled != 1 || s.Served != 2 || s.FromMemory != 1 || s.Kept != 1 {
		t.Fatalf("stats %+v", s)
	}
	if err := w.pull("x#3", nil, []int{30, 31, 32, 33, 34}); err == nil || !strings.Contains(err.Error(), "P num blocks less than D") {
		t.Fatal(err)
	}
}

// P, relay and D with one secret can transfer from P to the relay and on to D. A P without the secret cannot push into the relay, and D's pull fails.
func TestRelayProvesItsSecret(t *testing.T) {
	path := t.TempDir() + "/secret"
	if err := os.WriteFile(path, []byte(strings.Repeat("s", 32)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	secrets, err := auth.OpenPeerSecrets(path, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(t, relay.Options{Secrets: secrets})
	w.sender.Offer("p", "x", [][]int{{3}, {10}})
	if err := w.pull("x", []int{0}, []int{7}); err != nil || secrets.Refused() != 0 {
		t.Fatal(err, secrets.Refused())
	}
	w.check(0, []int{0}, []int{3})
	w.check(1, []int{7}, []int{10})
	before := w.source()
	w.sender.Close()
	w.client = transfer.New(transfer.Options{})
	t.Cleanup(w.client.Close)
	w.startP("e2")
	testkit.Eventually(t, "the relay knows the other P", func() bool { return w.source().EngineID != before.EngineID })
	w.sender.Offer("p2", "y", [][]int{{4}, {11}})
	if err := w.pull("y", []int{1}, []int{8}); err == nil || secrets.Refused() == 0 {
		t.Errorf("a P without the secret pushed: %v, %d refused", err, secrets.Refused())
	}
}

// Several D at once: P is asked once.
func TestRelayOnce(t *testing.T) {
	w := newWorld(t, relay.Options{})
	var wg sync.WaitGroup
	errs := make(chan error, 8)
	from := w.source()
	for i := range 8 {
		c := memory(payload)
		target, err := transfer.Listen(transfer.TargetOptions{}, transfer.NewTable())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { target.Close() })
		r := w.newD(c, target)
		wg.Go(func() {
			failed, err := r.Pull(t.Context(), from, map[string]wire.Wanted{"d": {TransferID: fmt.Sprint("x#", i), Blocks: [][]int{{5}, {6}}}})
			target.Table().Observe()
			if err == nil && len(failed) == 0 && !bytes.Equal(block(c, 1, 6), block(w.p, 1, 8)) {
				err = errors.New("wrong bytes")
			}
			errs <- errors.Join(err, failed["d"])
		})
	}
	w.sender.Expect("p", "x")
	w.sender.Offer("p", "x", [][]int{{7}, {8}})
	wg.Wait()
	for range 8 {
		if err := <-errs; err != nil {
			t.Fatal(err)
		}
	}
	if s := w.relay.Stats(); s.Pulled != 1 || s.Served != 8 {
		t.Fatalf("stats %+v", s)
	}
}

// A P that restarts has a new engine id; the relay follows, and keeps what it has if
// the operator says so.
func TestRelayPRestarts(t *testing.T) {
	w := newWorld(t, relay.Options{KeepAcrossRestarts: true})
	w.sender.Offer("p", "x", [][]int{{1}, {2}})
	if err := w.pull("x", []int{1}, []int{2}); err != nil {
		t.Fatal(err)
	}
	before := w.source()
	w.sender.Close()
	w.startP("e2")
	time.Sleep(2 * time.Millisecond) // RefreshEvery
	if after := w.source(); after.EngineID == before.EngineID {
		t.Fatalf("still %s", after.EngineID)
	}
	w.sender.Offer("p", "y", [][]int{{3}, {4}})
	if err := w.pull("y", []int{5}, []int{6}); err != nil {
		t.Fatal(err)
	}
	w.check(0, []int{5}, []int{3})
	if err := w.pull("x#7", []int{8}, []int{9}); err != nil {
		t.Fatal(err)
	}
	w.check(1, []int{9}, []int{2})
}

// KV that is kept across restarts is reachable without P and its registry, also for a D that has not asked before.
func TestKeptWithoutP(t *testing.T) {
	w := newWorld(t, relay.Options{KeepAcrossRestarts: true})
	w.sender.Offer("p", "x", [][]int{{1}, {2}})
	if err := w.pull("x", []int{1}, []int{2}); err != nil {
		t.Fatal(err)
	}
	w.sender.Close()
	w.upstream.Close()
	time.Sleep(2 * time.Millisecond) // RefreshEvery
	w.receiver = w.newD(w.d, w.target)
	if err := w.pull("x#2", []int{8}, []int{9}); err != nil {
		t.Fatal(err)
	}
	w.check(0, []int{8}, []int{1})
	w.check(1, []int{9}, []int{2})
	res, err := http.Get(w.web.URL + "/healthz")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusServiceUnavailable {
		t.Fatal(res.Status)
	}
}

func TestRelayFailures(t *testing.T) {
	w := newWorld(t, relay.Options{Timeout: 2 * time.Second, MemoryBytes: 64 << 10})
	if err := w.pull("never", []int{1}, []int{2}); !errors.Is(err, mooncake.ErrPeer) {
		t.Fatal(err)
	}
	many := make([]int, 60)
	for i := range many {
		many[i] = i
	}
	if err := w.pull("large", many, many); err == nil || !strings.Contains(err.Error(), "do not fit") {
		t.Fatal(err)
	}
	w.sender.Offer("p", "few", [][]int{{1}, {2}})
	if err := w.pull("few", []int{1, 2}, []int{2}); err == nil || !strings.Contains(err.Error(), "P num blocks less than D") {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the memory of all failed requests is free", func() bool { // the relay answers D before it frees the memory
		s := w.relay.Stats()
		return s.Kept == 0 && s.KeptBytes == 0
	})
	w.sender.Close()
	w.upstream.Close()
	time.Sleep(2 * time.Millisecond)
	res, err := http.Get(w.web.URL + "/query")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	text, _ := io.ReadAll(res.Body)
	if res.StatusCode != http.StatusServiceUnavailable || !strings.Contains(string(text), w.upstream.URL) {
		t.Fatalf("%s %s", res.Status, text)
	}
}

// The oldest transfers make room; what is in use stays.
func TestRelayEvicts(t *testing.T) {
	w := newWorld(t, relay.Options{MemoryBytes: 32 << 10}) // 2 blocks of 512 bytes in 4 layers: a page per transfer
	for i := range 12 {
		id := fmt.Sprint("x", i)
		w.sender.Offer("p"+id, id, [][]int{{i, i + 1}, {i + 2, i + 3}})
		if err := w.pull(id, []int{1, 2}, []int{3, 4}); err != nil {
			t.Fatal(err)
		}
		w.check(1, []int{3, 4}, []int{i + 2, i + 3})
	}
	s := w.relay.Stats()
	if s.Evicted == 0 || s.KeptBytes > 32<<10 || s.Evicted+s.Kept != 12 {
		t.Fatalf("stats %+v", s)
	}
	w.sender.Offer("p", "x0", [][]int{{9}, {9}})
	if err := w.pull("x0#2", []int{20}, []int{21}); err != nil { // evicted: P is asked again
		t.Fatal(err)
	}
	if w.relay.Stats().FromMemory != 0 {
		t.Fatal("served from memory that was given away")
	}
}

// The relay serves T#n! from memory or fails it. It does not ask P, which would wait for a request that
// no proxy sends. /kept says for each transfer of this engine whether the relay keeps it.
func TestFromMemoryOnly(t *testing.T) {
	w := newWorld(t, relay.Options{MemoryBytes: 32 << 10})
	shown := w.source().EngineID
	keeps := func(engine, transfer string, want bool) {
		t.Helper()
		r, err := http.Get(w.web.URL + "/kept?engine=" + engine + "&transfer=" + transfer)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		if text, _ := io.ReadAll(r.Body); r.StatusCode != 200 || string(text) != fmt.Sprintf(`{"kept":%t}`, want) {
			t.Errorf("%s of %s: %d %s", transfer, engine, r.StatusCode, text)
		}
	}
	for i, id := range []string{"x", "y"} {
		keeps(shown, id, false)
		w.sender.Offer("p"+id, id, [][]int{{i, i + 1}, {i + 2, i + 3}})
		if err := w.pull(id, []int{1, 2}, []int{3, 4}); err != nil {
			t.Fatal(err)
		}
		keeps(shown, id, true)
		keeps("relay-e2", id, false)
	}
	pushed := w.sender.Stats().Pushed
	if err := w.pull("x#7!", []int{20, 21}, []int{22, 23}); err != nil {
		t.Fatal(err)
	}
	w.check(0, []int{20, 21}, []int{0, 1})
	if err := w.pull("x#8!", []int{20, 21, 24}, []int{22, 23}); err == nil || !strings.Contains(err.Error(), "not in memory") {
		t.Error(err)
	}
	// The relay keeps fewer blocks of x than that D asked for, so it does not offer x any more. The next pull of x asks P and replaces the copy.
	keeps(shown, "x", false)
	keeps(shown, "y", true)
	w.sender.Offer("px", "x", [][]int{{0, 1, 6}, {2, 3, 7}})
	if err := w.pull("x", []int{1, 2, 5}, []int{3, 4, 6}); err != nil {
		t.Fatal(err)
	}
	keeps(shown, "x", true)
	if err := w.pull("x#9!", []int{20, 21, 24}, []int{22, 23, 25}); err != nil {
		t.Fatal(err)
	}
	w.check(1, []int{22, 23, 25}, []int{2, 3, 7})
	for i := 2; i < 12; i++ { // they push x and y out
		id := fmt.Sprint("x", i)
		w.sender.Offer("p"+id, id, [][]int{{i, i + 1}, {i + 2, i + 3}})
		if err := w.pull(id, []int{1, 2}, []int{3, 4}); err != nil {
			t.Fatal(err)
		}
	}
	for _, id := range []string{"x", "y"} {
		keeps(shown, id, false)
		if err := w.pull(id+"#2!", []int{20, 21}, []int{22, 23}); err == nil || !strings.Contains(err.Error(), "not in memory") {
			t.Error(err)
		}
	}
	if n := w.sender.Stats().Pushed - pushed; n != 11 {
		t.Errorf("P sent %d requests", n)
	}
}

// P has two TP ranks, D has one: whichever rank D asks, it gets the halves of both.
func TestRelayUnequalTP(t *testing.T) {
	w := newWorld(t, relay.Options{})
	w.sender.Close()
	var caches [2]*mooncake.Cache
	addrs := ""
	for rank := range caches {
		c := memory(payload / 2)
		for i := range c.Regions {
			c.Regions[i].Payload = payload / 2
			rand.NewChaCha8([32]byte{byte(rank), byte(i), 9}).Read(c.Storages[i].Mem)
		}
		s, err := mooncake.NewSender(c, mooncake.SenderOptions{
			Engine: mooncake.Engine{ID: "tp2"}, Self: mooncake.Peer{TPRank: rank, TPSize: 2}, Transfer: w.client, Log: logger(),
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		s.Offer("p", "x", [][]int{{4}, {5}})
		caches[rank] = c
		addrs += fmt.Sprintf(`,"%d":{"0":%q}`, rank, s.Addr())
	}
	w.mu.Lock()
	w.dir = `{"0":{"engine_id":"tp2","worker_addr":{` + addrs[1:] + `}}}`
	w.mu.Unlock()
	time.Sleep(2 * time.Millisecond) // RefreshEvery
	if err := w.pull("x", []int{1}, []int{2}); err != nil {
		t.Fatal(err)
	}
	w.target.Table().Observe()
	for i, r := range w.d.Regions {
		var want []byte
		for _, c := range caches {
			q := c.Regions[i]
			want = append(want, c.Bytes(q.Base+uint64(4+i%2)*q.Stride, q.Payload)...)
		}
		if got := w.d.Bytes(r.Base+uint64(1+i%2)*r.Stride, r.Payload); !bytes.Equal(got, want) {
			t.Fatalf("layer %d differs", i)
		}
	}
	if s := w.relay.Stats(); s.Pulled != 1 || s.Failed != 0 {
		t.Fatalf("stats %+v", s)
	}
}

// D wants nothing: P frees its blocks.
func TestRelayRelease(t *testing.T) {
	w := newWorld(t, relay.Options{})
	w.sender.Offer("p", "x", [][]int{{1}, {2}})
	if err := w.pull("x"); err != nil {
		t.Fatal(err)
	}
	if got := w.sender.Finished(); !slices.Equal(got, []string{"p"}) {
		t.Fatalf("finished %v", got)
	}
}

// Odd messages are answered and harm nobody.
func TestRelayOddMessages(t *testing.T) {
	w := newWorld(t, relay.Options{Timeout: 50 * time.Millisecond})
	c, err := bootstrap.NewClient(w.web.URL, bootstrap.ClientOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	d, err := c.Query(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	replies := make(chan *wire.Reply, 64)
	dealer := zmtp.NewDealer(d[0].Workers[0][0], zmtp.DealerOptions{Handler: func(m zmtp.Message) {
		y, err := wire.DecodeReply(m[0], 0)
		if err != nil {
			t.Error(err)
		}
		replies <- y
	}})
	if err := dealer.Start(); err != nil {
		t.Fatal(err)
	}
	defer dealer.Close()
	huge := memory(payload).Regions
	huge[0].Payload, huge[0].Stride = 1<<62, 1<<62
	odd := memory(payload).Regions
	odd[1].Group = 77
	shared := memory(payload).Regions
	shared[0].Group, shared[0].Shared = wire.SharedGroup, []int{0, 1}
	wanted := map[string]wire.Wanted{"a": {TransferID: "z", Blocks: [][]int{{1}, {2}}}}
	for i, p := range []wire.Pull{
		{Host: "127.0.0.1", Port: 1, TPSize: 1, Wanted: wanted},
		{Host: "127.0.0.1", Port: 1, TPSize: 1, Wanted: wanted, Regions: huge},
		{Host: "127.0.0.1", Port: 1, TPSize: 1, Wanted: wanted, Regions: odd},
		{Host: "127.0.0.1", Port: 1, TPSize: 1, Wanted: wanted, Regions: shared},
		{Host: "127.0.0.1", Port: 1, TPSize: 3, TPRank: 2, Wanted: wanted, Regions: memory(payload).Regions},
	} {
		if err := dealer.Send(wire.AppendPull(nil, &p, 0)); err != nil {
			t.Fatal(err)
		}
		select {
		case y := <-replies:
			if y.Message == "" || y.Status == wire.StatusFinish && len(y.Failed) != 1 {
				t.Errorf("message %d: %+v", i, y)
			}
		case <-time.After(60 * time.Second):
			t.Fatalf("message %d: no answer", i)
		}
	}
	testkit.Eventually(t, "the memory of all failed requests is free", func() bool { // the relay answers D before it frees the memory
		s := w.relay.Stats()
		return s.Kept == 0 && s.KeptBytes == 0
	})
}
