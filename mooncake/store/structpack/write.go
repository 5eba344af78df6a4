// SPDX-License-Identifier: Apache-2.0

package structpack

import (
	"encoding/binary"
	"math"
)

// Form is the type of messages to be written: its literal and hash.
type Form struct {
	literal string
	hash    uint32
}

// FormOf returns the Form of a literal. The empty literal means a message without a body.
func FormOf(literal string) Form { return Form{literal, Hash(literal)} }

// Literal returns the literal from which FormOf made the Form.
func (f Form) Literal() string { return f.literal }

// Writer appends the payload of one message. All sizes in a message have the same width, which must be known before the first size is
// written: Begin gets the largest size.
type Writer struct {
	B     []byte
	width uint8 // log2 of the bytes of a size
}

// Begin appends everything that precedes the payload. largest is the largest size of a string or vector in the payload.
func (w *Writer) Begin(f Form, largest int) {
	switch {
	case largest <= math.MaxUint8:
		w.width = 0
	case largest <= math.MaxUint16:
		w.width = 1
	case int64(largest) <= math.MaxUint32:
		w.width = 2
	default:
		w.width = 3
	}
	w.B = binary.LittleEndian.AppendUint32(w.B, f.hash|hasMeta)
	w.B = append(w.B, hasLiteral|w.width<<widthShift)
	w.B = append(append(w.B, f.literal...), 0)
}

// Size appends the size of a vector; its elements follow.
func (w *Writer) Size(n int) {
	for range 1 << w.width {
		w.B = append(w.B, byte(n))
		n >>= 8
	}
}

// String appends a string.
func (w *Writer) String(s string) {
	w.Size(len(s))
	w.B = append(w.B, s...)
}

// Strings appends a vector of strings.
func (w *Writer) Strings(s []string) {
	w.Size(len(s))
	for _, s := range s {
		w.String(s)
	}
}

// U64 appends a number of 8 bytes.
func (w *Writer) U64(v uint64) { w.B = binary.LittleEndian.AppendUint64(w.B, v) }

// I32 appends a number of 4 bytes.
func (w *Writer) I32(v int32) { w.B = binary.LittleEndian.AppendUint32(w.B, uint32(v)) }

// U8 appends a number of one byte.
func (w *Writer) U8(v uint8) { w.B = append(w.B, v) }

// Bool appends a bool. It is also the byte that says whether an optional has its value.
func (w *Writer) Bool(v bool) {
	if v {
		w.B = append(w.B, 1)
	} else {
		w.B = append(w.B, 0)
	}
}
