// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"bytes"
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

// silentD is a D whose data port accepts and never reads.
func silentD(t testing.TB) (host string, port int) {
	data, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	hs, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { data.Close(); hs.Close() })
	go func() {
		for {
			c, err := data.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { c.Close() })
		}
	}()
	text := fmt.Sprintf(`{"buffers":[],"name":"%s","protocol":"tcp","tcp_data_host":"127.0.0.1","tcp_data_port":%d,"tcp_proto_version":2,"timestamp":""}`,
		hs.Addr(), data.Addr().(*net.TCPAddr).Port)
	frame := append(binary.LittleEndian.AppendUint64(nil, uint64(len(text)+1)), 1)
	frame = append(frame, text...)
	go func() {
		for {
			c, err := hs.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = c.Read(make([]byte, 4096))
				_, _ = c.Write(frame)
				_, _ = c.Read(make([]byte, 1))
			}()
		}
	}()
	return "127.0.0.1", hs.Addr().(*net.TCPAddr).Port
}

// ask sends pulls by hand.
func ask(t testing.TB, addr string, p *wire.Pull) (*zmtp.Dealer, <-chan *wire.Reply) {
	t.Helper()
	replies := make(chan *wire.Reply, 64)
	d := zmtp.NewDealer(addr, zmtp.DealerOptions{Handler: func(m zmtp.Message) {
		if y, err := wire.DecodeReply(m[0], 0); err == nil {
			replies <- y
		}
	}})
	if err := d.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	if err := d.Send(wire.AppendPull(nil, p, 0)); err != nil {
		t.Fatal(err)
	}
	return d, replies
}

func next(t *testing.T, replies <-chan *wire.Reply) *wire.Reply {
	t.Helper()
	select {
	case y := <-replies:
		return y
	case <-time.After(60 * time.Second):
		t.Fatal("no reply")
		return nil
	}
}

// A D that accepts connections and reads nothing, with more pulls than there are
// pushes at a time, does not hold up another D.
func TestSilentDBesideAnother(t *testing.T) {
	x := newPair(t, testCache(2, 64, 4<<20), testCache(2, 64, 4<<20), SenderOptions{Workers: 4}, ReceiverOptions{Timeout: 60 * time.Second})
	host, port := silentD(t)
	for i := range 24 {
		id := fmt.Sprint("silent", i)
		x.sender.Offer("p"+id, id, [][]int{{0, 1, 2, 3}})
		ask(t, x.sender.Addr(), &wire.Pull{
			Host: host, Port: port, TPSize: 1, PPSize: 1, Regions: x.d.Regions,
			Wanted: map[string]wire.Wanted{"d" + id: {TransferID: id, Blocks: [][]int{{0, 1, 2, 3}}}},
		})
	}
	testkit.Eventually(t, "pushes to the silent D", func() bool {
		x.sender.push.mu.Lock()
		defer x.sender.push.mu.Unlock()
		for _, p := range x.sender.push.mu.peers {
			return len(p.slots) == 4 && p.users == 24
		}
		return false
	})
	for i := range 4 {
		id := fmt.Sprint("good", i)
		x.sender.Offer("p"+id, id, [][]int{{5}})
		start := time.Now()
		if err := x.pull(t, "d"+id, id, []int{5}); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took > 25*time.Second {
			t.Fatalf("held up for %v", took)
		}
	}
}

// P takes as many pulls as it may, all for transfers that it does not know. It fails one of them
// to make room for a D whose blocks are ready.
func TestForgottenPullsMakeRoom(t *testing.T) {
	x := small(t, SenderOptions{MaxPulls: 8}, ReceiverOptions{})
	var answers []<-chan *wire.Reply
	for i := range 8 {
		_, got := ask(t, x.sender.Addr(), &wire.Pull{
			Host: "127.0.0.1", Port: 9 + i%2, TPSize: 1, PPSize: 1, Regions: x.d.Regions,
			Wanted: map[string]wire.Wanted{"d": {TransferID: fmt.Sprint("forgotten", i), Blocks: [][]int{{1, 2}}}},
		})
		answers = append(answers, got)
	}
	testkit.Eventually(t, "pulls wait", func() bool { return x.sender.Stats().Pulls == 8 && x.sender.Stats().Transfers == 8 })
	time.Sleep(20 * time.Millisecond)
	for i := range 3 {
		id := fmt.Sprint("good", i)
		x.sender.Offer("p"+id, id, [][]int{{1}})
		if err := x.pull(t, "d"+id, id, []int{1}); err != nil {
			t.Fatal(err)
		}
	}
	testkit.Eventually(t, "somebody makes room", func() bool {
		for _, a := range answers {
			select {
			case y := <-a:
				if y.Status != wire.StatusError {
					t.Fatalf("%+v", y)
				}
				return true
			default:
			}
		}
		return false
	})
}

