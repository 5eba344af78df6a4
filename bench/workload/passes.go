// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"os"
)

// Trace is a trace that is read in several passes, each with the same requests: those that the file had when the first pass reached its
// end. Only what a pass reads ahead is in memory. Passes must come one after another. Close closes its files.
type Trace struct {
	name  string
	o     TraceOptions
	file  *os.File // nil: the requests are made, not read
	again bool     // there may be several passes
	spool *os.File // copy of what was read from a file that is not regular
	kept  int64    // bytes in spool
	found passed
}

// passed is what a pass has read.
type passed struct {
	requests int
	sum      uint32 // checksum of their lines
}

// OpenTrace opens the trace in a file, or, for the name Agentic, makes one of Agents. A file that is not regular, such as a pipe, is
// copied to a temporary file without a name while the first pass reads it. Errors are those of Load, but an error in a line comes when
// the line is read.
func OpenTrace(name string, o TraceOptions) (*Trace, error) {
	t, err := openTrace(name, o)
	switch {
	case err != nil:
		return nil, err
	case t.file == nil:
		return t, nil
	}
	info, err := t.file.Stat()
	if err == nil && !info.Mode().IsRegular() {
		t.spool, err = nameless()
	}
	if err != nil {
		return nil, errors.Join(err, t.file.Close())
	}
	t.again = true
	return t, nil
}

// openTrace opens a trace for one pass.
func openTrace(name string, o TraceOptions) (t *Trace, err error) {
	t = &Trace{name: name, o: o}
	if err := t.o.defaults(); err != nil {
		return nil, err
	}
	if name == Agentic {
		t.o.Max = cmp.Or(o.Max, agenticRequests)
		return t, checkAgentic(&t.o)
	}
	t.file, err = os.Open(name)
	return t, err
}

// nameless creates a temporary file without a name.
func nameless() (f *os.File, err error) {
	if f, err = os.CreateTemp("", "kvasir-trace-*"); err != nil {
		return nil, fmt.Errorf("a trace that can be read only once needs a temporary file: %w", err)
	}
	if err = os.Remove(f.Name()); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// Close closes the files of the trace.
func (t *Trace) Close() error {
	var errs []error
	for _, f := range []*os.File{t.file, t.spool} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

// Requests returns the requests in the order of their arrivals, as Stream does. Errors are those of Reader.InOrder, with the file's
// name, and ErrTrace if the file has other requests than in the pass before. The sequence ends with its first error.
func (t *Trace) Requests() iter.Seq2[Request, error] {
	o := t.o
	o.TokenTime = cmp.Or(o.TokenTime, tokenTime)
	return t.pass(o, (*Reader).InOrder)
}

// Lines returns the requests in the order of the file, as ReadTrace does. Its errors are those of Requests.
func (t *Trace) Lines() iter.Seq2[Request, error] { return t.pass(t.o, (*Reader).inFile) }

// SelfTimed returns the requests in the order of their arrivals, for a player that knows when a turn of a session ends: a later turn
// without a timestamp arrives its delay after the arrival of the turn before it. Its errors are those of Requests.
func (t *Trace) SelfTimed() iter.Seq2[Request, error] { return t.pass(t.o, (*Reader).InOrder) }

// inFile returns the requests in the order of the file. The sequence ends with its first error.
func (t *Reader) inFile() iter.Seq2[Request, error] {
	return func(yield func(Request, error) bool) {
		for {
			q, err := t.Next()
			if errors.Is(err, io.EOF) || !yield(q, err) || err != nil {
				return
			}
		}
	}
}

// pass returns the sequence of requests that a new Reader reads.
func (t *Trace) pass(o TraceOptions, order func(*Reader) iter.Seq2[Request, error]) iter.Seq2[Request, error] {
	if t.file == nil {
		return AgentRequests(t.o.Max, AgentOptions{Block: t.o.BlockTokens})
	}
	return func(yield func(Request, error) bool) {
		if t.found.requests > 0 {
			o.Max = t.found.requests
		}
		r, err := NewReader(bufio.NewReaderSize(t.bytes(), 1<<20), o)
		if err != nil {
			yield(Request{}, err)
			return
		}
		r.atEnd = t.ended
		for q, err := range order(r) {
			if err != nil {
				err = fmt.Errorf("%s: %w", t.name, err)
			}
			if !yield(q, err) {
				return
			}
		}
	}
}

// ended compares a complete pass with the first one. If they differ, the file has changed, and the error is ErrTrace.
func (t *Trace) ended(p passed) error {
	if t.found.requests == 0 {
		t.found = p
	}
	if t.found != p {
		return fmt.Errorf("%w: the file changed while it was played: its first pass had %d requests, a later one %d, or other ones", ErrTrace, t.found.requests, p.requests)
	}
	return nil
}

// bytes returns the reader for a pass.
func (t *Trace) bytes() io.Reader {
	switch {
	case !t.again:
		return t.file
	case t.spool == nil:
		return io.NewSectionReader(t.file, 0, math.MaxInt64)
	}
	return io.MultiReader(io.NewSectionReader(t.spool, 0, t.kept), (*spooling)(t))
}

// spooling reads a file that can be read only once, and keeps a copy of what it reads.
type spooling Trace

func (s *spooling) Read(p []byte) (int, error) {
	n, err := s.file.Read(p)
	if n > 0 {
		if _, werr := s.spool.WriteAt(p[:n], s.kept); werr != nil {
			return 0, fmt.Errorf("write the temporary file of a trace that can be read only once: %w", werr)
		}
		s.kept += int64(n)
	}
	return n, err
}

// Count reads requests and returns how many there are. The error is one of the requests, or ctx's.
func Count(ctx context.Context, requests iter.Seq2[Request, error]) (n int, err error) {
	for _, err := range requests {
		if err != nil {
			return n, err
		}
		if n++; n%1024 == 0 && ctx.Err() != nil {
			return n, ctx.Err()
		}
	}
	return n, ctx.Err()
}

// Each returns requests in memory as a sequence.
func Each(requests []Request) iter.Seq2[Request, error] {
	return func(yield func(Request, error) bool) {
		for i := range requests {
			if !yield(requests[i], nil) {
				return
			}
		}
	}
}
