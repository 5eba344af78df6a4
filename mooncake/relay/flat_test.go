// SPDX-License-Identifier: Apache-2.0

package relay_test

import (
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/relay"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// Descriptors, goroutines and memory of the relay stay as they are over many
// transfers, some aborted and some asked for again.
func TestRelayLeavesNothing(t *testing.T) {
	w := newWorld(t, relay.Options{MemoryBytes: 1 << 20, Timeout: 2 * time.Second})
	from := w.source()
	const together = 8
	step := func(i int) {
		wanted := map[string]wire.Wanted{}
		for j := range together {
			id := fmt.Sprint("x", i, ".", j)
			w.sender.Offer(id, id, [][]int{{j}, {j}})
			wanted["d"+id] = wire.Wanted{TransferID: id, Blocks: [][]int{{j}, {j}}}
			if i > 0 && j < 2 {
				again := fmt.Sprint("x", i-1, ".", 4+j, "#", i)
				wanted["d"+again] = wire.Wanted{TransferID: again, Blocks: [][]int{{20 + j}, {20 + j}}}
			}
		}
		if err := w.receiver.Start(from, wanted); err != nil {
			t.Fatal(err)
		}
		if i%3 == 0 {
			w.receiver.Abort(fmt.Sprint("dx", i, ".0"))
		}
		left := len(wanted)
		testkit.Eventually(t, "a round settles", func() bool {
			left -= len(w.receiver.Results().Received)
			return left == 0
		})
		w.sender.Finished()
	}
	use := func() (files, goroutines int, heap uint64) {
		time.Sleep(50 * time.Millisecond)
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		list, _ := os.ReadDir("/proc/self/fd")
		return len(list), runtime.NumGoroutine(), m.HeapAlloc
	}
	for i := range 60 {
		step(i)
	}
	files, goroutines, heap := use()
	for i := range 200 {
		step(60 + i)
	}
	var files2, goroutines2 int
	var heap2 uint64
	grew := func() bool { // requests that ended are remembered for 30 s
		files2, goroutines2, heap2 = use()
		return files2 > files+16 || goroutines2 > goroutines+32 || heap2 > 2*heap+16<<20
	}
	for end := time.Now().Add(60 * time.Second); grew() && time.Now().Before(end); { // what ends in the background may take its time
		time.Sleep(20 * time.Millisecond)
	}
	t.Logf("%d and %d descriptors, %d and %d goroutines, %d and %d bytes; %+v", files, files2, goroutines, goroutines2, heap, heap2, w.relay.Stats())
	if grew() {
		t.Errorf("grew: %d and %d descriptors, %d and %d goroutines, %d and %d bytes", files, files2, goroutines, goroutines2, heap, heap2)
	}
}
