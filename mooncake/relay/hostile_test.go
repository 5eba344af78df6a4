// SPDX-License-Identifier: Apache-2.0

package relay_test

import (
	"encoding/binary"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/mooncake/relay"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// channel is a connection to the relay's side channel, as a D has it.
type channel struct {
	t       *testing.T
	dealer  *zmtp.Dealer
	replies chan *wire.Reply
}

func (w *world) channel() *channel {
	w.t.Helper()
	c := &channel{t: w.t, replies: make(chan *wire.Reply, 1024)}
	c.dealer = zmtp.NewDealer(w.sideChannel(), zmtp.DealerOptions{Log: logger(), Handler: func(m zmtp.Message) {
		y, err := wire.DecodeReply(m[0], 0)
		if err != nil {
			w.t.Error(err)
		}
		c.replies <- y
	}})
	if err := c.dealer.Start(); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { c.dealer.Close() })
	return c
}

func (c *channel) send(p *wire.Pull) {
	c.t.Helper()
	if err := c.dealer.Send(wire.AppendPull(nil, p, 0)); err != nil {
		c.t.Fatal(err)
	}
}

// next returns the next reply, or nil when none comes in time.
func (c *channel) next(atMost time.Duration) *wire.Reply {
	select {
	case y := <-c.replies:
		return y
	case <-time.After(atMost):
		return nil
	}
}

// A region whose blocks carry nothing, or more than a stride, or lie where no
// address can be, is refused with a reason, which the log has, too; a second D is served all the while.
func TestRegionsThatCannotBeAreRefused(t *testing.T) {
	var log lines
	w := newWorld(t, relay.Options{Timeout: 20 * time.Second, Log: slog.New(slog.NewTextHandler(&log, nil))})
	bad := w.channel()
	for _, spoil := range []func(*wire.Region){
		func(r *wire.Region) { r.Payload = 0 },
		func(r *wire.Region) { r.Stride = 0 },
		func(r *wire.Region) { r.Payload, r.Stride = 0, 0 },
		func(r *wire.Region) { r.Payload = r.Stride + 1 },
		func(r *wire.Region) { r.Base = 1<<64 - 1 },
		func(r *wire.Region) { r.Base = 0 },
	} {
		regions := memory(payload).Regions
		spoil(&regions[1])
		bad.send(&wire.Pull{
			Host: "127.0.0.1", Port: 1, TPSize: 1, Regions: regions,
			Wanted: map[string]wire.Wanted{"r": {TransferID: "z", Blocks: [][]int{{1}, {2}}}},
		})
		y := bad.next(60 * time.Second)
		if y == nil || y.Status != wire.StatusError || !strings.Contains(y.Message, "region 1") {
			t.Fatalf("%+v", y)
		}
		w.sender.Offer("p", "x", [][]int{{1}, {2}})
		if err := w.pull("x", []int{1}, []int{2}); err != nil {
			t.Fatal(err)
		}
	}
	if text := log.String(); !strings.Contains(text, "pull refused") || !strings.Contains(text, "region 1") {
		t.Errorf("the log: %s", text)
	}
}

// D's that disconnect, or whose deadline is over at once, cost the relay nothing.
func TestPullsThatEndAtOnce(t *testing.T) {
	w := newWorld(t, relay.Options{Timeout: 5 * time.Second})
	wanted := map[string]wire.Wanted{}
	for i := range 20 {
		wanted[string(rune('a'+i))] = wire.Wanted{TransferID: string(rune('a' + i)), Blocks: [][]int{{1}, {2}}}
	}
	for range 10 {
		p := &wire.Pull{Host: "127.0.0.1", Port: 1, TPSize: 1, Regions: memory(payload).Regions, Wanted: wanted}
		gone := w.channel()
		gone.send(p)
		for end := time.Now().Add(time.Second); w.relay.Stats().Kept == 0 && time.Now().Before(end); {
			time.Sleep(50 * time.Microsecond)
		}
		gone.dealer.Close()
		p.DeadlineMillis = 1
		late := w.channel()
		late.send(p)
		if y := late.next(60 * time.Second); y == nil {
			t.Fatal("no answer")
		}
	}
	w.sender.Offer("p", "x", [][]int{{1}, {2}})
	if err := w.pull("x", []int{1}, []int{2}); err != nil {
		t.Fatal(err)
	}
}

