// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"slices"
	"testing"
)

// The index is at most half full, so that a search for a missing file is short. It finds each file while it grows and while files are
// removed.
func TestIndexGrowsWithItsFiles(t *testing.T) {
	b := newBooks(1)
	b.dirs = []*directory{{root: &rootDir{}}}
	key := func(i int) id { return id{hash: [32]byte{byte(i), byte(i >> 8)}, bytes: 8} }
	const files = 10_000
	numbers := make([]uint32, files)
	for i := range numbers {
		numbers[i] = b.add(0, key(i), "", 1, 0)
		if 2*b.count > len(b.index)+2 {
			t.Fatalf("an index of %d places has %d files", len(b.index), b.count)
		}
	}
	for i := 0; i < files; i += 2 {
		b.remove(numbers[i])
	}
	for i := range numbers {
		want := numbers[i]
		if i%2 == 0 {
			want = 0
		}
		if got, _ := b.find(0, key(i)); got != want {
			t.Fatalf("file %d is %d, want %d", i, got, want)
		}
	}
	if b.count != files/2 || b.bytes != files/2 {
		t.Errorf("%d files of %d bytes are left", b.count, b.bytes)
	}
}

// Chunks that changed while the files were read count as they are now: removed chunks are missing, and new ones are there.
func TestCorrectedChunksAreThoseThatAreThere(t *testing.T) {
	of := func(name byte, need uint16) chunk { return chunk{need: need, bytes: 8, hash: [32]byte{name}} }
	a, b, c, d, e := of('a', 1), of('b', 2), of('c', 2), of('d', 1), of('e', 2)
	got := &Chunks{list: []chunk{a, b, b, c, e, e}} // one file of c was read
	got.correct(map[chunk]bool{a: false, d: true, e: true})
	if want := []chunk{b, d, e}; !slices.Equal(got.list, want) {
		t.Errorf("%v, want %v", got.list, want)
	}
}