// A full gate evicts pulls of the peer with the most pulls for another peer, and not the other way round.
func TestGateShares(t *testing.T) {
	g := NewGate(8)
	evicted := map[string]int{}
	enter := func(peer string, size int) (*Ticket, error) {
		return g.Enter(peer, size, func(error) { evicted[peer]++ })
	}
	for range 8 {
		if _, err := enter("a", 1); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := enter("a", 1); err == nil {
		t.Fatal("more than the gate takes")
	}
	for range 4 {
		if _, err := enter("b", 1); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := enter("b", 1); err == nil {
		t.Fatal("b has as many as a")
	}
	if evicted["a"] != 4 || evicted["b"] != 0 || g.Len() != 8 {
		t.Fatalf("evicted %v, in %d", evicted, g.Len())
	}
	c, err := enter("c", maxPendingBytes-7)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := enter("a", 100); err == nil {
		t.Fatal("more bytes than the gate takes")
	}
	c.Leave()
	if _, err := enter("a", 100); err != nil {
		t.Fatal(err)
	}
}

// P frees blocks when each rank of D has them, however often one of them asks, and
// from wherever: rank 0 asks again, then comes back at another address.
func TestEachRankCountsOnce(t *testing.T) {
	x := newPair(t, testCache(2, 32, 256), testCache(2, 32, 128), SenderOptions{AbortTimeout: 20 * time.Second},
		ReceiverOptions{Self: Peer{TPRank: 0, TPSize: 2}})
	fill(x.p, 1)
	rank := func(n int) *Receiver {
		target, err := transfer.Listen(transfer.TargetOptions{}, transfer.NewTable())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { target.Close() })
		r, err := NewReceiver(testCache(2, 32, 128), ReceiverOptions{Self: Peer{TPRank: n, TPSize: 2}, Target: target, Log: testLog(t)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { r.Close() })
		return r
	}
	x.sender.Offer("p", "x", [][]int{{1, 2}})
	for i, r := range []*Receiver{x.receiver, x.receiver, rank(0), rank(1)} {
		if got := x.sender.Finished(); len(got) > 0 {
			t.Fatalf("before pull %d P frees %v: rank 1 has not pulled", i, got)
		}
		failed, err := r.Pull(t.Context(), x.from, map[string]wire.Wanted{"d": {TransferID: "x", Blocks: [][]int{{1, 2}}}})
		if err != nil || len(failed) > 0 {
			t.Fatal(err, failed)
		}
	}
	if got := x.sender.Finished(); len(got) != 1 || got[0] != "p" {
		t.Fatalf("finished %v", got)
	}
}

// D of two pipeline stages at one TP rank: both must have the blocks.
func TestEachStageCounts(t *testing.T) {
	x := small(t, SenderOptions{}, ReceiverOptions{})
	x.sender.Offer("p", "x", [][]int{{1}})
	table := x.target.Table()
	for stage, target := range []*transfer.Target{x.target, nil} {
		if target == nil {
			var err error
			if target, err = transfer.Listen(transfer.TargetOptions{}, table); err != nil {
				t.Fatal(err)
			}
			defer target.Close()
		}
		r, err := NewReceiver(x.d, ReceiverOptions{Self: Peer{TPSize: 1, PPSize: 2}, Target: target, Log: testLog(t)})
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		for range 2 - stage {
			failed, err := r.Pull(t.Context(), x.from, map[string]wire.Wanted{"d": {TransferID: "x", Blocks: [][]int{{1}}}})
			if err != nil || len(failed) > 0 {
				t.Fatal(err, failed)
			}
		}
		if got := x.sender.Finished(); len(got) != stage {
			t.Fatalf("after stage %d: finished %v", stage, got)
		}
	}
}

// P's last answer is lost with the connection. D asks again, and P answers at once that D's
// blocks are filled. P does not answer so to another D.
func TestLostLastReply(t *testing.T) {
	x := small(t, SenderOptions{}, ReceiverOptions{})
	x.sender.Offer("p", "x", [][]int{{1, 2}})
	w, err := x.receiver.windows.open(x.from)
	if err != nil {
		t.Fatal(err)
	}
	defer x.receiver.windows.withdraw(w)
	pull := &wire.Pull{
		Host: x.receiver.host, Port: x.receiver.port, TPSize: 1, PPSize: 1, Regions: w.regions, DeadlineMillis: 30000,
		Wanted: map[string]wire.Wanted{"d": {TransferID: "x", Blocks: [][]int{{1, 2}}}},
	}
	for range 3 {
		d, replies := ask(t, x.sender.Addr(), pull)
		if y := next(t, replies); len(y.OK) != 1 || y.Status != wire.StatusFinish {
			t.Fatalf("%+v", y)
		}
		d.Close() // as if the answer had been lost
		testkit.Eventually(t, "P sees D go", func() bool { return x.sender.router.Stats().Peers == 0 })
	}
	if s := x.sender.Stats(); s.Pushed != 1 || s.Transfers != 0 {
		t.Fatalf("%+v", s)
	}
	stranger := *pull
	stranger.Port++
	if _, replies := ask(t, x.sender.Addr(), &stranger); len(next(t, replies).Failed) != 1 {
		t.Fatal("another D hears that its blocks are filled")
	}
	x.sender.Offer("p2", "x", [][]int{{5, 6}}) // the id comes again, with another prompt
	d, replies := ask(t, x.sender.Addr(), pull)
	if y := next(t, replies); len(y.OK) != 1 {
		t.Fatalf("%+v", y)
	}
	if x.target.Table().Observe(); !bytes.Equal(block(x.d, 0, 1), block(x.p, 0, 5)) {
		t.Fatal("the earlier prompt's blocks")
	}
	// Until P has noted that the blocks are filled, it pushes them again to a D that asks.
	testkit.Eventually(t, "P notes that the blocks are filled", func() bool { return x.sender.Stats().Transfers == 0 })
	// The connection d is still open, so D has got the answer, and may use the blocks for something else: P says unknown.
	// When d breaks, D may not have got the answer: P says that the blocks are filled.
	_, again := ask(t, x.sender.Addr(), pull)
	if len(next(t, again).Unknown) != 1 {
		t.Fatal("blocks are said to be filled that were not pushed again")
	}
	d.Close()
	if y := next(t, again); len(y.OK) != 1 || y.Status != wire.StatusFinish {
		t.Fatalf("%+v", y)
	}
}

// A transfer id that two requests of P have: the first one's blocks are given back.
func TestOfferUnderAnotherRequestsID(t *testing.T) {
	x := small(t, SenderOptions{AbortTimeout: 100 * time.Millisecond}, ReceiverOptions{})
	x.sender.Offer("p1", "x", [][]int{{1}})
	x.sender.Offer("p2", "x", [][]int{{2}})
	var got []string
	testkit.Eventually(t, "both are freed", func() bool { got = append(got, x.sender.Finished()...); return len(got) == 2 })
	if got[0] != "p1" || got[1] != "p2" {
		t.Fatalf("finished %v", got)
	}
}

// A request without a transfer id fails by itself.
func TestEmptyTransferID(t *testing.T) {
	x := small(t, SenderOptions{}, ReceiverOptions{})
	x.sender.Offer("p", "x", [][]int{{1}})
	failed, err := x.receiver.Pull(t.Context(), x.from, map[string]wire.Wanted{"d": {TransferID: "x", Blocks: [][]int{{1}}}, "e": {TransferID: "", Blocks: [][]int{{2}}}})
	if err != nil || len(failed) != 1 || !errors.Is(failed["e"], ErrPeer) {
		t.Fatal(err, failed)
	}
}

// The layouts of one D do not push out those of the others.
func TestLayoutShares(t *testing.T) {
	var c layoutCache
	plan := new(PushPlan)
	c.put(layoutKey{host: "h", port: 1, id: 1}, plan)
	for i := range uint64(5000) {
		c.put(layoutKey{host: "h", port: 2, id: i}, plan)
	}
	if c.get(layoutKey{host: "h", port: 1, id: 1}) == nil || c.get(layoutKey{host: "h", port: 2, id: 4999}) == nil {
		t.Fatal("gone")
	}
	if c.get(layoutKey{host: "h", port: 2, id: 4000}) != nil || len(c.mu.plans) != maxOfOneD+1 {
		t.Fatalf("%d layouts", len(c.mu.plans))
	}
	for i := range 2000 {
		c.put(layoutKey{host: "h", port: 10 + i, id: 1}, plan)
	}
	if len(c.mu.plans) != maxLayouts || len(c.mu.byD) != maxLayouts || c.mu.order.Len() != maxLayouts {
		t.Fatalf("%d layouts of %d D's", len(c.mu.plans), len(c.mu.byD))
	}
}
