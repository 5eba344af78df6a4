// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// write is what a P pushes for one request of a pull: every block of it, filled
// with one byte.
func write(c *transfer.Client, t *testing.T, p *wire.Pull, id string, fill byte) error {
	var batch []transfer.Entry
	for _, g := range p.Regions {
		for _, b := range p.Wanted[id].Blocks[g.Group] {
			batch = append(batch, transfer.Entry{Local: bytes.Repeat([]byte{fill}, int(g.Payload)), Remote: g.Base + uint64(b)*g.Stride})
		}
	}
	return c.Write(t.Context(), net.JoinHostPort(p.Host, strconv.Itoa(p.Port)), batch)
}

// ok answers a pull: all of it is filled.
func ok(peer *zmtp.Peer, p *wire.Pull) {
	y := wire.Reply{Status: wire.StatusFinish}
	for id := range p.Wanted {
		y.OK = append(y.OK, id)
	}
	_ = peer.Send(wire.AppendReply(nil, &y))
	peer.Flush()
}

// D restarts on the same ports while P still has a pull of its first life. What P
// writes for it is refused, before the second life's pull, during it and after it.
func TestWritesForAnEarlierLife(t *testing.T) {
	type asked struct {
		peer *zmtp.Peer
		pull *wire.Pull
	}
	pulls := make(chan asked, 8)
	x := small(t, SenderOptions{}, ReceiverOptions{})
	addr := fakeP(t, func(peer *zmtp.Peer, p *wire.Pull) {
		if !empty(p.Wanted["d"].Blocks) {
			pulls <- asked{peer, p}
		}
	})
	x.dir.show("fake", addr)
	from := Source{EngineID: "fake", Bootstrap: x.from.Bootstrap}
	p := transfer.New(transfer.Options{})
	defer p.Close()
	var o transfer.TargetOptions
	var old []*wire.Pull
	for life := range 3 {
		target, err := transfer.Listen(o, transfer.NewTable())
		if err != nil {
			t.Fatal(err)
		}
		_, port, _ := net.SplitHostPort(target.Name())
		o.HandshakePort, _ = strconv.Atoi(port)
		o.DataPort = target.Descriptor().DataPort
		d := testCache(2, 32, 256)
		r, err := NewReceiver(d, ReceiverOptions{Target: target, Log: testLog(t), Timeout: 20 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		late := func() {
			for _, q := range old {
				if err := write(p, t, q, "d", 0xEE); !errors.Is(err, transfer.ErrRejected) {
					t.Errorf("life %d: a write for an earlier one: %v", life, err)
				}
			}
		}
		late()
		done := make(chan error, 1)
		go func() {
			failed, err := r.Pull(t.Context(), from, map[string]wire.Wanted{"d": {TransferID: fmt.Sprint("x", life), Blocks: [][]int{{1, 2}}}})
			done <- errors.Join(err, failed["d"])
		}()
		now := <-pulls
		late()
		if life < 2 { // dies with the pull in progress
			r.Close()
			target.Close()
			<-done
			old = append(old, now.pull)
			continue
		}
		if err := write(p, t, now.pull, "d", 7); err != nil {
			t.Fatal(err)
		}
		ok(now.peer, now.pull)
		if err := wait(t, done); err != nil {
			t.Fatal(err)
		}
		late()
		target.Table().Observe()
		for _, b := range []int{1, 2} {
			if got := block(d, 0, b); !bytes.Equal(got, bytes.Repeat([]byte{7}, len(got))) {
				t.Fatalf("block %d holds %x", b, got[:4])
			}
		}
		r.Close()
		target.Close()
	}
}
