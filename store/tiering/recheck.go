// SPDX-License-Identifier: Apache-2.0

package tiering

import (
	"context"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

const (
	recheckBatch      = 256                   // objects in one call of the tier
	recheckPause      = 10 * time.Millisecond // between two calls: a million objects take less than a minute
	recheckRetryDelay = 5 * time.Second       // after a call that failed
)

// RecordedObject is an object that the pool's index records as being in the tier.
type RecordedObject struct {
	Slot, Generation uint32
	Bytes            int64
}

// Notes are the records of the objects that are in the tier.
type Notes interface {
	// Slots is how many slots there are.
	Slots() int
	// Recorded returns recorded keys from slot `from` on, `most` at most. next is the slot to continue from; `end` when none is left.
	Recorded(from, end, most int) (keys []kv.Key, of []RecordedObject, next int)
	// Ask asks the tier for objects. A tier that rests after failures may answer that it has none; later writes then find that it has.
	Ask(ctx context.Context, keys []kv.Key) ([]tier.Meta, error)
	// Settle records, for each object that the tier lacks by metas, that it is not in the tier. The Notes decide when it is written again.
	Settle(of []RecordedObject, metas []tier.Meta)
}

// Recheck asks a tier, once, for each object that is recorded as being there. Objects may have been lost since: removed by hand, evicted by
// the tier, lost with a disk. It passes the answers to Settle. Recheck begins when opened is closed, or at once if it is nil. It returns
// when it has asked for all objects or ctx ends.
func Recheck(ctx context.Context, n Notes, opened <-chan struct{}) {
	if opened != nil {
		select {
		case <-opened:
		case <-ctx.Done():
			return
		}
	}
	for from, end := 0, n.Slots(); from < end && ctx.Err() == nil; {
		keys, of, next := n.Recorded(from, end, recheckBatch)
		wait := recheckPause
		if len(keys) > 0 {
			if metas, err := n.Ask(ctx, keys); err == nil {
				n.Settle(of, metas)
			} else {
				next, wait = from, recheckRetryDelay
			}
		}
		if from = next; from >= end {
			return
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
	}
}
