// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// more puts engines of one worker each into the directory, beside P.
func (x *pair) more(addrs map[string]string) {
	text, dp := fmt.Sprintf(`{"0":{"engine_id":%q,"worker_addr":{"0":{"0":%q}}}`, x.sender.EngineID(), x.sender.Addr()), 0
	for id, addr := range addrs {
		dp++
		text += fmt.Sprintf(`,"%d":{"engine_id":%q,"worker_addr":{"0":{"0":%q}}}`, dp, id, addr)
	}
	x.dir.mu.Lock()
	x.dir.text = text + "}"
	x.dir.mu.Unlock()
}

func (x *pair) source(engine string) Source {
	return Source{EngineID: engine, Bootstrap: x.from.Bootstrap}
}

// refuse answers that no request of a pull is filled.
func refuse(peer *zmtp.Peer, p *wire.Pull) {
	y := wire.Reply{Status: wire.StatusFinish, Message: "no"}
	for id := range p.Wanted {
		y.Failed = append(y.Failed, id)
	}
	_ = peer.Send(wire.AppendReply(nil, &y))
	peer.Flush()
}

// One P refuses every pull, a second P is slow. The refusing P uses windows of its own: a third
// P's pulls arrive, and those of the slow P continue.
func TestFailuresOfOneP(t *testing.T) {
	const layers, rounds = 160, 60 // each window has 160 storages
	x := newPair(t, testCache(layers, 512, 64), testCache(layers, 512, 64), SenderOptions{}, ReceiverOptions{Timeout: 60 * time.Second})
	fill(x.p, 1)
	type asked struct {
		peer *zmtp.Peer
		pull *wire.Pull
	}
	slow := make(chan asked, rounds)
	x.more(map[string]string{
		"slow": fakeP(t, func(peer *zmtp.Peer, p *wire.Pull) { slow <- asked{peer, p} }),
		"bad": fakeP(t, func(peer *zmtp.Peer, p *wire.Pull) {
			if p.Wanted["long"].TransferID == "" {
				refuse(peer, p)
			}
		}),
	})
	if err := x.receiver.Start(x.source("bad"), map[string]wire.Wanted{"long": {TransferID: "long", Blocks: [][]int{{500}}}}); err != nil {
		t.Fatal(err)
	}
	for i := range rounds {
		if err := x.receiver.Start(x.source("slow"), map[string]wire.Wanted{fmt.Sprint("s", i): {TransferID: fmt.Sprint("s", i), Blocks: [][]int{{i}}}}); err != nil {
			t.Fatal(err)
		}
		// The same block again and again: each failure closes it where it is.
		failed, err := x.receiver.Pull(t.Context(), x.source("bad"), map[string]wire.Wanted{"b": {TransferID: "b", Blocks: [][]int{{300}}}})
		if err != nil || !errors.Is(failed["b"], ErrPeer) {
			t.Fatal(err, failed)
		}
		id := fmt.Sprint("g", i)
		x.sender.Offer("p"+id, id, [][]int{{i}})
		if err := x.pull(t, "d"+id, id, []int{400}); err != nil {
			t.Fatalf("after %d failures of another P: %v", i+1, err)
		}
	}
	if n := x.receiver.Stats().Windows; n > 20 {
		t.Errorf("%d windows", n)
	}
	p := transfer.New(transfer.Options{})
	defer p.Close()
	for range rounds {
		a := <-slow
		for id := range a.pull.Wanted {
			if err := write(p, t, a.pull, id, 9); err != nil {
				t.Fatal(err)
			}
		}
		ok(a.peer, a.pull)
	}
	testkit.Eventually(t, "the slow P's pulls arrive", func() bool { return x.receiver.Stats().Active <= 1 })
	r := x.receiver.Results()
	for i := range rounds {
		if err := r.Failed[fmt.Sprint("s", i)]; err != nil {
			t.Errorf("s%d: %v", i, err)
		}
	}
}

// When a P has more failures in flight than it may have windows, its oldest pulls fail. Pulls
// from other P's do not.
func TestTooManyWindowsOfOneP(t *testing.T) {
	x := newPair(t, testCache(1500, 16, 64), testCache(1500, 16, 64), SenderOptions{}, ReceiverOptions{Timeout: 60 * time.Second})
	x.more(map[string]string{"bad": fakeP(t, func(peer *zmtp.Peer, p *wire.Pull) {
		if p.Wanted["b"].TransferID != "" {
			refuse(peer, p)
		}
	})})
	for i := range 6 {
		id := fmt.Sprint("held", i) // keeps the window alive
		if err := x.receiver.Start(x.source("bad"), map[string]wire.Wanted{id: {TransferID: id, Blocks: [][]int{{i}}}}); err != nil {
			t.Fatal(err)
		}
		failed, err := x.receiver.Pull(t.Context(), x.source("bad"), map[string]wire.Wanted{"b": {TransferID: "b", Blocks: [][]int{{15, 0, 1, 2, 3, 4, 5}}}})
		if err != nil || !errors.Is(failed["b"], ErrPeer) {
			t.Fatal(err, failed)
		}
		id = fmt.Sprint("g", i)
		x.sender.Offer("p"+id, id, [][]int{{1}})
		if err := x.pull(t, "d"+id, id, []int{10}); err != nil {
			t.Fatal(err)
		}
	}
	ended := 0
	testkit.Eventually(t, "old pulls end", func() bool {
		for id, err := range x.receiver.Results().Failed {
			if id == "b" {
				continue
			}
			if !errors.Is(err, errWindowEnded) {
				t.Fatalf("%s: %v", id, err)
			}
			ended++
		}
		return ended > 0 && x.receiver.Stats().Windows <= 2
	})
}

