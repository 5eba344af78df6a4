// SPDX-License-Identifier: Apache-2.0

package lmcache

import (
	"bytes"
	"encoding/binary"
	"testing"
)

// FuzzSkipTokens compares the fast loop that checks a token list with the plain
// one that decodes it: both accept the same lists, end at the same byte, and stay
// inside the frame.
func FuzzSkipTokens(f *testing.F) {
	wide := AppendTokens(nil, []uint32{70000, 80000, 1 << 31, 5, 200, 40000, 90000, 100000})[1:]
	for cut := range wide {
		f.Add(wide[:cut], uint16(8))
		f.Add(wide[cut:], uint16(2))
	}
	f.Add([]byte{0xcf, 0, 0, 0, 0, 0, 0, 0, 1, 0xd0, 0x80, 0xce, 0, 0, 0, 0}, uint16(3))
	f.Fuzz(func(t *testing.T, b []byte, count uint16) {
		n := int(count)
		skipped, skipErr := skipTokens(b, n)
		tokens := make([]byte, 4*n)
		read, readErr := readTokens(tokens, b, n)
		if (skipErr == nil) != (readErr == nil) {
			t.Fatalf("skip: %v, read: %v", skipErr, readErr)
		}
		if skipErr != nil {
			return
		}
		if skipped != read || skipped > len(b) {
			t.Fatalf("skipped %d bytes, read %d, of %d", skipped, read, len(b))
		}
	})
}

// A list that is cut anywhere, whatever the widths of its tokens, is an error.
func TestCutTokenLists(t *testing.T) {
	widths := []uint32{1, 200, 40000, 80000}
	for a := range 256 {
		tokens := []uint32{7, 7, widths[a&3], widths[a>>2&3], widths[a>>4&3], widths[a>>6&3]}
		whole := AppendTokens(nil, tokens)[1:]
		for cut := range whole {
			if n, err := skipTokens(bytes.Clone(whole[:cut]), len(tokens)); err == nil {
				t.Fatalf("%v cut to %d of %d bytes: skipped %d", tokens, cut, len(whole), n)
			}
		}
		if n, err := skipTokens(whole, len(tokens)); err != nil || n != len(whole) {
			t.Fatalf("%v: skipped %d of %d: %v", tokens, n, len(whole), err)
		}
	}
}

// A token has 32 bits, however wide it is written.
func TestTokensHave32Bits(t *testing.T) {
	out := make([]byte, 4)
	for v, fits := range map[uint64]bool{0: true, 1<<32 - 2: true, 1<<32 - 1: true, 1 << 32: false, 1<<63 - 1: false, 1 << 63: false} {
		wide := binary.BigEndian.AppendUint64([]byte{0xcf}, v)
		n, err := readTokens(out, wide, 1)
		if (err == nil) != fits || fits && (n != len(wide) || uint64(binary.BigEndian.Uint32(out)) != v) {
			t.Errorf("%#x: read %d bytes, %x, %v", v, n, out, err)
		}
		if n, err := skipTokens(wide, 1); (err == nil) != fits || fits && n != len(wide) {
			t.Errorf("%#x: skipped %d bytes, %v", v, n, err)
		}
	}
}
