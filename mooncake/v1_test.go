package mooncake

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/transfer"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// pairV1 is a P and a D of one worker each, in the dialect of 0.13.
type pairV1 struct {
	pair
	v1 *SenderV1
}

func newPairV1(t *testing.T, so SenderOptions, ro ReceiverOptions) *pairV1 {
	t.Helper()
	x := &pairV1{pair: pair{p: testCache(3, 32, 256), d: testCache(3, 32, 256), client: transfer.New(transfer.Options{})}}
	fill(x.p, 3)
	t.Cleanup(x.client.Close)
	so.Transfer, so.Log = x.client, testLog(t)
	var err error
	if x.v1, err = NewSenderV1(x.p, so); err != nil {
		t.Fatal(err)
	}
	if err := x.v1.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.v1.Close() })
	host, port, _ := net.SplitHostPort(strings.TrimPrefix(x.v1.Addr(), "tcp://"))
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

func (x *pairV1) offer(id string, blocks ...int) {
	x.v1.Apply(&Metadata{Sends: []SendMeta{{RequestID: id, Blocks: [][]int{blocks}}}})
}

func (x *pairV1) announce(id string) {
	x.v1.Apply(&Metadata{Sends: []SendMeta{{RequestID: id}}})
}

// Several requests of one step travel in one pull, which waits for the last of them.
func TestV1Pull(t *testing.T) {
	x := newPairV1(t, SenderOptions{}, ReceiverOptions{})
	x.announce("a")
	x.announce("b")
	err := x.receiver.Apply(&Metadata{Pulls: []PullMeta{
		{RequestID: "a", Blocks: [][]int{{1, 2}}, Host: x.from.Host, Port: x.from.Port},
		{RequestID: "b", Blocks: [][]int{{3}}, Host: x.from.Host, Port: x.from.Port},
	}})
	if err != nil {
		t.Fatal(err)
	}
	x.offer("a", 10, 11, 12)
	x.offer("b", 13)
	var got []string
	eventually(t, "both settle", func() bool {
		r := x.receiver.Results()
		got = append(got, r.Received...)
		return len(got) == 2 && len(r.Failed) == 0
	})
	for d, p := range map[int]int{1: 11, 2: 12, 3: 13} {
		if !bytes.Equal(block(x.d, 0, d), block(x.p, 0, p)) {
			t.Fatalf("block %d differs", d)
		}
	}
	var free []string
	eventually(t, "blocks freed", func() bool { free = append(free, x.v1.Finished()...); return len(free) == 2 })
	if err := x.pull(t, "a", "", []int{1}); !errors.Is(err, ErrPeer) {
		t.Fatalf("second pull: %v", err)
	}
}

func TestV1Failures(t *testing.T) {
	x := newPairV1(t, SenderOptions{AbortTimeout: 300 * time.Millisecond}, ReceiverOptions{Attempts: 2, Timeout: 10 * time.Second})
	if err := x.pull(t, "unknown", "", []int{1}); !errors.Is(err, ErrPeer) {
		t.Fatal(err)
	}
	x.announce("late")
	if err := x.pull(t, "late", "", []int{1}); !errors.Is(err, ErrPeer) { // P's patience
		t.Fatal(err)
	}
	x.announce("dropped")
	done := x.begin(t, "dropped", "", []int{1})
	eventually(t, "pull arrives", func() bool { return x.v1.Stats().Pulls == 1 })
	x.v1.Apply(&Metadata{NotProcessed: []string{"dropped"}})
	if err := wait(t, done); !errors.Is(err, ErrPeer) {
		t.Fatal(err)
	}
	x.offer("few", 1)
	if err := x.pull(t, "few", "", []int{1, 2}); !errors.Is(err, ErrPeer) {
		t.Fatal(err)
	}
	var free []string
	eventually(t, "its lease ends", func() bool { free = append(free, x.v1.Finished()...); return slices.Contains(free, "few") })
	x.offer("nobody", 2)
	eventually(t, "its lease ends", func() bool { free = append(free, x.v1.Finished()...); return slices.Contains(free, "nobody") })
	x.from.Port = 1
	if err := x.pull(t, "r", "", []int{1}); !errors.Is(err, ErrLost) || !strings.Contains(err.Error(), "127.0.0.1:1") {
		t.Fatal(err)
	}
	eventually(t, "old windows close", func() bool { return x.receiver.Stats().Windows <= 1 })
}

func TestV1Abort(t *testing.T) {
	x := newPairV1(t, SenderOptions{AbortTimeout: 20 * time.Second}, ReceiverOptions{})
	x.announce("a")
	done := x.begin(t, "a", "", []int{1})
	eventually(t, "pull arrives", func() bool { return x.v1.Stats().Pulls == 1 })
	x.receiver.Abort("a")
	if err := wait(t, done); !errors.Is(err, ErrAborted) {
		t.Fatal(err)
	}
	x.offer("a", 5)
	eventually(t, "P frees its blocks", func() bool { return slices.Contains(x.v1.Finished(), "a") })
}

func TestV1RandomMessages(t *testing.T) {
	x := newPairV1(t, SenderOptions{AbortTimeout: 50 * time.Millisecond}, ReceiverOptions{})
	answers := make(chan struct{}, 1<<14)
	dealer := zmtp.NewDealer(x.v1.Addr(), zmtp.DealerOptions{Handler: func(zmtp.Message) { answers <- struct{}{} }})
	if err := dealer.Start(); err != nil {
		t.Fatal(err)
	}
	defer dealer.Close()
	rng := rand.New(rand.NewPCG(9, 9))
	good := AppendPullV1(nil, &PullV1{Host: "127.0.0.1", Port: 1, Requests: []string{"a"}, Bases: []uint64{1}, Blocks: [][]int{{1}}})
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
	eventually(t, "answers", func() bool { return len(answers) >= n*9/10 })
	x.offer("p", 5)
	if err := x.pull(t, "p", "", []int{1}); err != nil {
		t.Fatal(err)
	}
}

func TestV1CacheSizes(t *testing.T) {
	c := testCache(2, 32, 256)
	c.Regions[1].Stride = 512
	if _, err := NewSenderV1(c, SenderOptions{}); !errors.Is(err, ErrCache) || !strings.Contains(err.Error(), "same size") {
		t.Fatal(err)
	}
	if got := SidePort(8998, 2, 4, 3); got != 8998+2*4+3 {
		t.Fatal(got)
	}
}
