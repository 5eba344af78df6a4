// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
)

// bom may stand at the start of a stream. It is not part of the first line.
var bom = []byte("\ufeff")

// Done is the data of the last event of a stream.
const Done = "[DONE]"

// ErrEvent means that an event is longer than a Reader's limit.
var ErrEvent = errors.New("openai: event too long")

// Event is one server-sent event.
type Event struct {
	Raw  []byte // the received bytes, with the empty line at the end
	Data []byte // content of its data lines, joined by newlines
}

// Reader cuts a stream into events. If the stream ends inside an event, Next returns
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

// Next returns the next event, or io.EOF. The event is valid until the next call.
//
// Source: the WHATWG HTML standard, server-sent events. Lines end with LF or CR LF. Comments and
// other fields stay in Raw and are not in Data. Unlike in the standard, a lone CR does not end a line.
func (r *Reader) Next() (e Event, err error) {
	r.raw, r.buf = r.raw[:0], r.buf[:0]
	lines := 0
	for {
		from := len(r.raw)
		for {
			part, err := r.r.ReadSlice('\n')
			if r.raw = append(r.raw, part...); len(r.raw) > r.max {
				return e, fmt.Errorf("%w: it has more than %d bytes", ErrEvent, r.max)
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

// Rest returns, after an error of Next, the bytes that were read but are not part of a returned event. They stay valid. Next must not
// be called after Rest.
func (r *Reader) Rest() []byte {
	ahead, _ := r.r.Peek(r.r.Buffered()) // buffered bytes only
	return append(r.raw, ahead...)
}

// AppendEvent appends an event with one line of data, which has no newline.
func AppendEvent(b, data []byte) []byte {
	return append(append(append(b, "data: "...), data...), "\n\n"...)
}
