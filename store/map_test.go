// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"testing"

	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// The map has every byte of the pool where it lies and as what it is, in any number of
// cells, also of chunks that lie in several.
func TestMap(t *testing.T) {
	b := newBench(t, t.TempDir(), 8, store.Options{})
	defer b.stop()
	b.put("a", prompt(1, 3), 0, 3, 3)
	h := prompt(2, 2)
	tr := transfer(1, h, 0, 2, false)
	var p store.Transfer
	if _, err := b.store.BeginStore(tr, []byte("b"), h, &p); err != nil || len(p.Offsets) != 2 {
		t.Fatal(err, p.Offsets)
	}
	f := func(cells int) pool.Map {
		t.Helper()
		m := b.store.Map(cells, 0)
		u := b.store.Stats().Usage
		sum := func(of []int64) (n int64) {
			for _, v := range of {
				if v < 0 || v > m.CellBytes {
					t.Errorf("%d cells: one of %d bytes has %d", cells, m.CellBytes, v)
				}
				n += v
			}
			return n
		}
		if got, want := [3]int64{sum(m.Resident), sum(m.Staged), sum(m.Quarantined)}, [3]int64{u.ResidentBytes, u.StagedBytes, u.CondemnedBytes}; got != want {
			t.Errorf("%d cells have %v, the pool has %v", cells, got, want)
		}
		if n := int64(len(m.Resident)); n > int64(max(cells, 1)) || n*m.CellBytes < u.Bytes || (n-1)*m.CellBytes >= u.Bytes || m.Sampled {
			t.Errorf("%d cells: %d of %d bytes for a pool of %d", cells, n, m.CellBytes, u.Bytes)
		}
		owned := int64(0)
		for _, o := range m.Owners {
			owned += o.Bytes
		}
		if owned != u.ResidentBytes+u.StagedBytes {
			t.Errorf("%d cells: owners have %d bytes of %d", cells, owned, u.ResidentBytes+u.StagedBytes)
		}
		for i, at := range m.Owner {
			if has := m.Resident[i]+m.Staged[i] > 0; has != (at >= 0) || at >= len(m.Owners) {
				t.Errorf("%d cells: cell %d has %d bytes and the owner %d of %d", cells, i, m.Resident[i]+m.Staged[i], at, len(m.Owners))
			}
		}
		return m
	}
	for _, cells := range []int{-1, 0, 1, 2, 3, 5, 8, 240, 1 << 30} {
		f(cells)
	}
	b.store.Detach(1) // the worker is gone, and may still write
	if m := f(8); sumOf(m.Quarantined) == 0 || sumOf(m.Staged) != 0 {
		t.Errorf("after the worker went: %+v", m)
	}
}

// In a large pool one slot stands for several; what is told stays within the pool.
func TestMapIsSampled(t *testing.T) {
	b := newBench(t, t.TempDir(), 8, store.Options{})
	b.put("a", prompt(1, 8), 0, 8, 8)
	for _, most := range []int{1, 2, 3} {
		m := b.store.Map(4, most)
		if n := sumOf(m.Resident); !m.Sampled || n == 0 || n > 8*chunkBytes {
			t.Errorf("%d slots: %+v", most, m)
		}
	}
	st := b.store
	b.stop()
	if m := st.Map(8, 0); sumOf(m.Resident) != 0 || len(m.Resident) == 0 { // its memory is not mapped any more
		t.Errorf("closed: %+v", m)
	}
}

func sumOf(of []int64) (n int64) {
	for _, v := range of {
		n += v
	}
	return n
}