// One pull has thousands of requests for transfers that P does not know: each is
// answered, the log stays short, and another D is served meanwhile.
func TestThousandsOfUnknownTransfers(t *testing.T) {
	t.Parallel() // it waits for deadlines
	w := newWorld(t, relay.Options{Timeout: 4 * time.Second})
	n := max(300, testkit.Volume(1000))
	wanted := map[string]wire.Wanted{}
	for i := range n {
		wanted[fmt.Sprint("r", i)] = wire.Wanted{TransferID: fmt.Sprint("never", i), Blocks: [][]int{{1}, {2}}}
	}
	c := w.channel()
	c.send(&wire.Pull{Host: "127.0.0.1", Port: 9, TPSize: 1, Regions: memory(payload).Regions, Wanted: wanted})
	for i := range 3 {
		id := fmt.Sprint("x", i)
		w.sender.Offer("p"+id, id, [][]int{{1}, {2}})
		if err := w.pull(id, []int{1}, []int{2}); err != nil {
			t.Fatal(err)
		}
	}
	failed := 0
	for failed < n {
		y := c.next(60 * time.Second)
		if y == nil {
			t.Fatalf("%d of %d answered", failed, n)
		}
		failed += len(y.Failed)
	}
	testkit.Eventually(t, "nothing but what arrived is kept", func() bool { return w.relay.Stats().KeptBytes <= 3*4096 })
}

// A D that accepts connections and reads nothing keeps the relay's memory occupied. When another D
// needs that memory, the relay ends the push to the first D.
func TestSilentDGivesMemoryBack(t *testing.T) {
	const large = 1 << 20 // more than the kernel's buffers take, in a few transfers
	w := newWorld(t, relay.Options{Timeout: 30 * time.Second, MemoryBytes: 32 << 20})
	big := func() *mooncake.Cache {
		c := memory(large)
		for i := range c.Regions {
			c.Regions[i].Payload = large
		}
		return c
	}
	w.sender.Close()
	w.p = big()
	w.startP("big")
	time.Sleep(5 * time.Millisecond)
	d := big()
	target, err := transfer.Listen(transfer.TargetOptions{}, transfer.NewTable())
	if err != nil {
		t.Fatal(err)
	}
	defer target.Close()
	r := w.newD(d, target)
	from := w.source()
	pull := func(id string) error {
		failed, err := r.Pull(t.Context(), from, map[string]wire.Wanted{"d" + id: {TransferID: id, Blocks: [][]int{{1, 2}, {3, 4}}}})
		if err == nil {
			err = failed["d"+id]
		}
		return err
	}
	silent := w.channel()
	host, port := silentTarget(t)
	for i := range 4 { // 8 MiB each: all of the memory
		id := fmt.Sprint("s", i)
		w.sender.Offer("p"+id, id, [][]int{{1, 2}, {3, 4}})
		silent.send(&wire.Pull{
			Host: host, Port: port, TPSize: 1, Regions: d.Regions,
			Wanted: map[string]wire.Wanted{id: {TransferID: id, Blocks: [][]int{{1, 2}, {3, 4}}}},
		})
	}
	testkit.Eventually(t, "the silent D holds all memory", func() bool { s := w.relay.Stats(); return s.Pulled == 4 && s.KeptBytes == 32<<20 })
	time.Sleep(50 * time.Millisecond)
	for i := range 3 {
		id := fmt.Sprint("x", i)
		w.sender.Offer("p"+id, id, [][]int{{1, 2}, {3, 4}})
		if err := pull(id); err != nil {
			t.Fatal(err)
		}
	}
}

// silentTarget answers handshakes; its data port accepts and never reads.
func silentTarget(t *testing.T) (host string, port int) {
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
