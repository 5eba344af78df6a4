// SPDX-License-Identifier: Apache-2.0

package pool_test

import (
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// TestChunkSizesOfAnEarlierServerAreKnownByTransfer has two stores and a load in progress when
// the server ends.
func TestChunkSizesOfAnEarlierServerAreKnownByTransfer(t *testing.T) {
	dir := t.TempDir()
	open := func() *pool.Pool {
		p, err := pool.Open(pool.Options{Name: "p", Bytes: 16 * 4096, Dir: dir})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	p := open()
	reserve := func(chunk byte, by pool.Writer) pool.Slot {
		slot, err := p.Reserve(&kv.Key{Chunk: kv.Hash{chunk}}, 4096, by)
		if err != nil {
			t.Fatal(err)
		}
		return slot
	}
	one, two := pool.Writer{Name: 11, Number: 1}, pool.Writer{Name: 22, Number: 2}
	reserve(1, one)
	reserve(2, two)
	reserve(3, one)
	read := reserve(4, two)
	p.Commit(read)
	p.Hold(read)
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	p = open()
	defer p.Close()
	got := map[uint64]int{}
	for _, f := range p.FormerTransfers() {
		if f.Reads != (f.Writer == pool.Writer{}) {
			t.Errorf("%+v", f)
		}
		got[f.Writer.Name] += len(f.Slots)
	}
	if len(got) != 3 || got[11] != 2 || got[22] != 1 || got[0] != 1 {
		t.Errorf("slots by name: %v", got)
	}
}
