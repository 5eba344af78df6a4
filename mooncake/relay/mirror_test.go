// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"testing"

	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// In a pull with one list of blocks, each region without a group belongs to that list, also when an earlier region names its group.
func TestRegionsWithoutAGroupAreOfTheOnlyList(t *testing.T) {
	region := func(base uint64, group int) wire.Region {
		return wire.Region{Base: base, Stride: 64, Payload: 64, Group: group, RowOffset: wire.NoRow}
	}
	regions := []wire.Region{region(4096, 0), region(8192, wire.Unsent), region(12288, wire.Unsent)}
	m, err := newMirror(regions, [][]int{{7, 9}}, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range m.cache.Regions {
		if r.Group != 0 {
			t.Errorf("region %d is of group %d", i, r.Group)
		}
	}
	if m.bytes != 3*2*64 {
		t.Errorf("%d bytes", m.bytes)
	}
	if _, err := newMirror(regions, [][]int{{7}, {9}}, 1<<20); err == nil {
		t.Error("a region without a group is taken for one of two")
	}
}
