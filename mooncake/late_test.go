// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// fakeP is a P that answers as told and keeps the pulls it got.
func fakeP(t *testing.T, handler func(peer *zmtp.Peer, p *wire.Pull)) string {
	r := zmtp.NewRouter(func(peer *zmtp.Peer, m zmtp.Message) {
		p, err := wire.DecodePull(m[0], 0)
		if err != nil {
			t.Error(err)
			return
		}
		handler(peer, p)
	}, zmtp.RouterOptions{})
	addr, err := r.Listen(t.Context(), "tcp://127.0.0.1:*")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return "tcp://" + addr.String()
}

// A P whose pull has failed goes on writing into D's blocks, which the next request
// already uses. No such write may arrive.
func TestLateWriter(t *testing.T) {
	const timeout = 300 * time.Millisecond
	x := small(t, SenderOptions{}, ReceiverOptions{Timeout: timeout, FenceTimeout: 50 * time.Millisecond})
	late := transfer.New(transfer.Options{})
	defer late.Close()
	garbage := bytes.Repeat([]byte{0xEE}, 256)
	var mu sync.Mutex
	var old []*wire.Pull
	var writes, rejected atomic.Int64
	stalled := fakeP(t, func(_ *zmtp.Peer, p *wire.Pull) { // says nothing, and will write
		mu.Lock()
		old = append(old, p)
		mu.Unlock()
	})
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { // one alone: late writers among themselves would race in the detector's eyes
		for ctx.Err() == nil {
			mu.Lock()
			pulls := slices.Clone(old)
			mu.Unlock()
			for _, p := range pulls {
				var batch []transfer.Entry
				for _, w := range p.Wanted {
					for _, id := range slices.Concat(w.Blocks...) {
						for _, g := range p.Regions {
							batch = append(batch, transfer.Entry{Local: garbage, Remote: g.Base + uint64(id)*g.Stride})
						}
					}
				}
				if len(batch) == 0 {
					continue
				}
				err := late.Write(ctx, net.JoinHostPort(p.Host, fmt.Sprint(p.Port)), batch)
				writes.Add(1)
				if err != nil {
					rejected.Add(1)
				}
			}
			time.Sleep(time.Millisecond)
		}
	})
	good := x.from
	for i := range 8 {
		x.dir.show("stalled", stalled)
		x.from.EngineID = "stalled"
		if err := x.pull(t, fmt.Sprint("d", i), "late", []int{1, 2, 3}); !errors.Is(err, ErrTimeout) {
			t.Fatal(err)
		}
		x.dir.show(good.EngineID, x.sender.Addr())
		x.from = good
		for try := 0; ; try++ {
			id := fmt.Sprintf("x%d-%d", i, try)
			x.sender.Offer("p"+id, id, [][]int{{10 + i, 11 + i, 12 + i}})
			began := time.Now()
			err := x.pull(t, "e"+id, id, []int{1, 2, 3})
			if err == nil {
				break
			}
			if took := time.Since(began); took < timeout*9/10 || try == 20 { // on a busy machine the pull may need all of the time
				t.Fatalf("after %v: %v", took, err)
			}
		}
		for end := time.Now().Add(50 * time.Millisecond); time.Now().Before(end); {
			for b := range 3 {
				x.target.Table().Observe()
				if !bytes.Equal(block(x.d, 0, 1+b), block(x.p, 0, 10+i+b)) {
					t.Fatal("a late write got through")
				}
			}
		}
	}
	testkit.Eventually(t, "late batches are rejected", func() bool { return writes.Load() > 0 && rejected.Load() > 0 })
	stop()
	wg.Wait()
	t.Logf("%d late batches, %d rejected", writes.Load(), rejected.Load())
	testkit.Eventually(t, "old windows close", func() bool { return x.receiver.Stats().Windows <= 1 })
}

// Without the fence the writes of the late P arrive, so TestLateWriter can fail.
func TestLateWriterReachesOpenWindow(t *testing.T) {
	x := small(t, SenderOptions{}, ReceiverOptions{Timeout: 5 * time.Second})
	late := transfer.New(transfer.Options{})
	defer late.Close()
	got := make(chan *wire.Pull, 1)
	addr := fakeP(t, func(_ *zmtp.Peer, p *wire.Pull) { got <- p })
	x.dir.show("fake", addr)
	x.from.EngineID = "fake"
	done := x.begin(t, "d", "x", []int{1})
	p := <-got
	err := late.Write(t.Context(), net.JoinHostPort(p.Host, fmt.Sprint(p.Port)),
		[]transfer.Entry{{Local: []byte{1, 2, 3}, Remote: p.Regions[0].Base + p.Regions[0].Stride}})
	if err != nil {
		t.Fatal(err)
	}
	x.receiver.Abort("d")
	if err := wait(t, done); !errors.Is(err, ErrAborted) {
		t.Fatal(err)
	}
	if x.target.Table().Observe(); !bytes.HasPrefix(block(x.d, 0, 1), []byte{1, 2, 3}) {
		t.Fatal("the write did not arrive")
	}
}

// An engine of which no worker has registered yet fails the pull; another engine's
// pull goes on.
func TestEngineWithoutWorkers(t *testing.T) {
	x := small(t, SenderOptions{}, ReceiverOptions{})
	good := x.from
	x.from.EngineID = "half"
	x.dir.show("half")
	if err := x.pull(t, "d1", "x", []int{1}); !errors.Is(err, ErrNoEngine) {
		t.Fatal(err)
	}
	x.from = good
	x.dir.show(good.EngineID, x.sender.Addr())
	x.sender.Offer("p", "x", [][]int{{1}})
	if err := x.pull(t, "d2", "x", []int{1}); err != nil {
		t.Fatal(err)
	}
}
