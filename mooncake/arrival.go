package mooncake

import (
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/transfer"
)

// mayBeOnItsWay says whether P's word that q's blocks are filled may come before the
// blocks: its transfer engine reports success when the bytes have left it.
func (r *Receiver) mayBeOnItsWay(q *receiving) bool {
	if empty(q.want.Blocks) {
		return false
	}
	switch r.o.Target.Table().Confirmation(q.window.handles...) {
	case transfer.Confirmed:
		return false
	default:
		return true
	}
}

// graceFor is how long the first bytes of a P may be on their way after its word, when
// nothing says that its engine does not confirm its writes.
const graceFor = 250 * time.Millisecond

// patience is how long to wait for q's blocks now.
func (r *Receiver) patience(addr string, q *receiving) time.Duration {
	switch r.o.Target.Table().Confirmation(q.window.handles...) {
	case transfer.Confirmed:
		return 0
	case transfer.Unconfirmed:
		return r.o.ArrivalTimeout
	}
	host, _, err := net.SplitHostPort(strings.TrimPrefix(addr, "tcp://"))
	if err == nil && r.o.Target.PlainHost(host) {
		return r.o.ArrivalTimeout
	}
	return min(graceFor, r.o.ArrivalTimeout)
}

// awaitArrival waits until every byte of q's blocks has been written. It counts bytes
// of memory, not of messages: a push that is repeated fills nothing twice. Where no
// write has come from P at all, and none comes soon, its word is taken.
func (r *Receiver) awaitArrival(addr string, q *receiving) {
	table := r.o.Target.Table()
	ranges := r.windows.expected(q.window, q.want.Blocks)
	start := time.Now()
	for {
		missing, next, stop := table.Unwritten(ranges...)
		why, atMost := q.gaveUp(), r.patience(addr, q)
		if missing > 0 && why == nil && atMost > 0 {
			timer := time.NewTimer(atMost - time.Since(start))
			select {
			case <-next:
				stop()
				timer.Stop()
				continue
			case <-q.ctx.Done():
				why = q.gaveUp()
			case <-timer.C:
				if atMost == r.o.ArrivalTimeout {
					why = fmt.Errorf("%w (%d bytes of transfer %.64q)", ErrUnconfirmed, missing, q.want.TransferID)
				}
			}
			timer.Stop()
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
