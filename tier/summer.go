// SPDX-License-Identifier: Apache-2.0

package tier

import (
	"errors"
	"io"
	"sync"

	"github.com/zeebo/xxh3"
)

// hotPiece is how many bytes are read before their checksum is computed: they are still in the processor's cache then.
const hotPiece = 128 << 10

// Summer computes the xxh3 of memory while it is filled from connections, front to back. A nil Summer only
// fills.
type Summer struct {
	h      xxh3.Hasher
	at     int64 // bytes so far
	reread bool  // bytes were read twice, so h is useless
}

// Fill fills dst, which begins at byte `at` of the whole, from r. Errors: those of r, io.ErrUnexpectedEOF for io.EOF.
func (s *Summer) Fill(r io.Reader, dst []byte, at int64) error {
	if s != nil {
		s.reread = s.reread || s.at != at
	}
	for len(dst) > 0 {
		piece := dst
		if s != nil {
			piece = dst[:min(len(dst), hotPiece)]
		}
		n, err := io.ReadFull(r, piece)
		if s != nil {
			_, _ = s.h.Write(piece[:n])
			s.at += int64(n)
		}
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return err
		}
		dst = dst[n:]
	}
	return nil
}

var summers = sync.Pool{New: func() any { return new(Summer) }}

// Summed calls read, which must fill dst through the Summer. It also returns the checksum of dst.
func Summed(dst []byte, read func(*Summer) (Meta, error)) (m Meta, sum uint64, err error) {
	s := summers.Get().(*Summer)
	defer summers.Put(s)
	s.h.Reset()
	s.at, s.reread = 0, false
	if m, err = read(s); err != nil {
		return m, 0, err
	}
	if s.reread || s.at != int64(len(dst)) {
		return m, xxh3.Hash(dst), nil
	}
	return m, s.h.Sum64(), nil
}
