// SPDX-License-Identifier: Apache-2.0

package relay_test

import (
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/relay"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// P restarts with other weights, at the same address and under the same engine id,
// while the relay pulls the rest of a prompt whose first blocks its first life sent: D
// gets no mixture of both. What the second life sent alone is served.
func TestPrefixOfOneLifeAndRestOfAnother(t *testing.T) {
	w := full(t, relay.Options{Prefixes: true, Timeout: 20 * time.Second})
	p := transfer.New(transfer.Options{})
	defer p.Close()
	var life atomic.Int32
	restart := make(chan struct{}, 1)
	serve := func(peer *zmtp.Peer, m zmtp.Message) {
		pull, err := wire.DecodePull(m[0], 0)
		if err != nil {
			t.Error(err)
			return
		}
		for id, want := range pull.Wanted {
			switch n := map[string]int{"A": 3, "B": 5, "C": 3}[id]; {
			case len(want.Blocks) == 0:
			case id == "B" && life.Load() == 1:
				restart <- struct{}{} // says nothing any more
			case len(want.Blocks[0]) > n:
				reply(peer, wire.Reply{Status: wire.StatusFinish, Failed: []string{id}, Message: "P num blocks less than D"})
			default:
				go func() {
					if err := p.Write(t.Context(), net.JoinHostPort(pull.Host, strconv.Itoa(pull.Port)), entries(pull, id, byte(life.Load()))); err != nil {
						t.Error(err)
					}
					reply(peer, wire.Reply{Status: wire.StatusFinish, OK: []string{id}})
				}()
			}
		}
	}
	var watched atomic.Bool
	listen := func(at string) (*zmtp.Router, string) {
		life.Add(1)
		r := zmtp.NewRouter(serve, zmtp.RouterOptions{Log: logger(), OnConnect: func(*zmtp.Peer) { watched.Store(true) }})
		addr, err := r.Listen(t.Context(), "tcp://"+at)
		if err != nil {
			t.Fatal(err)
		}
		return r, addr.String()
	}
	first, at := listen(fmt.Sprint("127.0.0.1:", testkit.FreePort(t)))
	w.show(map[string]string{"fake": "tcp://" + at})
	w.source()
	testkit.Eventually(t, "the relay watches it", watched.Load)
	time.Sleep(100 * time.Millisecond) // and knows that it does
	if err := w.pull("A", []int{31, 32, 33}); err != nil {
		t.Fatal(err)
	}
	from := w.source()
	done := make(chan error, 1)
	go func() {
		failed, err := w.receiver.Pull(t.Context(), from, map[string]wire.Wanted{"d": {TransferID: "B^A:3", Blocks: [][]int{{41, 42, 43, 44, 45}}}})
		if err == nil {
			err = failed["d"]
		}
		done <- err
	}()
	<-restart
	first.Close()
	second, _ := listen(at)
	defer second.Close()
	if err := <-done; err == nil {
		w.target.Table().Observe()
		t.Fatalf("D has %d from the first life, %d from the second", block(w.d, 0, 41)[0], block(w.d, 0, 45)[0])
	} else if !strings.Contains(err.Error(), "not what it was") {
		t.Fatal(err)
	}
	if err := w.pull("C^A:2", []int{51, 52, 53}); err != nil {
		t.Fatal(err)
	}
	w.target.Table().Observe()
	if a, b := block(w.d, 0, 51)[0], block(w.d, 0, 53)[0]; a != 2 || b != 2 {
		t.Fatalf("D has %d and %d", a, b)
	}
}
