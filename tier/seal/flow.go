// SPDX-License-Identifier: Apache-2.0

package seal

import (
	"fmt"
	"runtime"
	"sync"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// helpers returns how many goroutines work on an object of `pieces` pieces, in addition to that of the tier below.
func helpers(pieces int64) int64 {
	return min(int64(runtime.GOMAXPROCS(0)), maxWidth, (pieces+fewPieces-1)/fewPieces)
}

// sealing encrypts the pieces of an object while the tier below writes them. It begins with the first call of need, so an object that the
// tier does not take is not encrypted. It compares the object with its checksum before the tier has all of it: the tags of a wrong object
// would be right.
type sealing struct {
	sum    uint64
	hash   xxh3.Hasher // owned by the goroutine that sums
	box    *box
	dst    []byte // sealed
	src    []byte
	size   int64
	pieces int64
	wg     sync.WaitGroup

	mu struct {
		sync.Mutex
		changed sync.Cond
		begun   bool
		added   int64  // pieces, from the first one on, that were added to the checksum
		summing bool   // a goroutine is adding pieces
		summed  bool   // the checksum was compared
		wanted  []bool // pieces that the tier below asked for
		left    int64  // number of pieces that it did not ask for
		ended   bool
		taken   int64  // pieces that are encrypted or being encrypted, in this order: the last piece, then from the first one on
		done    []bool // pieces that are encrypted
		err     error
	}
}

func newSealing(k *key, dst, src []byte, name *kv.Key, sum uint64, end uint32) *sealing {
	h := k.newHeader(int64(len(src)), end)
	h.put(dst)
	s := &sealing{sum: sum, box: k.newBox(dst, &h.salt, sum, name), dst: dst, src: src, size: h.size, pieces: piecesOf(h.size)}
	s.mu.changed.L = &s.mu.Mutex
	s.mu.done, s.mu.wanted, s.mu.left = make([]bool, s.pieces), make([]bool, s.pieces), s.pieces
	return s
}

// need waits until dst[from:to] is encrypted, and itself encrypts pieces meanwhile. The call after which the tier below has asked for all
// pieces also waits for the checksum. Errors: shm.ErrFault, ErrSum.
func (s *sealing) need(from, to int64) error {
	s.begin()
	first, last := pieceAt(from, s.pieces), pieceAt(to-1, s.pieces)
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := first; i <= last; i++ {
		if !s.mu.wanted[i] {
			s.mu.wanted[i] = true
			s.mu.left--
		}
	}
	for i := first; i <= last && s.mu.err == nil; {
		switch {
		case s.mu.done[i]:
			i++
		case s.mu.taken < s.pieces:
			s.oneLocked()
		default:
			s.mu.changed.Wait()
		}
	}
	for s.mu.left == 0 && !s.mu.summed && s.mu.err == nil {
		s.mu.changed.Wait()
	}
	return s.mu.err
}

// pieceAt returns the piece that contains byte `at` of the sealed bytes.
func pieceAt(at, pieces int64) int64 {
	return min(max(at-headerBytes, 0)/(pieceBytes+tagBytes), pieces-1)
}

// sumLocked adds encrypted pieces to the checksum, in order, while they are still in the processor's cache. It unlocks the mutex meanwhile.
// After the last piece it compares the checksum.
func (s *sealing) sumLocked() {
	if s.mu.summing || s.mu.summed {
		return
	}
	s.mu.summing = true
	for s.mu.err == nil && s.mu.added < s.pieces && s.mu.done[s.mu.added] {
		i := s.mu.added
		s.mu.Unlock()
		err := shm.Guard(func() {
			at, _, n := span(i, s.size)
			_, _ = s.hash.Write(s.src[at : at+n]) // never fails
		})
		s.mu.Lock()
		s.mu.added++
		if err != nil {
			s.mu.err = err
		}
	}
	if s.mu.summing = false; s.mu.added < s.pieces {
		return
	}
	if s.mu.summed = true; s.mu.err == nil && s.hash.Sum64() != s.sum {
		s.mu.err = fmt.Errorf("%w: %w", tier.ErrNotKept, ErrSum)
	}
	s.mu.changed.Broadcast()
}

// begin starts the helpers.
func (s *sealing) begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.begun {
		return
	}
	s.mu.begun = true
	for range helpers(s.pieces) - 1 {
		s.wg.Go(func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			for s.mu.taken < s.pieces && s.mu.err == nil && !s.mu.ended {
				s.oneLocked()
			}
		})
	}
}

// oneLocked encrypts the next piece. It unlocks the mutex meanwhile.
func (s *sealing) oneLocked() {
	i := s.mu.taken - 1
	if s.mu.taken++; i < 0 {
		i = s.pieces - 1
	}
	s.mu.Unlock()
	err := shm.Guard(func() { // a Guard covers only its own goroutine
		at, to, n := span(i, s.size)
		nonce := nonceOf(i, s.pieces)
		s.box.aead.Seal(s.dst[to:to], nonce[:], s.src[at:at+n], s.box.data[:])
	})
	s.mu.Lock()
	s.mu.done[i] = err == nil
	if err != nil {
		s.mu.err = err
	}
	s.mu.changed.Broadcast()
	s.sumLocked()
}

