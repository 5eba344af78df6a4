// SPDX-License-Identifier: Apache-2.0

package relay_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/mooncake/relay"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// stuckWrite begins to write the first of list and stops in the middle of it.
func stuckWrite(t *testing.T, p *wire.Pull, list []transfer.Entry) {
	c := transfer.New(transfer.Options{})
	defer c.Close()
	d, err := c.Describe(t.Context(), net.JoinHostPort(p.Host, strconv.Itoa(p.Port)))
	if err != nil {
		t.Error(err)
		return
	}
	k, err := net.Dial("tcp", net.JoinHostPort(d.DataHost, strconv.Itoa(d.DataPort)))
	if err != nil {
		t.Error(err)
		return
	}
	t.Cleanup(func() { k.Close() })
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(list[0].Local)))
	b = binary.LittleEndian.AppendUint64(b, list[0].Remote)
	_, _ = k.Write(append(append(b, 1, 0, 0, 0, 0, 0, 0, 0), list[0].Local[:16]...))
}

// When a D goes away, the relay ends the load for it. This takes a while where P is in the middle
// of a write. Another D that asks for the transfer meanwhile is served, and so is the same D when
// it comes back.
func TestLoadThatEndsIsNotShared(t *testing.T) {
	for _, same := range []bool{false, true} {
		w := newWorld(t, relay.Options{Timeout: 20 * time.Second})
		p := transfer.New(transfer.Options{})
		defer p.Close()
		var pulls atomic.Int32
		stuck := make(chan struct{})
		addr := fakeP(t, func(peer *zmtp.Peer, pull *wire.Pull) {
			if len(pull.Wanted["x"].Blocks) == 0 {
				return
			}
			first := pulls.Add(1) == 1
			go func() {
				if first {
					stuckWrite(t, pull, entries(pull, "x", 0xAA))
					close(stuck)
					return
				}
				if err := p.Write(t.Context(), net.JoinHostPort(pull.Host, strconv.Itoa(pull.Port)), entries(pull, "x", 0xBB)); err != nil {
					t.Error(err)
				}
				reply(peer, wire.Reply{Status: wire.StatusFinish, OK: []string{"x"}})
			}()
		})
		w.show(map[string]string{"fake": addr})
		host, port, _ := net.SplitHostPort(w.target.Name())
		n, _ := strconv.Atoi(port)
		regions := memory(2 * payload).Regions
		for i := range regions {
			h, err := w.target.Table().Publish(w.d.Storages[i].Mem)
			if err != nil {
				t.Fatal(err)
			}
			regions[i].Base = h[0].Range().Addr
		}
		pull := &wire.Pull{
			Host: host, Port: n, TPSize: 1, Regions: regions,
			Wanted: map[string]wire.Wanted{"first": {TransferID: "x", Blocks: [][]int{{1}, {2}}}},
		}
		gone := w.channel()
		gone.send(pull)
		<-stuck
		gone.dealer.Close()
		testkit.Eventually(t, "the load is being ended", func() bool { requests, loads := w.relay.Waiting(); return requests+loads == 0 })
		if !same {
			pull.Wanted = map[string]wire.Wanted{"second": {TransferID: "x", Blocks: [][]int{{1}, {2}}}}
		}
		again := w.channel()
		again.send(pull)
		y := again.next(30 * time.Second)
		if y == nil || len(y.OK) != 1 {
			t.Fatalf("same D: %v: %+v", same, y)
		}
		w.target.Table().Observe()
		for _, b := range [][]byte{block(w.d, 0, 1), block(w.d, 1, 2)} {
			if !bytes.Equal(b, bytes.Repeat([]byte{0xBB}, len(b))) {
				t.Fatal("other bytes")
			}
		}
	}
}

// slowMemory is a D's memory whose first write waits.
type slowMemory struct {
	begun, goOn chan struct{}
	writes      atomic.Int32
	mem         []byte
}

func (m *slowMemory) WriteAt(b []byte, off int64) (int, error) {
	if m.writes.Add(1) == 1 {
		close(m.begun)
		<-m.goOn
	}
	return copy(m.mem[off:], b), nil
}

