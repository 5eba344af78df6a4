// SPDX-License-Identifier: Apache-2.0

package paged

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
)

// Plan is a list of copies between layers and chunks. Run carries them out in pieces that fit a cache. The zero Plan copies out of the
// layers (gather).
type Plan struct {
	Load bool // copies into the layers (scatter)

	moves []move
	bytes int64
}

// move is one chunk of one group.
type move struct {
	ids    *IDs
	of     []int // the chunk's kept blocks
	chunk  []byte
	skip   int // slots that are not written, counted from the first kept block
	blocks int // blocks in one piece
	first  int // number of its first piece
	pieces int
}

// pieceBytes is how much a goroutine copies before it takes the next piece. Source and destination of a piece together fill half of a small
// second-level cache.
const pieceBytes = 256 << 10

// Add plans the copy of chunk i of ids. chunk must be as long as the group's Bytes. A load does not write the first `skip` slots of the
// chunk's PerChunk blocks, nor null blocks.
func (p *Plan) Add(ids *IDs, i int, chunk []byte, skip int) error {
	g := ids.g
	if i < 0 || (i+1)*g.PerChunk > len(ids.ids) || int64(len(chunk)) != g.Bytes() || skip < 0 {
		return fmt.Errorf("%w: chunk %d has no blocks among the %d ids, or its memory of %d bytes does not have the %d bytes of a chunk, or the %d slots to skip are below 0", ErrBlocks, i, len(ids.ids), len(chunk), g.Bytes(), skip)
	}
	if !p.Load && !ids.Whole(i) {
		return fmt.Errorf("%w: chunk %d cannot be stored: one of its blocks is the null block", ErrBlocks, i)
	}
	v := &g.Layers[0].View
	per := max(1, pieceBytes/v.BlockBytes())
	m := move{
		ids: ids, of: ids.of(i), chunk: chunk, blocks: per, skip: max(0, skip-(g.PerChunk-g.Keep)*v.Slots),
		pieces: v.Planes * len(g.Layers) * ((g.Keep + per - 1) / per),
	}
	if n := len(p.moves); n > 0 {
		m.first = p.moves[n-1].first + p.moves[n-1].pieces
	}
	p.moves = append(p.moves, m)
	p.bytes += int64(len(chunk))
	return nil
}

// Bytes returns the total size of the planned chunks.
func (p *Plan) Bytes() int64 { return p.bytes }

// Run carries out the plan with up to `workers` goroutines, the caller's included. Each goroutine copies inside a call of guard, which can
// turn a fault, as when a peer has truncated its memory, into an error. A nil guard only calls the function. After an error some pieces may
// not have been copied.
func (p *Plan) Run(workers int, guard func(func()) error) error {
	if len(p.moves) == 0 {
		return nil
	}
	if guard == nil {
		guard = func(f func()) error { f(); return nil }
	}
	last := &p.moves[len(p.moves)-1]
	total := last.first + last.pieces
	// A goroutine takes several small pieces at once.
	batch := max(1, int(pieceBytes*int64(total)/max(p.bytes, 1)/2))
	workers = max(1, min(workers, total/batch, int(p.bytes/(4*pieceBytes))))
	var next atomic.Int64
	work := func() error {
		return guard(func() {
			for {
				from := int(next.Add(int64(batch))) - batch
				if from >= total {
					return
				}
				p.do(from, min(from+batch, total))
			}
		})
	}
	errs := make([]error, workers)
	var wg sync.WaitGroup
	for i := 1; i < workers; i++ {
		wg.Go(func() { errs[i] = work() })
	}
	errs[0] = work()
	wg.Wait()
	return errors.Join(errs...)
}

// do copies the pieces [from, to).
func (p *Plan) do(from, to int) {
	lo, hi := 0, len(p.moves)
	for hi-lo > 1 { // find the move that has piece `from`
		if mid := (lo + hi) / 2; p.moves[mid].first <= from {
			lo = mid
		} else {
			hi = mid
		}
	}
	for ; from < to; from++ {
		for from >= p.moves[lo].first+p.moves[lo].pieces {
			lo++
		}
		m := &p.moves[lo]
		g := m.ids.g
		parts := (len(m.of) + m.blocks - 1) / m.blocks
		n := from - m.first
		part, n := n%parts, n/parts
		layer, plane := n%len(g.Layers), n/len(g.Layers)
		start := part * m.blocks
		g.each(p.Load, m.chunk, m.of, m.ids.null && p.Load, plane, layer, start, min(start+m.blocks, len(m.of)), m.skip)
	}
}
