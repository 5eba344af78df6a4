// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// begin starts a pull of one request in the background.
func (x *pair) begin(t *testing.T, id, transferID string, blocks ...[]int) <-chan error {
	t.Helper()
	done := make(chan error, 1)
	go func() {
		failed, err := x.receiver.Pull(t.Context(), x.from, map[string]wire.Wanted{id: {TransferID: transferID, Blocks: blocks}})
		done <- errors.Join(err, failed[id])
	}()
	return done
}

func wait(t *testing.T, done <-chan error) error {
	t.Helper()
	select {
	case err := <-done:
		return err
	case <-time.After(30 * time.Second):
		t.Fatal("the pull hangs")
		return nil
	}
}

// idle checks that nothing is left of any transfer on either side.
func (x *pair) idle(t *testing.T) {
	t.Helper()
	testkit.Eventually(t, "both sides idle", func() bool {
		x.sender.Finished()
		s, r := x.sender.Stats(), x.receiver.Stats()
		return s.Transfers == 0 && s.Pulls == 0 && r.Active == 0 && r.Windows <= 1
	})
}

func small(t *testing.T, so SenderOptions, ro ReceiverOptions) *pair {
	x := newPair(t, testCache(2, 32, 256), testCache(2, 32, 256), so, ro)
	fill(x.p, 1)
	return x
}

// The pull comes before P has heard of the request, as when the proxy asks both at
// once.
func TestPullFirst(t *testing.T) {
	x := small(t, SenderOptions{}, ReceiverOptions{UnknownTimeout: 20 * time.Second})
	done := x.begin(t, "d", "x", []int{1, 2})
	testkit.Eventually(t, "pull arrives", func() bool { return x.sender.Stats().Transfers == 1 })
	x.sender.Expect("p", "x")
	x.sender.Offer("p", "x", [][]int{{7, 8}})
	if err := wait(t, done); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(block(x.d, 0, 2), block(x.p, 0, 8)) {
		t.Fatal("wrong bytes")
	}
	if got := x.sender.Finished(); !slices.Equal(got, []string{"p"}) {
		t.Fatalf("finished %v", got)
	}
	x.idle(t)
}

// One pull of several requests that become ready one by one, one of them never.
func TestContinue(t *testing.T) {
	x := small(t, SenderOptions{}, ReceiverOptions{UnknownTimeout: 20 * time.Second})
	wanted := map[string]wire.Wanted{}
	for i := range 4 {
		wanted[fmt.Sprint("d", i)] = wire.Wanted{TransferID: fmt.Sprint("x", i), Blocks: [][]int{{2 * i, 2*i + 1}}}
		x.sender.Expect(fmt.Sprint("p", i), fmt.Sprint("x", i))
	}
	if err := x.receiver.Start(x.from, wanted); err != nil {
		t.Fatal(err)
	}
	var got []string
	for i := range 3 {
		x.sender.Offer(fmt.Sprint("p", i), fmt.Sprint("x", i), [][]int{{10 + i, 20 + i}})
		testkit.Eventually(t, "request settles", func() bool {
			got = append(got, x.receiver.Results().Received...)
			return slices.Contains(got, fmt.Sprint("d", i))
		})
		if !bytes.Equal(block(x.d, 0, 2*i), block(x.p, 0, 10+i)) {
			t.Fatal("wrong bytes")
		}
	}
	x.sender.Abort("x3")
	var r Results
	testkit.Eventually(t, "aborted request settles", func() bool {
		r = x.receiver.Results()
		return len(r.Received) > 0
	})
	if err := r.Failed["d3"]; !errors.Is(err, ErrPeer) || !slices.Equal(r.FailedBlocks, []int{6, 7}) {
		t.Fatalf("results %+v", r)
	}
	x.idle(t)
}

