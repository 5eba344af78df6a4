// SPDX-License-Identifier: Apache-2.0

package v013

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// pair is a P and a D of one worker each.
type pair struct {
	p, d     *mooncake.Cache
	sender   *Sender
	receiver *mooncake.Receiver
	target   *transfer.Target
	client   *transfer.Client
	from     mooncake.Source
}

func newPair(t *testing.T, so mooncake.SenderOptions, ro mooncake.ReceiverOptions) *pair {
	t.Helper()
	x := &pair{p: testCache(3, 32, 256), d: testCache(3, 32, 256), client: transfer.New(transfer.Options{})}
	fill(x.p, 3)
	t.Cleanup(x.client.Close)
	so.Transfer, so.Log = x.client, testLog(t)
	var err error
	if x.sender, err = NewSender(x.p, so); err != nil {
		t.Fatal(err)
	}
	if err := x.sender.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.sender.Close() })
	host, port, _ := net.SplitHostPort(strings.TrimPrefix(x.sender.Addr(), "tcp://"))
	x.from.Host = host
	if x.from.Port, err = strconv.Atoi(port); err != nil {
		t.Fatal(err)
	}
	if x.target, err = transfer.Listen(transfer.TargetOptions{}, transfer.NewTable()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.target.Close() })
	ro.Target, ro.Log = x.target, testLog(t)
	if x.receiver, err = NewReceiver(x.d, ro); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.receiver.Close() })
	return x
}

func (x *pair) offer(id string, blocks ...int) {
	x.sender.Apply(&wire.Metadata{Sends: []wire.SendMeta{{RequestID: id, Blocks: [][]int{blocks}}}})
}

func (x *pair) announce(id string) {
	x.sender.Apply(&wire.Metadata{Sends: []wire.SendMeta{{RequestID: id}}})
}

// Several requests of one step travel in one pull, which waits for the last of them.
func TestPull(t *testing.T) {
	x := newPair(t, mooncake.SenderOptions{}, mooncake.ReceiverOptions{})
	x.announce("a")
	x.announce("b")
	err := x.receiver.Apply(&wire.Metadata{Pulls: []wire.PullMeta{
		{RequestID: "a", Blocks: [][]int{{1, 2}}, Host: x.from.Host, Port: x.from.Port},
		{RequestID: "b", Blocks: [][]int{{3}}, Host: x.from.Host, Port: x.from.Port},
	}})
	if err != nil {
		t.Fatal(err)
	}
	x.offer("a", 10, 11, 12)
	x.offer("b", 13)
	var got []string
	testkit.Eventually(t, "both settle", func() bool {
		r := x.receiver.Results()
		got = append(got, r.Received...)
		return len(got) == 2 && len(r.Failed) == 0
	})
	for d, p := range map[int]int{1: 11, 2: 12, 3: 13} {
		if !bytes.Equal(block(x.d, d), block(x.p, p)) {
			t.Fatalf("block %d differs", d)
		}
	}
	var free []string
	testkit.Eventually(t, "blocks freed", func() bool { free = append(free, x.sender.Finished()...); return len(free) == 2 })
	if err := x.pull(t, "a", []int{1}); !errors.Is(err, mooncake.ErrPeer) {
		t.Fatalf("second pull: %v", err)
	}
}

func TestFailures(t *testing.T) {
	x := newPair(t, mooncake.SenderOptions{AbortTimeout: 300 * time.Millisecond}, mooncake.ReceiverOptions{Attempts: 2, Timeout: 10 * time.Second})
	if err := x.pull(t, "unknown", []int{1}); !errors.Is(err, mooncake.ErrPeer) {
		t.Fatal(err)
	}
	x.announce("late")
	if err := x.pull(t, "late", []int{1}); !errors.Is(err, mooncake.ErrPeer) { // P's patience
		t.Fatal(err)
	}
	x.announce("dropped")
	done := x.begin(t, "dropped", []int{1})
	testkit.Eventually(t, "pull arrives", func() bool { return x.sender.Stats().Pulls == 1 })
	x.sender.Apply(&wire.Metadata{NotProcessed: []string{"dropped"}})
	if err := wait(t, done); !errors.Is(err, mooncake.ErrPeer) {
		t.Fatal(err)
	}
	x.offer("few", 1)
	if err := x.pull(t, "few", []int{1, 2}); !errors.Is(err, mooncake.ErrPeer) {
		t.Fatal(err)
	}
	var free []string
	testkit.Eventually(t, "its lease ends", func() bool { free = append(free, x.sender.Finished()...); return slices.Contains(free, "few") })
	x.offer("nobody", 2)
	testkit.Eventually(t, "its lease ends", func() bool { free = append(free, x.sender.Finished()...); return slices.Contains(free, "nobody") })
	x.from.Port = 1
	if err := x.pull(t, "r", []int{1}); !errors.Is(err, mooncake.ErrLost) || !strings.Contains(err.Error(), "127.0.0.1:1") {
		t.Fatal(err)
	}
	testkit.Eventually(t, "old windows close", func() bool { return x.receiver.Stats().Windows <= 1 })
}

