// SPDX-License-Identifier: Apache-2.0

package tier

import (
	"context"
	"io"
	"slices"
)

// Flow lets a wrapper work on the bytes of an object while the tier below moves them. The context of a Read or a Write carries it to a
// tier that is Flowing. Its methods may be called at the same time. Those of a nil Flow do nothing.
type Flow struct {
	Begin func(m Meta)                     // Read: the bytes of an object come next; called again when the tier reads them again
	Got   func(from, to int64)             // Read: dst[from:to] is there, and is not written again unless Begin is called
	Need  func(from, to int64) (err error) // Write: waits until src[from:to] is there
}

// Flowing is a tier that calls the Flow's Wants in a Write before it reads bytes of src. In a Read it may leave the Flow out.
type Flowing interface{ Flows() }

type flowKey struct{}

// WithFlow returns a context with a Flow.
func WithFlow(ctx context.Context, f *Flow) context.Context {
	return context.WithValue(ctx, flowKey{}, f)
}

// FlowOf returns the Flow of a context, or nil if the context has none.
func FlowOf(ctx context.Context) *Flow {
	f, _ := ctx.Value(flowKey{}).(*Flow)
	return f
}

// Starts calls Begin: the bytes of an object come next.
func (f *Flow) Starts(m Meta) {
	if f != nil && f.Begin != nil {
		f.Begin(m)
	}
}

// Has calls Got: dst[from:to] is there.
func (f *Flow) Has(from, to int64) {
	if f != nil && f.Got != nil {
		f.Got(from, to)
	}
}

// Wants calls Need, which waits until src[from:to] is there.
func (f *Flow) Wants(from, to int64) error {
	if f == nil || f.Need == nil {
		return nil
	}
	return f.Need(from, to)
}

// flowPiece is the length of a piece in bytes. A Flow is called once per piece.
const flowPiece = 256 << 10

// Fill reads len(dst) bytes from r into dst, which begins at byte `at` of the object. The Summer sum hashes the bytes, and the Flow is told
// of each piece. Errors: those of Summer.Fill.
func (f *Flow) Fill(sum *Summer, r io.Reader, dst []byte, at int64) error {
	if f == nil || f.Got == nil {
		return sum.Fill(r, dst, at)
	}
	for len(dst) > 0 {
		n := min(len(dst), flowPiece)
		if err := sum.Fill(r, dst[:n], at); err != nil {
			return err
		}
		f.Has(at, at+int64(n))
		dst, at = dst[n:], at+int64(n)
	}
	return nil
}

// Parts divides src, which begins at byte `at` of the object, into parts to be sent one after the other. ready waits until the bytes of a
// part are there; if ready is nil, all bytes are. Without a Flow there is one part.
func (f *Flow) Parts(src []byte, at int64) (parts [][]byte, ready func(part int) error) {
	if f == nil || f.Need == nil {
		return [][]byte{src}, nil
	}
	parts = slices.Collect(slices.Chunk(src, flowPiece))
	return parts, func(i int) error {
		from := at + int64(i)*flowPiece
		return f.Need(from, from+int64(len(parts[i])))
	}
}