func TestUnknownTransfer(t *testing.T) {
	x := small(t, SenderOptions{}, ReceiverOptions{UnknownTimeout: 50 * time.Millisecond})
	if err := x.pull(t, "d", "never", []int{1}); !errors.Is(err, ErrUnknownTransfer) || !strings.Contains(err.Error(), "never") {
		t.Fatal(err)
	}
	x.idle(t)
}

// P frees blocks that no D pulls in time, and a pull that P cannot serve in time fails
// with vLLM's error text.
func TestSenderTimeouts(t *testing.T) {
	x := small(t, SenderOptions{AbortTimeout: 100 * time.Millisecond}, ReceiverOptions{})
	x.sender.Offer("p", "x", [][]int{{1, 2}})
	testkit.Eventually(t, "blocks freed", func() bool { return slices.Equal(x.sender.Finished(), []string{"p"}) })
	x.sender.Expect("p2", "x2")
	if err := x.pull(t, "d2", "x2", []int{1}); !errors.Is(err, ErrPeer) || !strings.Contains(err.Error(), "Timeout waiting for P side ready.") {
		t.Fatal(err)
	}
	x.sender.Abort("x2")
	if s := x.sender.Stats(); s.Expired != 1 || s.Transfers != 0 {
		t.Fatalf("stats %+v", s)
	}
}

func TestReceiverTimeout(t *testing.T) {
	x := small(t, SenderOptions{RetryTimeout: 50 * time.Millisecond}, ReceiverOptions{Timeout: 200 * time.Millisecond})
	x.sender.Expect("p", "x")
	err := x.pull(t, "d", "x", []int{1})
	if !errors.Is(err, ErrTimeout) && !errors.Is(err, ErrPeer) { // P's timeout or D's may come first
		t.Fatal(err)
	}
	x.sender.Offer("p", "x", [][]int{{5}}) // too late; D lets it go, or nobody comes
	testkit.Eventually(t, "blocks freed", func() bool { return slices.Contains(x.sender.Finished(), "p") })
	x.idle(t)
}

func TestReceiverAbort(t *testing.T) {
	x := small(t, SenderOptions{}, ReceiverOptions{UnknownTimeout: 20 * time.Second})
	x.sender.Expect("p", "x")
	done := x.begin(t, "d", "x", []int{1})
	testkit.Eventually(t, "pull arrives", func() bool { return x.sender.Stats().Pulls == 1 })
	x.receiver.Abort("d")
	if err := wait(t, done); !errors.Is(err, ErrAborted) {
		t.Fatal(err)
	}
	x.sender.Offer("p", "x", [][]int{{5}})
	testkit.Eventually(t, "P frees its blocks", func() bool { return slices.Contains(x.sender.Finished(), "p") })
	x.idle(t)
}

// A request that was aborted before it was scheduled pulls without blocks.
func TestRelease(t *testing.T) {
	x := small(t, SenderOptions{}, ReceiverOptions{})
	x.sender.Offer("p", "x", [][]int{{5}})
	if err := x.pull(t, "d", "x"); err != nil {
		t.Fatal(err)
	}
	if got := x.sender.Finished(); !slices.Equal(got, []string{"p"}) {
		t.Fatalf("finished %v", got)
	}
	if r := x.receiver.Results(); len(r.Received) != 0 {
		t.Fatalf("results %+v", r)
	}
	x.idle(t)
}

