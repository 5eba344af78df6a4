// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"context"
	"errors"
	"sync"

	"github.com/kvasir-kv/kvasir/tier"
)

// A call with a tier.Flow moves a payload in parts, front to back, several at once: the caller works on one part while the disk moves the
// next ones.
const (
	flowPart  = 256 << 10 // least bytes of a part
	flowParts = 8         // most parts
	flowWidth = 3         // parts that are moved at the same time
)

// partOf returns how many bytes each part of a payload's body has: whole blocks.
func partOf(body int64) int64 {
	return max(flowPart, (body/flowParts+block-1)/block*block)
}

// inParts calls f with each part of a payload's body, in order, and returns after the last one. After an error no part is begun.
func inParts(body int64, f func(at, n int64, last bool) error) error {
	part := partOf(body)
	if body <= part {
		return f(0, body, true)
	}
	var mu sync.Mutex
	var failed error
	next := int64(0)
	take := func(err error) (at int64, ok bool) {
		mu.Lock()
		defer mu.Unlock()
		if failed = errors.Join(failed, err); failed != nil || next >= body {
			return 0, false
		}
		next += part
		return next - part, true
	}
	work := func() {
		var err error
		for at, ok := take(nil); ok; at, ok = take(err) {
			err = f(at, min(part, body-at), at+part >= body)
		}
	}
	var wg sync.WaitGroup
	for range flowWidth - 1 {
		wg.Go(work)
	}
	work()
	wg.Wait()
	return failed
}

// readFlow is readInto for memory that suits direct I/O.
func (v *volume) readFlow(ctx context.Context, s *segment, r *record, dst []byte, flow *tier.Flow) error {
	ends := v.heads.get()
	defer v.heads.put(ends)
	body, rest, extra := parts(int64(r.len))
	flow.Starts(r.meta())
	return inParts(body, func(at, n int64, last bool) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := v.readPiece(s, r, at, dst[at:at+n], ends, last && extra); err != nil {
			return err
		}
		flow.Has(at, at+n)
		if extra && last || !extra && at == 0 {
			copy(dst[body:], restOf(ends, rest, extra))
			flow.Has(body, body+rest)
		}
		return nil
	})
}

// appendFlow is append for memory that suits direct I/O.
func (v *volume) appendFlow(ctx context.Context, s *segment, r *record, src []byte, flow *tier.Flow) error {
	ends := v.heads.get()
	defer v.heads.put(ends)
	clear(ends)
	body, rest, extra := parts(int64(r.len))
	if err := flow.Wants(body, body+rest); err != nil {
		return err
	}
	putRecord(ends, s.id, r)
	copy(restOf(ends, rest, extra), src[body:])
	return inParts(body, func(at, n int64, last bool) error {
		if err := errors.Join(ctx.Err(), flow.Wants(at, at+n)); err != nil {
			return err
		}
		return writePiece(s, r, at, src[at:at+n], ends, last && extra)
	})
}
