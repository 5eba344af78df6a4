// SPDX-License-Identifier: Apache-2.0

package lmcache

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"slices"
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
	long := AppendTokens(nil, slices.Repeat([]uint32{70000, 0xcdcdcdcd, 5, 40000, 0xcece}, 2*laneTokens/5))[3:]
	f.Add(long, uint16(2*laneTokens/5*5))
	f.Add(long, uint16(laneTokens))
	f.Fuzz(func(t *testing.T, b []byte, count uint16) { compareSkip(t, b, int(count)) })
}

func compareSkip(t *testing.T, b []byte, n int) {
	t.Helper()
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
}

// A long list is checked in four lanes. Whatever stands in it, cut or followed by other fields, the result is that of
// the plain loop: with bytes that look like the beginning of a token inside of tokens, with forms that the lanes leave,
// and with a byte that is no token.
func TestLongListsInLanes(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 5))
	values := []func() uint32{
		func() uint32 { return rng.Uint32N(1 << 17) },
		func() uint32 { return rng.Uint32N(0x80) },
		func() uint32 { return 0xcecececd - rng.Uint32N(3) },
		func() uint32 { return []uint32{0xcdcd, 0xcecece, 0xcc, 3}[rng.IntN(4)] },
	}
	inLanes := 0
	for round := range 400 {
		n := laneTokens - 2 + rng.IntN(4*laneTokens)
		value := values[round%len(values)]
		var b []byte
		odd := rng.IntN(8) // of the wider form, or no token
		for i := range n {
			switch {
			case odd == 0 && i == n/2:
				b = append(b, 0xcf, 0, 0, 0, 0, 0, 0, 0, 9)
			case odd == 1 && i == n/3:
				b = append(b, 0xc0)
			default:
				b = appendTokens(b, []uint32{value()})
			}
		}
		b = append(b, bytes.Repeat([]byte{byte(round)}, rng.IntN(3*laneTail))...)
		if odd == 2 {
			b = b[:rng.IntN(len(b))]
		}
		compareSkip(t, b, n)
		if n >= laneTokens {
			skipped, count := skipInLanes(b, n)
			read, err := readTokens(make([]byte, 4*count), b, count)
			if err != nil || read != skipped {
				t.Fatalf("the lanes took %d tokens in %d bytes, the plain loop %d bytes: %v", count, skipped, read, err)
			}
			if count > n/2 {
				inLanes++
			}
		}
	}
	if inLanes < 200 {
		t.Errorf("the lanes took more than half of %d lists of 400", inLanes)
	}
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

// BenchmarkTokens checks a list of 32k tokens, as a server does with the key of a prompt that it does not know.
func BenchmarkTokens(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 2))
	lists := make([][]byte, 8) // one list alone would be learned by the branch predictor
	tokens := make([]uint32, 32768)
	for i := range lists {
		for j := range tokens {
			tokens[j] = rng.Uint32N(1 << 17)
		}
		lists[i] = append(appendTokens(nil, tokens), make([]byte, 100)...)
	}
	for i := 0; b.Loop(); i++ {
		list := lists[i%len(lists)]
		if n, err := skipTokens(list, len(tokens)); err != nil || n != len(list)-100 {
			b.Fatal(n, err)
		}
	}
}