func TestUnreachable(t *testing.T) {
	x := small(t, SenderOptions{}, ReceiverOptions{ConnectTimeout: 100 * time.Millisecond, Attempts: 1})
	x.dir.show("gone", "tcp://127.0.0.1:1")
	from := x.from
	x.from.EngineID = "gone"
	if err := x.pull(t, "d", "x", []int{1}); !errors.Is(err, ErrUnreachable) || !strings.Contains(err.Error(), "127.0.0.1:1") {
		t.Fatal(err)
	}
	x.from.EngineID = "other"
	if err := x.pull(t, "d", "x", []int{1}); !errors.Is(err, ErrNoEngine) || !strings.Contains(err.Error(), x.from.Bootstrap) {
		t.Fatal(err)
	}
	x.from.Bootstrap = "http://127.0.0.1:1"
	if err := x.pull(t, "d", "x", []int{1}); !errors.Is(err, ErrUnreachable) {
		t.Fatal(err)
	}
	x.dir.show(from.EngineID, x.sender.Addr())
	x.from = from
	x.receiver.o.ConnectTimeout = time.Minute // no pull runs; on a late machine this one may need more time
	x.sender.Offer("p", "x", [][]int{{5}})
	if err := x.pull(t, "d", "x", []int{1}); err != nil {
		t.Fatal(err)
	}
}

// D dies while P pushes to it: P's blocks come back.
func TestReceiverDies(t *testing.T) {
	x := small(t, SenderOptions{AbortTimeout: 200 * time.Millisecond, RetryTimeout: 50 * time.Millisecond}, ReceiverOptions{UnknownTimeout: 20 * time.Second})
	x.sender.Expect("p", "x")
	done := x.begin(t, "d", "x", []int{1})
	testkit.Eventually(t, "pull arrives", func() bool { return x.sender.Stats().Pulls == 1 })
	x.receiver.Close()
	if err := wait(t, done); err == nil {
		t.Fatal("no error from a closed receiver")
	}
	x.target.Close()
	x.sender.Offer("p", "x", [][]int{{5}})
	testkit.Eventually(t, "blocks freed", func() bool { return slices.Contains(x.sender.Finished(), "p") })
}

// P is killed while D waits: D fails at its own time, not at P's.
func TestSenderDies(t *testing.T) {
	x := small(t, SenderOptions{}, ReceiverOptions{
		Timeout: 20 * time.Second, UnknownTimeout: 20 * time.Second, ConnectTimeout: 100 * time.Millisecond,
	})
	x.sender.Expect("p", "x")
	done := x.begin(t, "d", "x", []int{1})
	testkit.Eventually(t, "pull arrives", func() bool { return x.sender.Stats().Pulls == 1 })
	x.sender.Close()
	if err := wait(t, done); !errors.Is(err, ErrUnreachable) && !errors.Is(err, ErrLost) {
		t.Fatal(err)
	}
	testkit.Eventually(t, "receiver idle", func() bool { return x.receiver.Stats().Active == 0 })
}

// An abort at P before, during and after the push.
func TestSenderAbort(t *testing.T) {
	x := small(t, SenderOptions{}, ReceiverOptions{UnknownTimeout: 20 * time.Second})
	x.sender.Expect("p0", "x0")
	done := x.begin(t, "d0", "x0", []int{1})
	testkit.Eventually(t, "pull waits", func() bool {
		x.sender.mu.Lock()
		defer x.sender.mu.Unlock()
		return len(x.sender.mu.transfers["x0"].waiting) == 1
	})
	x.sender.Abort("x0")
	if err := wait(t, done); !errors.Is(err, ErrPeer) {
		t.Fatal(err)
	}
	if got := x.sender.Finished(); len(got) != 0 {
		t.Fatalf("finished %v, but P never offered blocks", got)
	}

	// During: the target takes no bytes until it is told to.
	hold, entered := make(chan struct{}), make(chan struct{}, 8)
	region := transfer.Range{Addr: 1 << 60, Len: 1 << 20}
	h, err := x.target.Table().RegisterFunc(region, nil, writerAt(func([]byte, int64) { entered <- struct{}{}; <-hold }))
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close(t.Context())
	x.sender.Offer("p1", "x1", [][]int{{5}})
	pull := wire.Pull{Host: x.receiver.host, Port: x.receiver.port, TPSize: 1, Wanted: map[string]wire.Wanted{"d1": {TransferID: "x1", Blocks: [][]int{{1}}}}}
	for _, r := range x.d.Regions {
		r.Base = region.Addr
		pull.Regions = append(pull.Regions, r)
	}
	replies := make(chan *wire.Reply, 4)
	dealer := zmtp.NewDealer(x.sender.Addr(), zmtp.DealerOptions{Handler: func(m zmtp.Message) {
		y, err := wire.DecodeReply(m[0], 0)
		if err != nil {
			t.Error(err)
		}
		replies <- y
	}})
	if err := errors.Join(dealer.Start(), dealer.Send(wire.AppendPull(nil, &pull, 0))); err != nil {
		t.Fatal(err)
	}
	defer dealer.Close()
	<-entered
	x.sender.Abort("x1")
	if got := x.sender.Finished(); len(got) != 0 {
		t.Fatalf("finished %v while its blocks are being read", got)
	}
	close(hold)
	if y := <-replies; y.Status != wire.StatusFinish || !slices.Equal(y.OK, []string{"d1"}) {
		t.Fatalf("reply %+v", y)
	}
	if got := x.sender.Finished(); !slices.Equal(got, []string{"p1"}) {
		t.Fatalf("finished %v", got)
	}

	// After: nothing happens.
	x.sender.Abort("x1")
	if got := x.sender.Finished(); len(got) != 0 {
		t.Fatalf("finished %v", got)
	}
	x.idle(t)
}

