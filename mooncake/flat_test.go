// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// usage is the memory, files and goroutines of this process.
type usage struct {
	heap        uint64
	files       int
	goroutines  int
	connections int64
}

func use(x *pair) usage {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	list, _ := os.ReadDir("/proc/self/fd")
	return usage{m.HeapAlloc, len(list), runtime.NumGoroutine(), x.target.Stats().DataConns}
}

// Memory, descriptors and goroutines stay as they are over thousands of pulls, one in
// twenty aborted and one in a hundred with its side channel cut. KVASIR_PULLS is how
// many.
func TestPullsLeaveNothing(t *testing.T) {
	n := 3000
	if s := os.Getenv("KVASIR_PULLS"); s != "" {
		var err error
		if n, err = strconv.Atoi(s); err != nil {
			t.Fatal(err)
		}
	}
	x := small(t, SenderOptions{RetryTimeout: 20 * time.Millisecond, AbortTimeout: 20 * time.Second}, ReceiverOptions{UnknownTimeout: 100 * time.Millisecond})
	g := newGate(t, strings.TrimPrefix(x.sender.Addr(), "tcp://"), true)
	x.dir.show(x.sender.EngineID(), "tcp://"+g.l.Addr().String())
	const together = 8
	settled, arrived := 0, 0
	step := func(i int) {
		wanted := map[string]wire.Wanted{}
		for j := range together {
			id := fmt.Sprint("r", i, ".", j)
			x.sender.Expect(id, id)
			if (i*together+j)%20 != 0 {
				x.sender.Offer(id, id, [][]int{{j, j + 8}})
			}
			wanted[id] = wire.Wanted{TransferID: id, Blocks: [][]int{{2 * j, 2*j + 1}}}
		}
		if i%100 == 50 {
			g.budget.Store(int64(i % 700))
		}
		if err := x.receiver.Start(x.from, wanted); err != nil {
			t.Fatal(err)
		}
		for j := range together {
			if (i*together+j)%20 == 0 {
				id := fmt.Sprint("r", i, ".", j)
				x.receiver.Abort(id)
				x.sender.Abort(id)
			}
		}
		left := together
		testkit.Eventually(t, "a round settles", func() bool {
			r := x.receiver.Results()
			left -= len(r.Received)
			settled += len(r.Received)
			arrived += len(r.Received) - len(r.Failed)
			return left == 0
		})
		x.sender.Finished()
	}
	rounds := n / together
	for i := range rounds / 3 {
		step(i)
	}
	x.idle(t)
	before := use(x)
	for i := rounds / 3; i < rounds; i++ {
		step(i)
	}
	x.idle(t)
	var after usage
	grew := func() bool {
		after = use(x)
		return after.heap > before.heap+before.heap/2+4<<20 || after.files > before.files+16 || after.goroutines > before.goroutines+32 || after.connections > before.connections+8
	}
	for end := time.Now().Add(60 * time.Second); grew() && time.Now().Before(end); { // what ends in the background may take its time
		time.Sleep(20 * time.Millisecond)
	}
	t.Logf("%d pulls, %d arrived, %d cuts; before %+v, after %+v", settled, arrived, g.cuts.Load(), before, after)
	if arrived < settled*8/10 || g.cuts.Load() == 0 {
		t.Errorf("only %d of %d arrived, %d cuts", arrived, settled, g.cuts.Load())
	}
	if grew() {
		t.Errorf("grew from %+v to %+v", before, after)
	}
}
