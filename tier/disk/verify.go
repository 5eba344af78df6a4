// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"context"
	"fmt"

	"github.com/zeebo/xxh3"
)

// verify compares a record with its checksum. It passes the number of bytes it read to paced.
func (v *volume) verify(ctx context.Context, s *segment, r *record, paced func(int) error) error {
	if r.seal != 0 {
		return v.verifySealed(ctx, s, r, paced)
	}
	h := xxh3.New()
	err := v.stream(ctx, s, r, func(b []byte) error {
		_, _ = h.Write(b) // never fails
		return paced(len(b))
	})
	if err == nil && h.Sum64() != r.sum {
		err = fmt.Errorf("%w: their checksum is %x, recorded is %x", errDamaged, h.Sum64(), r.sum)
	}
	return err
}

// verifySealed is verify for an encrypted record. Options.VerifySealed, which has the key, compares it.
func (v *volume) verifySealed(ctx context.Context, s *segment, r *record, paced func(int) error) error {
	if v.opts.VerifySealed == nil {
		return nil
	}
	b := make([]byte, 0, r.len)
	err := v.stream(ctx, s, r, func(piece []byte) error {
		b = append(b, piece...)
		return paced(len(piece))
	})
	if err != nil {
		return err
	}
	if err := v.opts.VerifySealed(r.key, r.meta(), b); err != nil {
		return fmt.Errorf("%w: %w", errDamaged, err)
	}
	return nil
}
