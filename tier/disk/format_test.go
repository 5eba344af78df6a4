// SPDX-License-Identifier: Apache-2.0

package disk

import "testing"

// Only a name that segmentName makes is a segment's name. The disk leaves other files alone.
func TestSegmentNames(t *testing.T) {
	for _, of := range []struct {
		seq uint32
		id  uint64
	}{{0, 0}, {1, 2}, {0xffffffff, 0xfedcba9876543210}} {
		name := segmentName(of.seq, of.id)
		if seq, id, ok := parseSegment(name); !ok || seq != of.seq || id != of.id {
			t.Errorf("%s: %d, %d, %v", name, seq, id, ok)
		}
	}
	for _, name := range []string{
		"", ".seg", "00000001-0000000000000002", "00000001-0000000000000002.se", "1-2.seg", "0000000A-0000000000000002.seg",
		"00000001_0000000000000002.seg", "+0000001-0000000000000002.seg", "0x000001-0000000000000002.seg", "000_0001-0000000000000002.seg",
		"00000001-0000000000000002.segx", "g0000001-0000000000000002.seg", "00000001-000000000000000 .seg",
	} {
		if _, _, ok := parseSegment(name); ok {
			t.Errorf("%q is taken for a segment", name)
		}
	}
}
