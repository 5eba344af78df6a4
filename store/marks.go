// SPDX-License-Identifier: Apache-2.0

package store

import (
	"encoding/binary"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// Marks show whether a worker's copy reached the pool. A worker's device has the pool's pages pinned. If its client maps another pool and
// leaves the old pages pinned, the device copies to the old pages. The new pool then keeps the former bytes of that place, and a commit
// would make them a chunk. So the store writes marks into the places of such a worker before it tells it the places: at the start, at the
// end and every markEvery bytes between. A copy that arrives overwrites all marks.
const (
	markBytes = 16
	markEvery = 2 << 20
)

// eachMark calls f with each part of an object that has a mark, and with the mark that belongs there, until f reports false.
func (s *Store) eachMark(object []byte, offset int64, f func(part []byte, mark [markBytes]byte) bool) {
	n := len(object)
	if n < markBytes {
		return // a short object could have the bytes of a mark by chance
	}
	for at := 0; ; at = min(at+markEvery, n-markBytes) {
		x := s.marks ^ uint64(offset+int64(at))*0x9e3779b97f4a7c15
		var mark [markBytes]byte
		binary.LittleEndian.PutUint64(mark[:], x)
		binary.LittleEndian.PutUint64(mark[8:], ^x*0xff51afd7ed558ccd)
		if !f(object[at:at+markBytes], mark) || at == n-markBytes {
			return
		}
	}
}

// mark writes marks into the places of a worker that does not know them yet.
func (s *Store) mark(places []heldObject) {
	_ = shm.Guard(func() { // if the memory is gone, unwritten notices it
		for _, o := range places {
			s.eachMark(s.mu.pool.At(o.offset, o.bytes), o.offset, func(part []byte, mark [markBytes]byte) bool {
				copy(part, mark[:])
				return true
			})
		}
	})
}

// markedObject is an object with marks, of a transfer that ends.
type markedObject struct {
	offset int64
	bytes  []byte
}

// markedLocked returns the objects of a hold, if the hold has marks.
func (s *Store) markedLocked(h *hold.Hold) (objects []markedObject) {
	if !h.Marked {
		return nil
	}
	for _, slot := range h.Slots {
		objects = append(objects, markedObject{s.mu.pool.Offset(pool.Slot(slot)), s.mu.pool.View(pool.Slot(slot))})
	}
	return objects
}

// unwritten reports whether one of the objects still has a mark. No other goroutine touches the objects: their hold is out of the table and
// has not ended.
func (s *Store) unwritten(objects []markedObject) (left bool) {
	if len(objects) == 0 { // as for most workers
		return false
	}
	err := shm.Guard(func() {
		for _, o := range objects {
			s.eachMark(o.bytes, o.offset, func(part []byte, mark [markBytes]byte) bool {
				left = [markBytes]byte(part) == mark
				return !left
			})
			if left {
				return
			}
		}
	})
	return left || err != nil
}
