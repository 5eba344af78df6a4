// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"fmt"
	"slices"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// When a side channel has more silent connections than it takes, it closes those that were idle
// longest. A D whose pull waits keeps its connection, and a new D is served.
func TestSilentConnectionsGiveWay(t *testing.T) {
	x := small(t, SenderOptions{MaxPulls: 4}, ReceiverOptions{})
	const most = 8 // twice MaxPulls
	x.sender.Expect("p", "held")
	_, held := ask(t, x.sender.Addr(), &wire.Pull{
		Host: x.receiver.host, Port: x.receiver.port, TPSize: 1, PPSize: 1, Regions: x.d.Regions,
		Wanted: map[string]wire.Wanted{"d": {TransferID: "held", Blocks: [][]int{{}}}},
	})
	waits := func() bool {
		x.sender.mu.Lock()
		defer x.sender.mu.Unlock()
		return len(x.sender.mu.transfers["held"].waiting) == 1
	}
	testkit.Eventually(t, "a pull waits", waits)
	closed := make(chan int, 3*most)
	for i := range 3 * most {
		up, seen := make(chan struct{}), false
		var d *zmtp.Dealer
		d = zmtp.NewDealer(x.sender.Addr(), zmtp.DealerOptions{OnState: func(connected bool, _ error) {
			switch {
			case connected && !seen:
				seen = true
				close(up)
			case !connected && seen:
				seen = false
				closed <- i
				go d.Close() // it does not come back
			}
		}})
		if err := d.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { d.Close() })
		<-up
		x.sender.conns.mu.Lock()
		n := len(x.sender.conns.mu.all)
		x.sender.conns.mu.Unlock()
		if n > most {
			t.Fatalf("%d connections", n)
		}
		if i%most == most-1 { // and one that says something
			id := fmt.Sprint("x", i)
			x.sender.Offer("p"+id, id, [][]int{{7}})
			if err := x.pull(t, "d"+id, id, []int{1}); err != nil {
				t.Fatal(err)
			}
		}
	}
	for first := true; first || len(closed) > 0; first = false {
		if i := <-closed; i >= 3*most-most/2 {
			t.Errorf("connection %d was closed, and others are idle for longer", i)
		}
	}
	if !waits() {
		t.Fatal("the connection of a pull was closed")
	}
	x.sender.Offer("p", "held", [][]int{{}})
	if y := next(t, held); !slices.Equal(y.OK, []string{"d"}) {
		t.Fatalf("%+v", y)
	}
}
