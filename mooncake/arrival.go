package mooncake

import (
	"fmt"
	"time"

	"github.com/kvasir-kv/kvasir/transfer"
)

// mayBeOnItsWay says whether P's word that q's blocks are filled may come before the
// blocks: its transfer engine reports success when the bytes have left it.
func (r *Receiver) mayBeOnItsWay(q *receiving) bool {
	if empty(q.want.Blocks) {
		return false
	}
	return r.o.Target.Table().Confirmation(q.window.handles...) != transfer.Confirmed
}

// awaitArrival waits until every byte of q's blocks has been written. It counts bytes
// of memory, not of messages: a push that is repeated fills nothing twice. Where no
// write has come from P at all it waits, too: an engine that confirms its writes has
// had its confirmation, so something has come before P's word.
func (r *Receiver) awaitArrival(q *receiving) {
	ranges := r.windows.expected(q.window, q.want.Blocks)
	timer := time.NewTimer(r.o.ArrivalTimeout)
	defer timer.Stop()
	for {
		missing, next, stop := r.o.Target.Table().Unwritten(ranges...)
		why := q.gaveUp()
		if missing > 0 && why == nil && r.mayBeOnItsWay(q) {
			select {
			case <-next:
				stop()
				continue
			case <-q.ctx.Done():
				why = q.gaveUp()
			case <-r.ctx.Done():
				why = errReceiverClosed
			case <-timer.C:
				why = fmt.Errorf("%w (%d bytes of transfer %.64q)", ErrUnconfirmed, missing, q.want.TransferID)
			}
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

// expected returns what P's push into the blocks fills: all that carries KV.
func (ws *windows) expected(w *window, blocks [][]int) []transfer.Range {
	return ws.each(w, blocks, func(r *Region, group, id int) uint64 {
		if id == 0 && group < len(ws.cache.Kinds) && ws.cache.Kinds[group] == Mamba {
			return 0 // no block
		}
		return r.Payload
	})
}