type writerAt func([]byte, int64)

func (f writerAt) WriteAt(p []byte, off int64) (int, error) { f(p, off); return len(p), nil }

// Two requests pull the same transfer: at the same time, one after the other, and in
// one pull.
func TestDuplicatePulls(t *testing.T) {
	x := small(t, SenderOptions{}, ReceiverOptions{UnknownTimeout: 50 * time.Millisecond})
	x.sender.Offer("p", "x", [][]int{{5}})
	a, b := x.begin(t, "a", "x", []int{1}), x.begin(t, "b", "x", []int{2})
	ok := 0
	for _, err := range []error{wait(t, a), wait(t, b)} {
		switch {
		case err == nil:
			ok++
		case errors.Is(err, ErrPeer) && strings.Contains(err.Error(), errGaveUp.Error()): // it waited for the transfer that the other one took
		case !errors.Is(err, ErrUnknownTransfer):
			t.Fatal(err)
		}
	}
	if ok == 0 {
		t.Fatal("nobody got the transfer")
	}
	if err := x.pull(t, "c", "x", []int{3}); !errors.Is(err, ErrPeer) || !strings.Contains(err.Error(), errGaveUp.Error()) {
		t.Fatal(err)
	}
	x.sender.Offer("q", "y", [][]int{{6}})
	failed, err := x.receiver.Pull(t.Context(), x.from, map[string]wire.Wanted{"e": {TransferID: "y", Blocks: [][]int{{1}}}, "f": {TransferID: "y", Blocks: [][]int{{2}}}})
	if err != nil || len(failed) != 0 {
		t.Fatal(failed, err)
	}
	if !bytes.Equal(block(x.d, 0, 1), block(x.p, 0, 6)) || !bytes.Equal(block(x.d, 0, 2), block(x.p, 0, 6)) {
		t.Fatal("wrong bytes")
	}
	x.idle(t)
	x.sender.Expect("p2", "z") // P knows of the transfer, so the pull waits
	if err := x.receiver.Start(x.from, map[string]wire.Wanted{"g": {TransferID: "z", Blocks: [][]int{{1}}}}); err != nil {
		t.Fatal(err)
	}
	if err := x.receiver.Start(x.from, map[string]wire.Wanted{"g": {TransferID: "z", Blocks: [][]int{{1}}}}); !errors.Is(err, wire.ErrBusy) {
		t.Fatal(err)
	}
}

