// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
)

// disconnected waits until D has noticed that no P holds its connections any more.
func (x *pair) disconnected(t *testing.T) {
	t.Helper()
	testkit.Eventually(t, "D knows that P has gone", func() bool {
		x.receiver.sockets.mu.Lock()
		defer x.receiver.sockets.mu.Unlock()
		return len(x.receiver.sockets.mu.all) == 0
	})
}

// P restarts under its engine id with more ranks or more stages, at other addresses or with its first worker at the old one. D knows
// the engine from before. D's pull fails or fills each block wholly, and the next pull is right.
func TestPRestartsWithOtherRanks(t *testing.T) {
	const heads, layers, blocks = 4, 2, 16
	f := func(stages int, samePlace bool) {
		t.Run(fmt.Sprintf("%d stages, same place %v", stages, samePlace), func(t *testing.T) {
			d := rankCache(0, 1, heads, layers, blocks, false)
			x := newPair(t, rankCache(0, 1, heads, layers, blocks, true), d, SenderOptions{}, ReceiverOptions{UnknownTimeout: 20 * time.Second})
			right := func(d, p int) bool {
				x.target.Table().Observe()
				var want []byte
				for l := range layers {
					for h := range heads {
						want = append(want, content(l, p, h)...)
					}
				}
				return bytes.Equal(block(x.d, 0, d), want)
			}
			x.sender.Offer("p0", "x0", [][]int{{3}})
			if err := x.pull(t, "d0", "x0", []int{1}); err != nil || !right(1, 3) {
				t.Fatal("the first life", err)
			}
			addr := x.sender.Addr()
			x.sender.Close()
			x.disconnected(t)
			client := transfer.New(transfer.Options{})
			defer client.Close()
			var addrs []string
			for i := range 2 {
				c, o := rankCache(i, 2, heads, layers, blocks, true), SenderOptions{Self: Peer{TPRank: i, TPSize: 2}}
				if stages == 2 {
					c, o = rankCache(0, 1, heads, layers, blocks, true), SenderOptions{Self: Peer{PPSize: 2}, PPRank: i}
					c.Regions = c.Regions[i : i+1]
				}
				if i == 0 && samePlace {
					o.Listen = addr
				}
				o.Engine.ID, o.Transfer, o.Log = x.from.EngineID, client, testLog(t)
				s, err := NewSender(c, o)
				if err != nil {
					t.Fatal(err)
				}
				if err := s.Start(t.Context()); err != nil {
					t.Fatal(err)
				}
				defer s.Close()
				addrs = append(addrs, s.Addr())
				s.Offer("p1", "x1", [][]int{{5}})
			}
			text := fmt.Sprintf(`"0":{"0":%q},"1":{"0":%q}`, addrs[0], addrs[1])
			if stages == 2 {
				text = fmt.Sprintf(`"0":{"0":%q,"1":%q}`, addrs[0], addrs[1])
			}
			x.dir.mu.Lock()
			x.dir.text = fmt.Sprintf(`{"0":{"engine_id":%q,"worker_addr":{%s}}}`, x.from.EngineID, text)
			x.dir.mu.Unlock()
			switch err := x.pull(t, "d1", "x1", []int{2}); {
			case err == nil && !right(2, 5):
				t.Fatal("a block is filled in part")
			case err == nil:
				return
			case !errors.Is(err, ErrNoEngine) || !strings.Contains(err.Error(), "has other ranks"):
				t.Fatal(err)
			}
			if err := x.pull(t, "d2", "x1", []int{2}); err != nil || !right(2, 5) {
				t.Fatal("the second pull", err)
			}
		})
	}
	f(1, false)
	f(1, true)
	f(2, false)
	f(2, true)
}

// P restarts under its engine id at another address. At the old address a silent process, or another P engine, accepts connections.
// D's next pull is right.
func TestOldSideChannelOfAnother(t *testing.T) {
	f := func(t *testing.T, silent bool) {
		const connect, unknown = 300 * time.Millisecond, 300 * time.Millisecond
		x := small(t, SenderOptions{}, ReceiverOptions{ConnectTimeout: time.Minute, UnknownTimeout: unknown})
		x.sender.Offer("p0", "x0", [][]int{{3}})
		if err := x.pull(t, "d0", "x0", []int{1}); err != nil {
			t.Fatal(err)
		}
		addr := x.sender.Addr()
		x.sender.Close()
		x.disconnected(t)
		client := transfer.New(transfer.Options{})
		defer client.Close()
		start := func(o SenderOptions) *Sender {
			o.Transfer, o.Log = client, testLog(t)
			s, err := NewSender(x.p, o)
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Start(t.Context()); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { s.Close() })
			return s
		}
		if silent {
			l, err := net.Listen("tcp", strings.TrimPrefix(addr, "tcp://"))
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
		} else {
			start(SenderOptions{Listen: addr})
		}
		second := start(SenderOptions{Engine: Engine{ID: x.from.EngineID}})
		x.dir.show(second.EngineID(), second.Addr())
		if silent { // P moves after D has begun: D learns of that when no answer comes
			at, wait := addr, connect
			x.receiver.o.Find = func(context.Context, Source) (bootstrap.Engine, error) {
				e := bootstrap.Engine{ID: x.from.EngineID, Workers: map[int]map[int]string{0: {0: at}}}
				x.receiver.o.ConnectTimeout = wait // the next connection is made later, after this call
				at, wait = second.Addr(), time.Minute
				return e, nil
			}
		}
		second.Offer("p1", "x1", [][]int{{5}})
		for try := 1; ; try++ {
			began := time.Now()
			err := x.pull(t, fmt.Sprint("d", try), "x1", []int{2})
			if err == nil {
				break
			}
			// Where the registry does not answer in time, D uses the address that it knows, and another engine answers there.
			if took := time.Since(began); !errors.Is(err, ErrUnknownTransfer) || took < 2*askTimeout || try == 5 {
				t.Fatalf("after %v: %v", took, err)
			}
		}
		x.target.Table().Observe()
		if !bytes.Equal(block(x.d, 0, 2), block(x.p, 0, 5)) {
			t.Fatal("wrong bytes")
		}
	}
	t.Run("silent", func(t *testing.T) { f(t, true) })
	t.Run("another engine", func(t *testing.T) { f(t, false) })
}