func TestAbort(t *testing.T) {
	x := newPair(t, mooncake.SenderOptions{AbortTimeout: 20 * time.Second}, mooncake.ReceiverOptions{})
	x.announce("a")
	done := x.begin(t, "a", []int{1})
	testkit.Eventually(t, "pull arrives", func() bool { return x.sender.Stats().Pulls == 1 })
	x.receiver.Abort("a")
	if err := wait(t, done); !errors.Is(err, mooncake.ErrAborted) {
		t.Fatal(err)
	}
	x.offer("a", 5)
	testkit.Eventually(t, "P frees its blocks", func() bool { return slices.Contains(x.sender.Finished(), "a") })
}

func TestRandomMessages(t *testing.T) {
	x := newPair(t, mooncake.SenderOptions{AbortTimeout: 50 * time.Millisecond}, mooncake.ReceiverOptions{})
	answers := make(chan struct{}, 1<<14)
	dealer := zmtp.NewDealer(x.sender.Addr(), zmtp.DealerOptions{Handler: func(zmtp.Message) { answers <- struct{}{} }})
	if err := dealer.Start(); err != nil {
		t.Fatal(err)
	}
	defer dealer.Close()
	rng := rand.New(rand.NewPCG(9, 9))
	good := wire.AppendPull013(nil, &wire.Pull013{Host: "127.0.0.1", Port: 1, Requests: []string{"a"}, Bases: []uint64{1}, Blocks: [][]int{{1}}})
	const n = 10000
	for i := range n {
		b := slices.Clone(good)
		for range 1 + rng.IntN(4) {
			b[rng.IntN(len(b))] = byte(rng.Uint32())
		}
		frames := [][]byte{nil, b[:len(b)-rng.IntN(2)*rng.IntN(len(b))]}
		if i%50 == 0 {
			frames = frames[1:]
		}
		for dealer.Send(frames...) != nil {
			time.Sleep(time.Millisecond)
		}
	}
	testkit.Eventually(t, "answers", func() bool { return len(answers) >= n*9/10 })
	x.offer("p", 5)
	if err := x.pull(t, "p", []int{1}); err != nil {
		t.Fatal(err)
	}
}

func TestCacheSizes(t *testing.T) {
	c := testCache(2, 32, 256)
	c.Regions[1].Stride = 512
	if _, err := NewSender(c, mooncake.SenderOptions{}); !errors.Is(err, mooncake.ErrCache) || !strings.Contains(err.Error(), "same size") {
		t.Fatal(err)
	}
	if got := SidePort(8998, 2, 4, 3); got != 8998+2*4+3 {
		t.Fatal(got)
	}
}

// Aborts of requests that travel in one pull do not fail the others, and an
// aborted request can be pulled again.
func TestAbortsInCompany(t *testing.T) {
	x := newPair(t, mooncake.SenderOptions{AbortTimeout: 20 * time.Second}, mooncake.ReceiverOptions{Timeout: 20 * time.Second})
	var pulls []wire.PullMeta
	for i := range 5 {
		id := fmt.Sprint("r", i)
		x.announce(id)
		pulls = append(pulls, wire.PullMeta{RequestID: id, Blocks: [][]int{{1 + i}}, Host: x.from.Host, Port: x.from.Port})
	}
	if err := x.receiver.Apply(&wire.Metadata{Pulls: pulls}); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the pull arrives", func() bool { return x.sender.Stats().Pulls == 1 })
	for i := range 3 {
		x.receiver.Abort(fmt.Sprint("r", i))
		time.Sleep(5 * time.Millisecond)
	}
	for i := range 5 {
		x.offer(fmt.Sprint("r", i), 10+i)
	}
	failed, n := map[string]error{}, 0
	testkit.Eventually(t, "all settle", func() bool {
		r := x.receiver.Results()
		n += len(r.Received)
		for id, err := range r.Failed {
			failed[id] = err
		}
		return n == 5
	})
	if len(failed) != 3 || failed["r3"] != nil || failed["r4"] != nil {
		t.Fatalf("failed: %v", failed)
	}
	// D sends the release of an aborted request after its result. The release ends the request that P has under that id at that time.
	testkit.Eventually(t, "P has freed all", func() bool { return x.sender.Stats().Transfers == 0 })
	x.announce("r0")
	x.offer("r0", 20)
	if err := x.pull(t, "r0", []int{1}); err != nil {
		t.Fatal(err)
	}
}

// One unknown request of a pull fails by itself.
func TestUnknownInCompany(t *testing.T) {
	x := newPair(t, mooncake.SenderOptions{AbortTimeout: 20 * time.Second}, mooncake.ReceiverOptions{Timeout: 20 * time.Second})
	x.announce("good")
	x.offer("good", 4)
	failed, err := x.receiver.Pull(t.Context(), x.from, map[string]wire.Wanted{"good": {TransferID: "", Blocks: [][]int{{1}}}, "unknown": {TransferID: "", Blocks: [][]int{{2}}}})
	if err != nil || len(failed) != 1 || !errors.Is(failed["unknown"], mooncake.ErrPeer) {
		t.Fatal(err, failed)
	}
	if !bytes.Equal(block(x.d, 1), block(x.p, 4)) {
		t.Fatal("wrong bytes")
	}
}