// A pull between layouts that do not match fails with an error that names both sides' values.
func TestLayoutsDoNotFit(t *testing.T) {
	f := func(change func(c *Cache), text string) {
		t.Helper()
		d := testCache(2, 32, 256)
		change(d)
		x := newPair(t, testCache(2, 32, 256), d, SenderOptions{}, ReceiverOptions{})
		x.sender.Offer("p", "x", [][]int{{1}})
		err := x.pull(t, "d", "x", []int{1})
		if !errors.Is(err, ErrPeer) || !strings.Contains(err.Error(), text) {
			t.Fatalf("%v, want %q", err, text)
		}
	}
	f(func(c *Cache) { c.Regions[1].Layer = "other" }, "no matching consumer occurrence: model.layers.1.attn occurrence 0.")
	f(func(c *Cache) { c.Regions[1].Index = 9 }, "producer=1, consumer=9.")
	f(func(c *Cache) { c.Kinds = append(c.Kinds, Attention); c.Regions[1].Group = 1 }, "group index mismatch")
	f(func(c *Cache) { c.Regions[1].Payload = 128 }, "local=256, remote=128.")
	x := newPair(t, testCache(2, 32, 256), testCache(2, 32, 256), SenderOptions{Self: Peer{TPSize: 2}}, ReceiverOptions{Self: Peer{TPRank: 2, TPSize: 3}})
	x.dir.show(x.sender.EngineID(), x.sender.Addr(), x.sender.Addr())
	if err := x.pull(t, "d", "x", []int{1}); err == nil || !strings.Contains(err.Error(), "Local tensor parallel size 3 is not divisible by remote tensor parallel size 2.") {
		t.Fatal(err)
	}
}

// A mistake in one request fails that request alone.
func TestRequestsDoNotFit(t *testing.T) {
	x := small(t, SenderOptions{}, ReceiverOptions{})
	x.sender.Offer("p", "x", [][]int{{1}})
	x.sender.Offer("q", "y", [][]int{{2, 3}})
	failed, err := x.receiver.Pull(t.Context(), x.from, map[string]wire.Wanted{"d": {TransferID: "x", Blocks: [][]int{{1, 2}}}, "e": {TransferID: "y", Blocks: [][]int{{4, 5}}}})
	if err != nil || len(failed) != 1 || !strings.Contains(failed["d"].Error(), "P num blocks less than D") {
		t.Fatal(failed, err)
	}
	if !bytes.Equal(block(x.d, 0, 5), block(x.p, 0, 3)) {
		t.Fatal("wrong bytes")
	}
	if err := x.receiver.Start(x.from, map[string]wire.Wanted{"g": {TransferID: "z", Blocks: [][]int{{32}}}}); !errors.Is(err, wire.ErrRange) {
		t.Fatal(err)
	}
	x.receiver.Results()
	x.sender.Offer("r2", "u", [][]int{{4}})
	err = x.receiver.Apply(&wire.Metadata{Pulls: []wire.PullMeta{ // one bad request keeps no other from its KV
		{RequestID: "bad", TransferID: "v", Blocks: [][]int{{99}}, EngineID: x.from.EngineID, BootstrapAddr: x.from.Bootstrap},
		{RequestID: "good", TransferID: "u", Blocks: [][]int{{6}}, EngineID: x.from.EngineID, BootstrapAddr: x.from.Bootstrap},
	}})
	if !errors.Is(err, wire.ErrRange) || !strings.Contains(err.Error(), "bad") {
		t.Fatal(err)
	}
	var settled []string
	testkit.Eventually(t, "both settle", func() bool {
		r := x.receiver.Results()
		settled = append(settled, r.Received...)
		return len(settled) == 2 && (len(r.Failed) == 0 || errors.Is(r.Failed["bad"], wire.ErrRange))
	})
	if !bytes.Equal(block(x.d, 0, 6), block(x.p, 0, 4)) {
		t.Fatal("wrong bytes")
	}
	x.sender.Offer("r", "w", [][]int{{1 << 20}}) // P's own mistake
	if err := x.pull(t, "h", "w", []int{1}); !errors.Is(err, ErrPeer) || !strings.Contains(err.Error(), "Mooncake transfer engine returned -1") {
		t.Fatal(err)
	}
}

