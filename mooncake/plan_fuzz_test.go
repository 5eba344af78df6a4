// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"testing"

	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// A pull that decodes can be planned for without a panic.
func FuzzPlan(f *testing.F) {
	for _, b := range fuzzPulls() {
		f.Add(b)
	}
	own := testCache(2, 8, 64)
	own.Regions[0].Layer, own.Regions[1].Layer = "l.0", "l.1"
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := wire.DecodePull(b, 0)
		if err != nil {
			return
		}
		for tp := 1; tp <= 4; tp *= 2 {
			self := Peer{TPSize: tp, PPSize: 1}
			plan, err := PlanPush(own, self, Peer{p.TPRank, p.TPSize, p.PPSize}, p.Regions)
			if err != nil {
				continue
			}
			for _, w := range p.Wanted {
				list, err := plan.Append(nil, [][]int{{1, 2, 3}}, w.Blocks)
				for _, d := range list {
					if d.Len == 0 || err == nil && d.Len > 1<<20 {
						t.Fatalf("descriptor %+v", d)
					}
				}
			}
		}
	})
}

// fuzzPulls are seeds: one message of each form.
func fuzzPulls() [][]byte {
	p := &wire.Pull{
		Host: "10.0.0.9", Port: 15001, TPSize: 2, TPRank: 1, PPSize: 2, LayoutID: 7, DeadlineMillis: 100,
		Wanted: map[string]wire.Wanted{"a": {TransferID: "x", Blocks: [][]int{{1, 2}, {}}}, "b": {TransferID: "y", Blocks: nil}},
		Regions: []wire.Region{
			{Layer: "l.0", Index: 0, Base: 1 << 40, Stride: 4096, Payload: 2048, Group: 0, Shared: []int{0}, RowOffset: 0}, {Layer: "l.1", Index: 1, Base: 1<<40 + 2048, Stride: 4096, Payload: 2048, Group: wire.SharedGroup, Shared: []int{0, 1}, RowOffset: 2048},
		},
	}
	return [][]byte{wire.AppendPull(nil, p, 0), wire.AppendPull(nil, p, 16), wire.AppendPull(nil, p, 20), wire.AppendPull(nil, p, 31), {0x80}, nil}
}