// Hundreds of answers come while a write into a failed request's blocks is under way:
// none is lost.
func TestAnswersDuringAFence(t *testing.T) {
	const n = 400
	x := newPair(t, testCache(2, n+2, 64), testCache(2, n+2, 64), SenderOptions{}, ReceiverOptions{Timeout: 30 * time.Second})
	p := transfer.New(transfer.Options{})
	defer p.Close()
	x.more(map[string]string{"fake": fakeP(t, func(peer *zmtp.Peer, pull *wire.Pull) {
		if len(pull.Wanted) < n {
			return
		}
		conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", x.target.Descriptor().DataPort))
		if err != nil {
			t.Error(err)
		}
		t.Cleanup(func() { conn.Close() })
		b := binary.LittleEndian.AppendUint64(nil, 64) // half a write into the block of d0
		b = binary.LittleEndian.AppendUint64(b, pull.Regions[0].Base+pull.Regions[0].Stride)
		b = append(b, 0x81, 0, 0, 0, 0, 0, 0, 0)
		conn.Write(append(b, make([]byte, 32)...))
		for i := 1; i < n; i++ {
			if err := write(p, t, pull, fmt.Sprint("d", i), byte(i)); err != nil {
				t.Error(err)
			}
		}
		go func() {
			time.Sleep(50 * time.Millisecond)
			_ = peer.Send(wire.AppendReply(nil, &wire.Reply{Status: wire.StatusContinue, Failed: []string{"d0"}, Message: "no"}))
			for i := 1; i < n; i++ {
				s := wire.StatusContinue
				if i == n-1 {
					s = wire.StatusFinish
				}
				_ = peer.Send(wire.AppendReply(nil, &wire.Reply{Status: s, OK: []string{fmt.Sprint("d", i)}}))
			}
			peer.Flush()
		}()
	})})
	wanted := map[string]wire.Wanted{}
	for i := range n {
		wanted[fmt.Sprint("d", i)] = wire.Wanted{TransferID: fmt.Sprint("x", i), Blocks: [][]int{{i + 1}}}
	}
	failed, err := x.receiver.Pull(t.Context(), x.source("fake"), wanted)
	if err != nil || len(failed) != 1 || !errors.Is(failed["d0"], ErrPeer) {
		t.Fatalf("%v; %d of %d failed", err, len(failed), n)
	}
}

// A stock P pushes several requests in one batch, with one result of its engine. D aborts one of
// them. The others arrive, and D frees the blocks of the aborted one only then.
func TestAbortedRequestInCompany(t *testing.T) {
	x := small(t, SenderOptions{}, ReceiverOptions{})
	p := transfer.New(transfer.Options{})
	defer p.Close()
	arrived, goOn := make(chan struct{}), make(chan struct{})
	x.more(map[string]string{"stock": fakeP(t, func(peer *zmtp.Peer, pull *wire.Pull) {
		if len(pull.Wanted) < 4 {
			refuse(peer, pull)
			return
		}
		close(arrived)
		go func() {
			<-goOn
			for id := range pull.Wanted {
				if err := write(p, t, pull, id, 7); err != nil {
					refuse(peer, pull)
					return
				}
			}
			ok(peer, pull)
		}()
	})})
	wanted := map[string]wire.Wanted{}
	for i := range 4 {
		wanted[fmt.Sprint("d", i)] = wire.Wanted{TransferID: fmt.Sprint("x", i), Blocks: [][]int{{2*i + 1}}}
	}
	if err := x.receiver.Start(x.source("stock"), wanted); err != nil {
		t.Fatal(err)
	}
	<-arrived
	x.receiver.Abort("d0")
	time.Sleep(50 * time.Millisecond)
	if r := x.receiver.Results(); len(r.Received) > 0 {
		t.Fatalf("blocks are given back while P may write: %+v", r)
	}
	close(goOn)
	testkit.Eventually(t, "all settle", func() bool { return x.receiver.Stats().Active == 0 })
	r := x.receiver.Results()
	if len(r.Received) != 4 || len(r.Failed) != 1 || !errors.Is(r.Failed["d0"], ErrAborted) {
		t.Fatalf("%+v", r)
	}
	x.target.Table().Observe()
	for i := 1; i < 4; i++ {
		if got := block(x.d, 0, 2*i+1); !bytes.Equal(got, bytes.Repeat([]byte{7}, len(got))) {
			t.Fatalf("d%d holds %x", i, got[:4])
		}
	}
}

// A context that ends ends its pull at once, also while the bootstrap server says
// nothing; another pull is not touched.
func TestPullEndsWithItsContext(t *testing.T) {
	x := small(t, SenderOptions{}, ReceiverOptions{Timeout: 60 * time.Second})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	x.sender.Expect("p", "x")
	other := x.begin(t, "other", "x", []int{5})
	testkit.Eventually(t, "the other pull waits at P", func() bool { return x.sender.Stats().Pulls == 1 })
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		from := Source{EngineID: "e", Bootstrap: "http://" + l.Addr().String()}
		failed, err := x.receiver.Pull(ctx, from, map[string]wire.Wanted{"d": {TransferID: "y", Blocks: [][]int{{1}}}})
		done <- errors.Join(err, failed["d"])
	}()
	select {
	case err := <-done:
		if !errors.Is(err, ErrAborted) {
			t.Fatal(err)
		}
	case <-time.After(60 * time.Second):
		t.Fatal("the pull outlives its context")
	}
	x.sender.Offer("p", "x", [][]int{{1}})
	if err := wait(t, other); err != nil {
		t.Fatal(err)
	}
}