// From its second pull on D sends only the number of its layout. P has forgotten that layout here.
func TestLayoutMiss(t *testing.T) {
	x := small(t, SenderOptions{}, ReceiverOptions{})
	for i := range 3 {
		id := fmt.Sprint("x", i)
		x.sender.Offer("p"+id, id, [][]int{{5}})
		if i == 2 {
			x.sender.layouts.mu.Lock()
			clear(x.sender.layouts.mu.plans)
			x.sender.layouts.mu.Unlock()
		}
		if err := x.pull(t, "d"+id, id, []int{1}); err != nil {
			t.Fatal(err)
		}
	}
	if s := x.receiver.Stats(); s.Fenced != 0 || s.LayoutMisses != 1 || s.LayoutsSent != 2 || s.LayoutsNamed != 2 {
		t.Fatalf("stats %+v", s)
	}
	twice := fakeP(t, func(peer *zmtp.Peer, _ *wire.Pull) {
		_ = peer.Send(wire.AppendReply(nil, &wire.Reply{Status: wire.StatusLayoutMiss}))
	})
	x.dir.show("twice", twice)
	x.from.EngineID = "twice"
	if err := x.pull(t, "d", "x", []int{1}); !errors.Is(err, ErrPeer) || !strings.Contains(err.Error(), "again after D had sent it anew") {
		t.Fatal(err)
	}
}

// D gets replies that do not match its pull.
func TestOddReplies(t *testing.T) {
	f := func(want error, replies ...[]byte) {
		t.Helper()
		limit := time.Minute
		if errors.Is(want, ErrTimeout) {
			limit = 500 * time.Millisecond
		}
		x := small(t, SenderOptions{}, ReceiverOptions{Attempts: 1, Timeout: limit, ArrivalTimeout: 100 * time.Millisecond})
		addr := fakeP(t, func(peer *zmtp.Peer, _ *wire.Pull) {
			for _, b := range replies {
				_ = peer.Send(b)
			}
			peer.Flush()
		})
		x.dir.show("odd", addr)
		x.from.EngineID = "odd"
		if err := x.pull(t, "d", "x", []int{1}); !errors.Is(err, want) {
			t.Errorf("%v, want %v", err, want)
		}
	}
	reply := func(y wire.Reply) []byte { return wire.AppendReply(nil, &y) }
	f(ErrPeer, reply(wire.Reply{Status: wire.StatusFinish}))
	f(ErrPeer, reply(wire.Reply{Status: wire.StatusFinish, OK: []string{"other"}}))
	f(ErrPeer, reply(wire.Reply{Status: wire.StatusError}))
	f(ErrUnconfirmed, reply(wire.Reply{Status: wire.StatusFinish, OK: []string{"d"}, Failed: nil})) // and wrote nothing
	f(ErrPeer, reply(wire.Reply{Status: wire.StatusContinue, OK: []string{"d"}, Failed: []string{"d"}}))
	f(ErrTimeout, reply(wire.Reply{Status: wire.StatusContinue}))
	f(ErrLost, []byte{0xc1})
	f(ErrLost, []byte{})
}

