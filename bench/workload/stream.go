// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"bufio"
	"bytes"
	"cmp"
	"container/heap"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"iter"
	"time"
)

// Limits of a trace that is streamed.
const (
	windowRequests = 1 << 18 // requests that are read ahead to put lines into order; with more, the earliest of them is returned
	windowBlocks   = 1 << 23 // names of their blocks: 64 MiB; likewise
	maxSessions    = 1 << 20 // a trace with more is an error
)

// tokenTime is the estimated time per generated token when there is no engine: a later turn of a session arrives its delay after the
// estimated end of the turn before it.
const tokenTime = 20 * time.Millisecond

// Reader reads a trace line by line. It keeps in memory one line, and for each session what its next turn continues.
type Reader struct {
	o        TraceOptions
	s        *bufio.Scanner
	line     int // number of the line of the last request
	requests int
	chats    int // number of conversations
	sessions map[string]*session
	kept     int // number of blocks in the prompts of the sessions

	sum   uint32             // checksum of the lines of all requests so far
	atEnd func(passed) error // called at the end; its error replaces io.EOF; nil: not called
}

// NewReader returns a Reader of a trace. It returns ErrTrace for options that cannot be used.
func NewReader(r io.Reader, o TraceOptions) (*Reader, error) {
	if err := o.defaults(); err != nil {
		return nil, err
	}
	t := &Reader{o: o, s: bufio.NewScanner(r), sessions: make(map[string]*session)}
	t.s.Buffer(nil, maxTraceLine)
	return t, nil
}

// Line returns the number of the line of the last request.
func (t *Reader) Line() int { return t.line }

// Next returns the next request in the order of the file; io.EOF after the last one, or after TraceOptions.Max requests. Other errors
// wrap ErrTrace and name the line.
func (t *Reader) Next() (Request, error) {
	if t.o.Max > 0 && t.requests == t.o.Max {
		return Request{}, t.end()
	}
	for t.s.Scan() {
		t.line++
		text := bytes.TrimSpace(t.s.Bytes())
		if len(text) == 0 {
			continue
		}
		q, err := t.parse(text)
		if err != nil {
			return Request{}, fmt.Errorf("%w: line %d: %w", ErrTrace, t.line, err)
		}
		t.requests++
		t.sum = crc32.Update(t.sum, castagnoli, text)
		return q, nil
	}
	t.line++
	switch err := t.s.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		return Request{}, fmt.Errorf("%w: line %d is longer than %d bytes", ErrTrace, t.line, maxTraceLine)
	case err != nil:
		return Request{}, fmt.Errorf("%w: line %d: %w", ErrTrace, t.line, err)
	case t.requests == 0:
		return Request{}, fmt.Errorf("%w: no requests", ErrTrace)
	}
	return Request{}, t.end()
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// end returns the error with which the requests end.
func (t *Reader) end() error {
	if t.atEnd != nil {
		if err := t.atEnd(passed{t.requests, t.sum}); err != nil {
			return err
		}
	}
	return io.EOF
}

// InOrder returns the requests in the order of their arrivals. It reads ahead 262,144 requests, or 8,388,608 names of blocks, so a
// shorter trace may have its lines in any order. If a line should have come before one that was already returned, the error names that
// line. The sequence ends with its first error.
func (t *Reader) InOrder() iter.Seq2[Request, error] {
	return func(yield func(Request, error) bool) {
		var ahead byArrival
		blocks, last := 0, time.Duration(0)
		first := func() bool {
			q := heap.Pop(&ahead).(numbered)
			blocks, last = blocks-len(q.Blocks), q.Arrival
			return yield(q.Request, nil)
		}
		for n := 0; ; n++ {
			q, err := t.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err == nil && q.Arrival < last {
				err = fmt.Errorf("%w: line %d: its request comes at %v, and one at %v was already played: sort the trace by time", ErrTrace, t.line, q.Arrival, last)
			}
			if err != nil {
				yield(Request{}, err)
				return
			}
			heap.Push(&ahead, numbered{q, n})
			for blocks += len(q.Blocks); len(ahead) > t.o.window || blocks > t.o.windowBlocks; {
				if !first() {
					return
				}
			}
		}
		for len(ahead) > 0 {
			if !first() {
				return
			}
		}
	}
}

// numbered is a request with its position in the file.
type numbered struct {
	Request
	n int
}

// byArrival is a heap of requests by arrival. Of equal arrivals, the first in the file comes first.
type byArrival []numbered

func (b byArrival) Len() int { return len(b) }

func (b byArrival) Less(i, j int) bool {
	return cmp.Or(cmp.Compare(b[i].Arrival, b[j].Arrival), cmp.Compare(b[i].n, b[j].n)) < 0
}

func (b byArrival) Swap(i, j int) { b[i], b[j] = b[j], b[i] }

func (b *byArrival) Push(x any) { *b = append(*b, x.(numbered)) }

func (b *byArrival) Pop() any {
	last := len(*b) - 1
	x := (*b)[last]
	(*b)[last] = numbered{}
	*b = (*b)[:last]
	return x
}

// Stream reads the trace in a file, like Load, but does not keep it in memory: it returns the requests in the order of their arrivals
// while it reads the file. The file is open while the sequence is read. Errors are those of Load and of Reader.InOrder, with the file's
// name.
func Stream(name string, o TraceOptions) iter.Seq2[Request, error] {
	return func(yield func(Request, error) bool) {
		t, err := openTrace(name, o)
		if err != nil {
			yield(Request{}, err)
			return
		}
		defer func() { _ = t.Close() }() // the file was only read, so the error does not matter
		for q, err := range t.Requests() {
			if !yield(q, err) {
				return
			}
		}
	}
}
