// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"cmp"
	"io"
	"sync"

	"github.com/kvasir-kv/kvasir/internal/shm"
)

// checkPiece is how many bytes of a checkpoint are read at once, unless the part of one segment is larger.
const checkPiece = 1 << 20

// checkReader reads a checkpoint for several goroutines: one reads a piece while the others put the objects of their pieces into
// the index.
type checkReader struct {
	file file
	size int64

	mu   sync.Mutex // held during a read
	off  int64      // of the first part that no reader has taken
	err  error
	todo map[uint64]found // segments that are not loaded yet, by id
}

// checkPart is what a checkpoint says about one segment.
type checkPart struct {
	trailer
	index []byte
}

// loadCheckpoint loads the segments that the checkpoint describes as they are now, and removes them from todo.
func (v *volume) loadCheckpoint(names map[string]int64, todo map[uint64]found) error {
	size := names[checkName] / block * block
	if size < block {
		return nil
	}
	file, err := v.files.open(checkName)
	if err != nil {
		return err
	}
	defer file.close()
	b := shm.MakeAligned(block, block)
	if err := file.readv([][]byte{b}, 0); err != nil {
		return err
	}
	if id, err := getMark(b, checkMagic); err != nil || id != v.id {
		return cmp.Or(err, errDamaged)
	}
	c := &checkReader{file: file, size: size, off: block, todo: todo}
	var wg sync.WaitGroup
	for range openers {
		wg.Go(func() { v.loadParts(c) })
	}
	wg.Wait()
	return c.err
}

// loadParts puts the objects of parts of a checkpoint into the index, until the checkpoint or the volume ends.
func (v *volume) loadParts(c *checkReader) {
	piece := shm.MakeAligned(int(min(checkPiece, c.size)), block)
	var parts []checkPart
	var records []record
	for v.life.Err() == nil {
		if parts, piece = c.next(parts[:0], piece); len(parts) == 0 {
			return
		}
		for _, p := range parts {
			f, ok := c.take(p.trailer)
			if !ok {
				continue
			}
			var err error
			var s *segment
			if records, err = getIndex(records[:0], p.index, p.trailer); err == nil {
				s, err = v.openSegment(f)
			}
			if err != nil {
				c.giveBack(f, err)
				continue
			}
			v.insert(s, records, true)
		}
	}
}

// next reads the next parts into piece, or into a larger piece if the first part does not fit. After an error, later calls return no parts.
func (c *checkReader) next(parts []checkPart, piece []byte) ([]checkPart, []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.err == nil && c.off < c.size {
		b := piece[:min(int64(len(piece)), c.size-c.off)]
		if err := c.file.readv([][]byte{b}, c.off); err != nil {
			c.err = err
			break
		}
		for len(b) >= block {
			t, err := getTrailer(b)
			n := indexBytes(t.entries)
			if err == nil && n > c.size-c.off {
				err = io.ErrUnexpectedEOF
			}
			if err != nil {
				c.err = err
				return parts, piece
			}
			if n > int64(len(b)) {
				if len(parts) == 0 {
					piece = shm.MakeAligned(int(n), block)
				}
				break
			}
			parts = append(parts, checkPart{t, b[block:n]})
			b, c.off = b[n:], c.off+n
		}
		if len(parts) > 0 {
			break
		}
	}
	return parts, piece
}

// take removes the segment that t describes from todo and returns it. It reports false if there is none of this number and size.
func (c *checkReader) take(t trailer) (found, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f, ok := c.todo[t.id]
	if !ok || f.seq != t.seq || f.size != t.bytes {
		return found{}, false
	}
	delete(c.todo, t.id)
	return f, true
}

// giveBack puts a segment back into todo, so that its own index is read, and records err.
func (c *checkReader) giveBack(f found, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.todo[f.id] = f
	c.err = cmp.Or(c.err, err)
}