// A D that lost its connection in the middle of a push, and asks again before the
// relay has ended that push, gets its blocks; P, which has sent them, is not needed.
func TestAskedAgainWhileThePushEnds(t *testing.T) {
	w := newWorld(t, relay.Options{Timeout: 20 * time.Second})
	p := transfer.New(transfer.Options{})
	defer p.Close()
	var pulls atomic.Int32
	addr := fakeP(t, func(peer *zmtp.Peer, pull *wire.Pull) {
		if len(pull.Wanted["x"].Blocks) == 0 {
			return
		}
		if pulls.Add(1) > 1 {
			reply(peer, wire.Reply{Status: wire.StatusFinish, Failed: []string{"x"}, Message: "freed"})
			return
		}
		go func() {
			if err := p.Write(t.Context(), net.JoinHostPort(pull.Host, strconv.Itoa(pull.Port)), entries(pull, "x", 0xBB)); err != nil {
				t.Error(err)
			}
			reply(peer, wire.Reply{Status: wire.StatusFinish, OK: []string{"x"}})
		}()
	})
	w.show(map[string]string{"fake": addr})
	slow := &slowMemory{begun: make(chan struct{}), goOn: make(chan struct{}), mem: make([]byte, blocks*payload*layers)}
	at := transfer.Range{Addr: 1 << 40, Len: uint64(len(slow.mem))}
	if _, err := w.target.Table().RegisterFunc(at, nil, slow); err != nil {
		t.Fatal(err)
	}
	regions := memory(payload).Regions
	for i := range regions {
		regions[i].Base = at.Addr + uint64(i)*blocks*payload
	}
	host, port, _ := net.SplitHostPort(w.target.Name())
	n, _ := strconv.Atoi(port)
	pull := &wire.Pull{
		Host: host, Port: n, TPSize: 1, Regions: regions,
		Wanted: map[string]wire.Wanted{"d": {TransferID: "x", Blocks: [][]int{{1}, {2}}}},
	}
	gone := w.channel()
	gone.send(pull)
	<-slow.begun
	gone.dealer.Close()
	waiting := func(n int) func() bool {
		return func() bool { requests, _ := w.relay.Waiting(); return requests == n }
	}
	testkit.Eventually(t, "the relay knows that D is gone", waiting(0))
	again := w.channel()
	again.send(pull)
	testkit.Eventually(t, "D waits again", waiting(1))
	close(slow.goOn)
	y := again.next(30 * time.Second)
	if y == nil || len(y.OK) != 1 {
		t.Fatalf("%+v", y)
	}
	w.target.Table().Observe()
	for i, b := range []int{1, 2, 1, 2} {
		got := slow.mem[(i*blocks+b)*payload:][:payload]
		if !bytes.Equal(got, bytes.Repeat([]byte{0xBB}, payload)) {
			t.Fatalf("layer %d: other bytes", i)
		}
	}
}

// A D that gives up tells P to free its blocks. The relay passes that on also while the load of the transfer is still ending, and once.
func TestReleaseDuringALoadThatEnds(t *testing.T) {
	w := newWorld(t, relay.Options{Timeout: 20 * time.Second})
	stuck := make(chan struct{})
	var released atomic.Int32
	addr := fakeP(t, func(peer *zmtp.Peer, pull *wire.Pull) {
		for id, want := range pull.Wanted {
			if len(want.Blocks) == 0 || len(want.Blocks[0]) == 0 {
				released.Add(1)
				reply(peer, wire.Reply{Status: wire.StatusFinish, OK: []string{id}})
				return
			}
		}
		go func() {
			stuckWrite(t, pull, entries(pull, "x", 0xAA))
			close(stuck)
		}()
	})
	w.show(map[string]string{"fake": addr})
	host, port, _ := net.SplitHostPort(w.target.Name())
	n, _ := strconv.Atoi(port)
	pull := &wire.Pull{
		Host: host, Port: n, TPSize: 1, Regions: memory(2 * payload).Regions,
		Wanted: map[string]wire.Wanted{"d": {TransferID: "x", Blocks: [][]int{{1}, {2}}}},
	}
	gone := w.channel()
	gone.send(pull)
	<-stuck
	gone.dealer.Close()
	pull.Wanted = map[string]wire.Wanted{"d#release": {TransferID: "x"}}
	again := w.channel()
	again.send(pull)
	if y := again.next(30 * time.Second); y == nil || len(y.OK) != 1 {
		t.Fatalf("%+v", y)
	}
	if n := released.Load(); n != 1 {
		t.Fatalf("P was told %d times to free its blocks", n)
	}
}

// When P does not answer in time, the relay releases P's blocks. D cannot do so: it gets an error from the relay and has no connection to P.
func TestReleaseAfterATimeout(t *testing.T) {
	w := newWorld(t, relay.Options{Timeout: 300 * time.Millisecond})
	released := make(chan struct{}, 8)
	addr := fakeP(t, func(peer *zmtp.Peer, pull *wire.Pull) {
		if want := pull.Wanted["x"]; len(want.Blocks) == 0 || len(want.Blocks[0]) == 0 {
			released <- struct{}{}
			reply(peer, wire.Reply{Status: wire.StatusFinish, OK: []string{"x"}})
		}
	})
	w.show(map[string]string{"fake": addr})
	if err := w.pull("x", []int{1}, []int{2}); !errors.Is(err, mooncake.ErrPeer) {
		t.Fatal(err)
	}
	select {
	case <-released:
	case <-time.After(30 * time.Second):
		t.Fatal("P keeps the blocks")
	}
}
