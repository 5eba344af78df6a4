// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
)

// bom may begin a stream, and is no part of its first line.
var bom = []byte("\ufeff")

// Done is the data of the last event of a stream.
const Done = "[DONE]"

// ErrEvent means that an event is longer than a Reader's limit.
var ErrEvent = errors.New("openai: event too long")

// Event is one server-sent event.
type Event struct {
	Raw  []byte // as it came, the empty line behind it included
	Data []byte // of its data lines, without their names; several are joined by a newline
}

// Reader cuts a stream into events. A stream that ends in the middle of one gives
// io.ErrUnexpectedEOF.
type Reader struct {
	r   *bufio.Reader
	max int
	raw []byte
	buf []byte
}

// NewReader returns a Reader of events of at most max bytes.
func NewReader(r io.Reader, max int) *Reader {
	return &Reader{r: bufio.NewReaderSize(r, 16<<10), max: max}
}

// Next returns the next event, valid until the call after it, or io.EOF.
//
// Source: the WHATWG HTML standard, server-sent events: lines end with LF, CR LF; comments and
// other fields are kept in Raw and are no data. A lone CR is not taken for an end.
func (r *Reader) Next() (e Event, err error) {
	r.raw, r.buf = r.raw[:0], r.buf[:0]
	lines := 0
	for {
		from := len(r.raw)
		for {
			part, err := r.r.ReadSlice('\n')
			if r.raw = append(r.raw, part...); len(r.raw) > r.max {
				return e, fmt.Errorf("%w: more than %d bytes", ErrEvent, r.max)
			}
			if err == nil {
				break
			}
			if errors.Is(err, bufio.ErrBufferFull) {
				continue
			}
			if errors.Is(err, io.EOF) && len(r.raw) > 0 {
				err = io.ErrUnexpectedEOF
			}
			return e, err
		}
		line := bytes.TrimPrefix(bytes.TrimSuffix(bytes.TrimSuffix(r.raw[from:], []byte("\n")), []byte("\r")), bom)
		if len(line) == 0 {
			return Event{r.raw, r.buf}, nil
		}
		data, ok := bytes.CutPrefix(line, []byte("data:"))
		if !ok {
			continue
		}
		if lines++; lines > 1 {
			r.buf = append(r.buf, '\n')
		}
		r.buf = append(r.buf, bytes.TrimPrefix(data, []byte(" "))...)
	}
}

// Rest returns what was read and is part of no event that Next returned, after an error of Next. It is valid for good; Next may
// not be called after it.
func (r *Reader) Rest() []byte {
	ahead, _ := r.r.Peek(r.r.Buffered()) // which are there
	return append(r.raw, ahead...)
}

// AppendEvent appends an event with one line of data, which has no newline.
func AppendEvent(b, data []byte) []byte {
	return append(append(append(b, "data: "...), data...), "\n\n"...)
}
