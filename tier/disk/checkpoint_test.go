// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"errors"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// checkpointOf makes a checkpoint of segments with so many objects each.
func checkpointOf(t *testing.T, m *memFiles, objects []int) file {
	t.Helper()
	f, err := m.create(checkName, 0)
	if err == nil {
		err = f.writev([][]byte{make([]byte, block)}, 0)
	}
	off := int64(block)
	for i, n := range objects {
		b := shm.MakeAligned(int(indexBytes(n)), block)
		records := make([]record, n)
		for j := range records {
			records[j] = record{benchKey(int64(j)), uint32(1 + 2*j), 1, uint64(i), false, 0, 0}
		}
		end := int64(1+2*n) * block
		putTrailer(b, putIndex(b[block:], trailer{seq: uint32(i), id: uint64(i), end: end, bytes: end + int64(len(b))}, records))
		if err == nil {
			err = f.writev([][]byte{b}, off)
		}
		off += int64(len(b))
	}
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// Several goroutines read a checkpoint together. Each part comes once and whole, also one that is larger than a piece. A cut or
// damaged part is an error, and the parts before it have come.
func TestCheckpointParts(t *testing.T) {
	f := func(seed uint64, harm func(f file, size, last int64) (int64, error), want error) {
		t.Helper()
		r := rand.New(rand.NewPCG(seed, 8))
		objects := make([]int, 1+r.IntN(60))
		for i := range objects {
			objects[i] = 1 + r.IntN(1+r.IntN(800))
		}
		file := checkpointOf(t, newMemFiles(seed, 1<<30), objects)
		size, _ := file.size()
		size, err := harm(file, size, size-indexBytes(objects[len(objects)-1]))
		if err != nil {
			t.Fatal(err)
		}
		c := &checkReader{file: file, size: size, off: block}
		var mu sync.Mutex
		seen := map[uint64]bool{}
		var wg sync.WaitGroup
		for i := range 3 {
			wg.Go(func() {
				piece := shm.MakeAligned((1+int(seed)%5+i)*block, block)
				for {
					var parts []checkPart
					if parts, piece = c.next(nil, piece); len(parts) == 0 {
						return
					}
					for _, p := range parts {
						records, err := getIndex(nil, p.index, p.trailer)
						mu.Lock()
						if err != nil || len(records) != objects[p.id] || records[0].sum != p.id || seen[p.id] {
							t.Errorf("seed %d: part %d of %d objects: %v, %v", seed, p.id, objects[p.id], len(records), err)
						}
						seen[p.id] = true
						mu.Unlock()
					}
				}
			})
		}
		wg.Wait()
		came := len(objects)
		if want != nil {
			came--
		}
		if !errors.Is(c.err, want) || len(seen) != came {
			t.Errorf("seed %d: %d of %d parts, %v", seed, len(seen), len(objects), c.err)
		}
	}
	for seed := range uint64(testkit.Volume(50)) {
		f(seed, func(_ file, size, _ int64) (int64, error) { return size, nil }, nil)
		f(seed, func(_ file, size, _ int64) (int64, error) { return size - block, nil }, io.ErrUnexpectedEOF)
		f(seed, func(f file, size, last int64) (int64, error) {
			return size, f.writev([][]byte{make([]byte, block)}, last)
		}, errDamaged)
	}
}

// A disk of many segments is loaded from its checkpoint alone: no index of a segment is read. If a part of the checkpoint
// is damaged, the disk reads that segment's own index.
func TestCheckpointOfManySegments(t *testing.T) {
	f := func(damaged bool) {
		t.Helper()
		m, c := newMemFiles(1, 1<<30), newClock()
		o := Options{SegmentBytes: minSegment, MinFree: 1, FirstTouch: true}
		d := openMem(t, o, 64<<20, c, m)
		const objects, n = 900, 15_000 // three in a segment: more parts than a piece has
		for i := range objects {
			put(t, d, i, n)
		}
		closeDisk(t, d)
		newest := "" // tells what has been written
		for name := range m.names {
			if strings.HasSuffix(name, suffix) {
				newest = max(newest, name)
			}
		}
		if size := int64(len(m.names[checkName].data)); size < 2*checkPiece {
			t.Fatalf("a checkpoint of %d bytes", size)
		}
		if damaged {
			whole := m.names[checkName].data
			whole[len(whole)-block] ^= 1 // an index: that of the oldest segment
		}
		var others atomic.Bool
		m.fail = func(deed, name string) error {
			if deed == "read" && strings.HasSuffix(name, suffix) && name != newest {
				others.Store(true)
			}
			return nil
		}
		o.ScrubRate = 1 // the scrub begins with the newest segment, and reads no further here
		d = openMem(t, o, 64<<20, c, m)
		defer closeDisk(t, d)
		<-d.Opened()
		if got := d.Space().Objects; got != objects {
			t.Errorf("damaged: %v: %d objects of %d", damaged, got, objects)
		}
		if others.Load() != damaged {
			t.Errorf("damaged: %v: segments were read: %v", damaged, others.Load())
		}
		for i := range objects {
			need(t, d, i, n)
		}
	}
	f(false)
	f(true)
}
