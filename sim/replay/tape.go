// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"context"
	"encoding/binary"
	"fmt"
	"iter"
	"math"
	"os"

	"github.com/kvasir-kv/kvasir/bench/workload"
)

// Limits of a trace for which policies are compared. More blocks or requests are workload.ErrTrace.
const (
	maxHeldWords = 1 << 26            // words of a tape in memory: 256 MiB; the rest is in a temporary file
	maxDifferent = 1 << 26            // distinct blocks
	maxPrompts   = math.MaxUint32 - 1 // requests
)

// pageWords is how many words are read and written at a time.
const pageWords = 1 << 16

// words is a list of numbers of 4 bytes. What exceeds its limit is in a temporary file without a name. It is read page by page.
type words struct {
	pages [][]uint32 // nil: that page is in the file
	n     int
	held  int // pages in memory
	most  int // most pages in memory
	file  *os.File
	bytes []byte   // buffer for a page that is read or written
	read  []uint32 // the page that was read last
}

// add appends a number.
func (w *words) add(v uint32) error {
	if w.n%pageWords == 0 {
		if err := w.end(len(w.pages) - 1); err != nil {
			return err
		}
		w.pages = append(w.pages, make([]uint32, 0, pageWords))
		w.held++
	}
	last := &w.pages[len(w.pages)-1]
	*last = append(*last, v)
	w.n++
	return nil
}

// end must be called when a page is full. If memory has as many pages as allowed, it writes the page to the file.
func (w *words) end(page int) (err error) {
	if page < 0 || w.held < w.most {
		return nil
	}
	if w.file == nil {
		if w.file, err = os.CreateTemp("", "kvasir-sim-*"); err != nil {
			return fmt.Errorf("replay: a trace that is longer than memory may hold needs a temporary file: %w", err)
		}
		if err = os.Remove(w.file.Name()); err != nil {
			return err
		}
	}
	w.bytes = w.bytes[:0]
	for _, v := range w.pages[page] {
		w.bytes = binary.LittleEndian.AppendUint32(w.bytes, v)
	}
	if _, err = w.file.WriteAt(w.bytes, int64(page)*pageWords*4); err != nil {
		return fmt.Errorf("replay: write the temporary file of a long trace: %w", err)
	}
	w.pages[page], w.held = nil, w.held-1
	return nil
}

// page returns a page; the caller may use it until the next call.
func (w *words) page(page int) ([]uint32, error) {
	if p := w.pages[page]; p != nil {
		return p, nil
	}
	n := min(pageWords, w.n-page*pageWords)
	w.bytes = append(w.bytes[:0], make([]byte, 4*n)...)
	if _, err := w.file.ReadAt(w.bytes, int64(page)*pageWords*4); err != nil {
		return nil, fmt.Errorf("replay: read the temporary file of a long trace: %w", err)
	}
	w.read = w.read[:0]
	for i := range n {
		w.read = append(w.read, binary.LittleEndian.Uint32(w.bytes[4*i:]))
	}
	return w.read, nil
}

func (w *words) close() {
	if w != nil && w.file != nil {
		_ = w.file.Close() // the file has no name, so nothing of it is left
	}
}

// prompts holds the full blocks of a trace's prompts, numbered from 1; 0 means no block. close removes the temporary file.
type prompts struct {
	tape     words // the blocks of each prompt, the first one with the mark begin; only begin for a prompt without a full block
	requests int
	blocks   int   // distinct blocks
	all      int64 // all blocks
	tokens   int64
	size     int // tokens in a block
}

// begin is the bit that marks the first block of a prompt.
const begin = 1 << 31

// numberPrompts gives numbers to the full blocks of the requests. A block is identified by its name and all names before it: the same
// name after two different beginnings means two blocks. held is how many words of a tape stay in memory, and different is the largest
// number of distinct blocks.
func numberPrompts(ctx context.Context, requests iter.Seq2[workload.Request, error], held, different int) (p *prompts, err error) {
	type step struct {
		before uint32
		name   int64
	}
	seen := make(map[step]uint32)
	p = &prompts{tape: words{most: max(1, held/pageWords)}}
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	for q, err := range requests {
		switch {
		case err != nil:
			return p, err
		case p.requests == maxPrompts:
			return p, fmt.Errorf("%w: it has more than %d requests: play fewer of them", workload.ErrTrace, maxPrompts)
		case p.requests%1024 == 0 && ctx.Err() != nil:
			return p, ctx.Err()
		}
		p.requests++
		p.size = q.BlockTokens
		p.tokens += int64(q.Input)
		full := q.Blocks[:min(len(q.Blocks), q.Input/max(q.BlockTokens, 1))]
		if len(full) == 0 {
			if err := p.tape.add(begin); err != nil {
				return p, err
			}
		}
		at, mark := uint32(0), uint32(begin)
		for _, name := range full {
			n := seen[step{at, name}]
			if n == 0 {
				if len(seen) == different {
					return p, fmt.Errorf("%w: it has more than %d different blocks: play fewer requests", workload.ErrTrace, different)
				}
				n = uint32(len(seen) + 1)
				seen[step{at, name}] = n
			}
			if err := p.tape.add(n | mark); err != nil {
				return p, err
			}
			at, mark = n, 0
		}
		p.all += int64(len(full))
	}
	p.blocks = len(seen)
	return p, nil
}

func (p *prompts) close() { p.tape.close() }

// play calls f for each prompt until f returns false or ctx ends. f gets the prompt's blocks, and the words of `with` at the same
// places; with may be nil. f must not use the slices after it has returned.
func (p *prompts) play(ctx context.Context, with *words, f func(request int, blocks, also []uint32) bool) error {
	var blocks, also, page, other []uint32
	request := -1
	for i := range p.tape.pages {
		var err error
		if page, err = p.tape.page(i); err != nil {
			return err
		}
		if with != nil {
			if other, err = with.page(i); err != nil {
				return err
			}
		}
		for k, w := range page {
			if w&begin != 0 {
				if request >= 0 && !f(request, blocks, also) {
					return nil
				}
				if request++; request%256 == 0 && ctx.Err() != nil {
					return ctx.Err()
				}
				blocks, also = blocks[:0], also[:0]
			}
			if b := w &^ begin; b != 0 {
				blocks = append(blocks, b)
				if with != nil {
					also = append(also, other[k])
				}
			}
		}
	}
	if request >= 0 {
		f(request, blocks, also)
	}
	return nil
}

// never is the next use of a block that is not used again.
const never = math.MaxUint32

// nextUses returns, for each word of the tape, the number (from 1) of the request that uses the block next.
func (p *prompts) nextUses(ctx context.Context) (next *words, err error) {
	next = &words{n: p.tape.n, most: p.tape.most, pages: make([][]uint32, len(p.tape.pages))}
	defer func() {
		if err != nil {
			next.close()
		}
	}()
	later := make([]uint32, p.blocks+1)
	request := uint32(p.requests)
	var page []uint32
	for i := len(p.tape.pages) - 1; i >= 0; i-- {
		if ctx.Err() != nil {
			return next, ctx.Err()
		}
		if page, err = p.tape.page(i); err != nil {
			return next, err
		}
		uses := make([]uint32, len(page))
		for k := len(page) - 1; k >= 0; k-- {
			b := page[k] &^ begin
			if uses[k] = later[b]; uses[k] == 0 {
				uses[k] = never
			}
			if b != 0 {
				later[b] = request
			}
			if page[k]&begin != 0 {
				request--
			}
		}
		next.pages[i] = uses
		next.held++
		if err = next.end(i); err != nil {
			return next, err
		}
	}
	return next, nil
}