// Random messages on P's side channel: each is answered or dropped, and others are
// served.
func TestRandomMessages(t *testing.T) {
	x := small(t, SenderOptions{AbortTimeout: 50 * time.Millisecond}, ReceiverOptions{})
	var answers atomic.Int64
	dealer := zmtp.NewDealer(x.sender.Addr(), zmtp.DealerOptions{Handler: func(m zmtp.Message) { answers.Add(1) }})
	if err := dealer.Start(); err != nil {
		t.Fatal(err)
	}
	defer dealer.Close()
	rng := rand.New(rand.NewPCG(7, 7))
	good := wire.Pull{Host: "127.0.0.1", Port: 1, TPSize: 1, Wanted: map[string]wire.Wanted{"d": {TransferID: "none", Blocks: [][]int{{1, 2}}}}, Regions: x.d.Regions}
	const n = 10000
	for i := range n {
		b := wire.AppendPull(nil, &good, 0)
		switch i % 4 {
		case 0:
			b = make([]byte, rng.IntN(200))
			for j := range b {
				b[j] = byte(rng.Uint32())
			}
		case 1:
			b = b[:rng.IntN(len(b))]
		default:
			for range 1 + rng.IntN(4) {
				b[rng.IntN(len(b))] = byte(rng.Uint32())
			}
		}
		frames := [][]byte{b}
		if i%97 == 0 {
			frames = append(frames, b)
		}
		for dealer.Send(frames...) != nil {
			time.Sleep(time.Millisecond)
		}
	}
	testkit.Eventually(t, "answers", func() bool { return answers.Load() >= n*9/10 })
	x.sender.Offer("p", "x", [][]int{{5}})
	if err := x.pull(t, "d", "x", []int{1}); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "sender idle", func() bool { x.sender.Finished(); s := x.sender.Stats(); return s.Transfers == 0 && s.Pulls == 0 })
	t.Logf("%d messages, %d answers, %d refused", n, answers.Load(), x.sender.Stats().Refused)
}

// A pull of a transfer that has ended fails at once, whichever way it ended: D would wait for its own timeout and hold its blocks.
// Another transfer of the same pull is not touched, and one that P begins again under the id is served.
func TestPullOfAnEndedTransferFailsAtOnce(t *testing.T) {
	x := small(t, SenderOptions{}, ReceiverOptions{})
	x.sender.Offer("p1", "expired", [][]int{{1}})
	x.sender.mu.Lock()
	x.sender.mu.transfers["expired"].expires = time.Now().Add(-time.Second)
	x.sender.mu.Unlock()
	if got := x.sender.Finished(); !slices.Equal(got, []string{"p1"}) {
		t.Fatalf("finished %v", got)
	}
	x.sender.Offer("p2", "aborted", [][]int{{2}})
	x.sender.Abort("aborted")
	x.sender.Expect("p3", "not processed")
	x.sender.Abort("not processed")
	x.sender.Offer("p4", "delivered", [][]int{{3}})
	if err := x.pull(t, "d4", "delivered", []int{3}); err != nil {
		t.Fatal(err)
	}
	w, err := x.receiver.windows.open(x.from)
	if err != nil {
		t.Fatal(err)
	}
	defer x.receiver.windows.withdraw(w)
	pull := func(transfers ...string) *wire.Reply {
		p := &wire.Pull{Host: x.receiver.host, Port: x.receiver.port, TPSize: 1, PPSize: 1, Regions: w.regions, DeadlineMillis: 30000, Wanted: map[string]wire.Wanted{}}
		for _, id := range transfers {
			p.Wanted["of "+id] = wire.Wanted{TransferID: id, Blocks: [][]int{{4}}}
		}
		_, replies := ask(t, x.sender.Addr(), p)
		return next(t, replies)
	}
	for _, id := range []string{"expired", "aborted", "not processed", "delivered"} {
		if y := pull(id); y.Status != wire.StatusFinish || len(y.Failed) != 1 || y.Message != errGaveUp.Error() {
			t.Errorf("%s: %+v", id, y)
		}
		if y := pull(id, "to come"); y.Status != wire.StatusContinue || !slices.Equal(y.Failed, []string{"of " + id}) {
			t.Errorf("%s and another one: %+v", id, y)
		}
		x.sender.Offer("again "+id, id, [][]int{{5}})
		if y := pull(id); len(y.OK) != 1 {
			t.Errorf("%s, which P has begun again: %+v", id, y)
		}
	}
	if y := pull("never heard of"); len(y.Unknown) != 1 {
		t.Errorf("a transfer that P may come to know: %+v", y)
	}
}