// used reports whether the tier below asked for bytes of the object.
func (s *sealing) used() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.begun
}

// end returns once no goroutine reads src.
func (s *sealing) end() {
	s.mu.Lock()
	s.mu.ended = true
	s.mu.Unlock()
	s.wg.Wait()
}

// opening decrypts the pieces of an object while the tier below reads them. After a failure, readSealedOnce opens the whole object again to
// find the reason.
type opening struct {
	keys     *ring
	name     *kv.Key
	dst, src []byte
	size     int64
	pieces   int64
	wg       sync.WaitGroup

	mu struct {
		sync.Mutex
		changed sync.Cond
		box     *box // nil until the header was read
		meta    tier.Meta
		begun   bool    // the tier below has begun to read
		useless bool    // decrypting must not go on
		head    int64   // bytes of the header that were read
		missing []int64 // bytes of each piece that were not read yet
		ready   []int64 // pieces that were read and are not yet decrypted
		opened  int64
	}
}

func newOpening(keys *ring, name *kv.Key, dst, src []byte) *opening {
	o := &opening{keys: keys, name: name, dst: dst, src: src, size: int64(len(dst)), pieces: piecesOf(int64(len(dst)))}
	o.mu.changed.L = &o.mu.Mutex
	o.mu.missing = make([]int64, o.pieces)
	for i := range o.mu.missing {
		_, _, n := span(int64(i), o.size)
		o.mu.missing[i] = n + tagBytes
	}
	return o
}

// begin takes the object's Meta. If the tier below begins again, it overwrites src; so the opening ends and waits for its goroutines.
func (o *opening) begin(m tier.Meta) {
	o.mu.Lock()
	again := o.mu.begun
	o.mu.begun, o.mu.meta = true, m
	o.mu.useless = o.mu.useless || again || m.Len != int64(len(o.src)) || o.keys.byNumber[m.Seal] == nil
	o.mu.changed.Broadcast()
	o.mu.Unlock()
	if again {
		o.wg.Wait()
	}
}

// recordRead records that src[from:to] was read.
func (o *opening) recordRead(from, to int64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.mu.useless || !o.mu.begun || from >= to {
		return
	}
	if from < headerBytes {
		o.mu.head += min(to, headerBytes) - from
	}
	for i := pieceAt(from, o.pieces); i < o.pieces; i++ {
		_, at, n := span(i, o.size)
		if at >= to {
			break
		}
		if o.mu.missing[i] -= max(0, min(to, at+n+tagBytes)-max(from, at)); o.mu.missing[i] == 0 && to > at {
			o.mu.ready = append(o.mu.ready, i)
		}
	}
	if o.mu.box == nil && o.mu.head == headerBytes {
		o.startLocked()
	}
	o.mu.changed.Broadcast()
}

// startLocked starts the helpers.
func (o *opening) startLocked() {
	one := o.keys.byNumber[o.mu.meta.Seal]
	h, err := parseHeader(o.src)
	if err != nil || h.id != one.id || h.size != o.size {
		o.mu.useless = true
		return
	}
	o.mu.box = one.newBox(o.src, &h.salt, one.masked(o.mu.meta.Sum, o.name), o.name)
	for range helpers(o.pieces) {
		o.wg.Go(func() {
			o.mu.Lock()
			defer o.mu.Unlock()
			for !o.mu.useless && o.mu.opened < o.pieces {
				if len(o.mu.ready) > 0 {
					o.oneLocked()
				} else {
					o.mu.changed.Wait()
				}
			}
		})
	}
}

// oneLocked decrypts a piece that is ready. It unlocks the mutex meanwhile.
func (o *opening) oneLocked() {
	i := o.mu.ready[0]
	o.mu.ready = o.mu.ready[1:]
	b := o.mu.box
	o.mu.Unlock()
	var err error
	fault := shm.Guard(func() { // a Guard covers only its own goroutine
		to, at, n := span(i, o.size)
		nonce := nonceOf(i, o.pieces)
		_, err = b.aead.Open(o.dst[to:to], nonce[:], o.src[at:at+n+tagBytes], b.data[:])
	})
	o.mu.Lock()
	if err != nil || fault != nil {
		o.mu.useless = true
	} else {
		o.mu.opened++
	}
	o.mu.changed.Broadcast()
}

// end returns once no goroutine writes to dst. It reports whether the whole object was decrypted and has the Meta m. read says that the
// tier below has read all bytes.
func (o *opening) end(read bool, m tier.Meta) bool {
	o.mu.Lock()
	for read && o.mu.box != nil && !o.mu.useless && o.mu.opened < o.pieces {
		if len(o.mu.ready) > 0 {
			o.oneLocked()
			continue
		}
		if !o.workingLocked() {
			break
		}
		o.mu.changed.Wait()
	}
	whole := read && !o.mu.useless && o.mu.box != nil && o.mu.opened == o.pieces && o.mu.meta == m
	o.mu.useless = true
	o.mu.changed.Broadcast()
	o.mu.Unlock()
	o.wg.Wait()
	return whole
}

// workingLocked reports whether a goroutine is decrypting a piece that was read.
func (o *opening) workingLocked() bool {
	there := int64(0)
	for _, n := range o.mu.missing {
		if n == 0 {
			there++
		}
	}
	return o.mu.opened < there
}
