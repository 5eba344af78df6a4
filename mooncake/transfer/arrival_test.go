// SPDX-License-Identifier: Apache-2.0

package transfer

import "testing"

// Two regions get writes with acknowledgement. The watched one records which of its bytes have
// come, and does so again after that record was cleared.
func TestWatch(t *testing.T) {
	table := NewTable()
	target, err := Listen(TargetOptions{}, table)
	if err != nil {
		t.Fatal(err)
	}
	defer target.Close()
	regions, err := table.Publish(make([]byte, 4096), make([]byte, 4096))
	if err != nil {
		t.Fatal(err)
	}
	regions[0].Watch()
	c := New(Options{})
	defer c.Close()
	missing := func(i int) uint64 {
		n, _, stop := table.Unwritten(Range{regions[i].Range().Addr + 100, 200})
		stop()
		return n
	}
	for range 2 {
		for i, want := range []uint64{150, 200} {
			at := regions[i].Range().Addr
			if err := c.Write(t.Context(), target.Name(), []Entry{{Local: make([]byte, 100), Remote: at + 50}}); err != nil {
				t.Fatal(err)
			}
			if n := missing(i); n != want {
				t.Fatalf("region %d: %d bytes missing, want %d", i, n, want)
			}
		}
		table.Forget(Range{regions[0].Range().Addr, 4096})
		if n := missing(0); n != 200 {
			t.Fatalf("%d bytes missing of 200 that were forgotten", n)
		}
	}
}
