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
func (r *Receiver) mayBeOnItsWay(addr string, q *receiving) bool {
	if empty(q.want.Blocks) {
		return false
	}
	switch r.o.Target.Table().Confirmation(q.window.handles...) {
	case transfer.Confirmed:
		return false
	case transfer.Unconfirmed:
		return true
	}
	host, _, err := net.SplitHostPort(strings.TrimPrefix(addr, "tcp://"))
	return err == nil && r.o.Target.PlainHost(host)
}

// awaitArrival waits until every byte of q's blocks has been written. It counts bytes
// of memory, not of messages: a push that is repeated fills nothing twice.
func (r *Receiver) awaitArrival(q *receiving) {
	table := r.o.Target.Table()
	ranges := r.windows.expected(q.window, q.want.Blocks)
	patience := time.NewTimer(r.o.ArrivalTimeout)
	defer patience.Stop()
	for {
		missing, next, stop := table.Unwritten(ranges...)
		why := q.gaveUp()
		if missing > 0 && why == nil {
			select {
			case <-next:
				stop()
				continue
			case <-q.ctx.Done():
				why = q.gaveUp()
			case <-patience.C:
				why = fmt.Errorf("%w (%d bytes of transfer %.64q)", ErrUnconfirmed, missing, q.want.TransferID)
			}
		}
		stop()
		if missing > 0 {
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
