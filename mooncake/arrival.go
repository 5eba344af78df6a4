// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"fmt"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// mayStillArrive reports whether blocks of q may arrive after P's answer. They may if P's transfer engine does not confirm its writes:
// such an engine reports success when the bytes have left P.
func (r *Receiver) mayStillArrive(q *receiving) bool {
	if empty(q.want.Blocks) {
		return false
	}
	return r.confirmation(q) != transfer.Confirmed
}

func (r *Receiver) confirmation(q *receiving) transfer.Confirmation {
	return r.o.Target.Table().Confirmation(q.window.handles...)
}

// needsArrivalCheck reports whether D must check by itself that q's blocks are filled, because P's answer does not prove it.
func (r *Receiver) needsArrivalCheck(q *receiving) bool {
	return r.mayStillArrive(q) || r.windows.watched && !empty(q.want.Blocks)
}

// missing returns how many bytes of q's blocks no peer has written yet.
func (r *Receiver) missing(q *receiving) uint64 {
	n, _, stop := r.o.Target.Table().Unwritten(r.windows.expected(q.window, q.want.Blocks)...)
	stop()
	return n
}

// awaitArrival waits until every byte of q's blocks has been written. It counts bytes of memory and not of messages, so a repeated push
// counts once. It also waits when P has written nothing so far: an engine that confirms its writes would have written something before
// P answered. It does not wait when P's engine confirmed all writes, because P then has nothing more to send.
func (r *Receiver) awaitArrival(q *receiving) {
	ranges := r.windows.expected(q.window, q.want.Blocks)
	timer := time.NewTimer(r.o.ArrivalTimeout)
	defer timer.Stop()
	for {
		missing, next, stop := r.o.Target.Table().Unwritten(ranges...)
		why := q.gaveUp()
		switch {
		case missing == 0 || why != nil:
		case r.mayStillArrive(q):
			select {
			case <-next:
				stop()
				continue
			case <-q.ctx.Done():
				why = q.gaveUp()
			case <-r.ctx.Done():
				why = errReceiverClosed
			case <-timer.C:
				if why = incompleteError(q, missing); !r.windows.watched || r.confirmation(q) == transfer.Unconfirmed {
					why = fmt.Errorf("%w (%d bytes of transfer %.64q)", ErrUnconfirmed, missing, q.want.TransferID)
				}
			}
		case r.windows.watched:
			why = incompleteError(q, missing)
		}
		stop()
		if missing > 0 && why != nil {
			r.mu.Lock()
			q.err, q.suspect = why, true
			r.mu.Unlock()
		}
		return
	}
}

// incompleteError is the error of a request that P reported as sent although `missing` bytes of its blocks never came.
func incompleteError(q *receiving, missing uint64) error {
	return fmt.Errorf("%w: it says that it has sent request %.64q, but %d bytes of it never came: P does not know the request, or has blocks of another size",
		ErrPeer, q.id, missing)
}

// expected returns the ranges of w that P's push into the blocks must fill.
func (ws *windows) expected(w *window, blocks [][]int) []transfer.Range {
	return ws.blockRanges(w, blocks, func(r *wire.Region, group, id int) uint64 {
		if id == 0 && group < len(ws.cache.Kinds) && ws.cache.Kinds[group] == Mamba {
			return 0 // block 0 is a placeholder
		}
		return r.Payload
	})
}
