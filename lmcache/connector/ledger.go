// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"maps"
	"slices"

	"github.com/kvasir-kv/kvasir/lmcache"
)

// maxAnnounced bounds the ended requests that a ledger remembers, so that it reports each end once. Beyond it the oldest is forgotten: its
// end is reported again if the engine names it again.
const maxAnnounced = 1 << 13

// ledger records which requests have operations in progress, and which ends must still be reported. Its owner guards it.
type ledger struct {
	stores, loads map[string]int      // number of operations in progress by request, > 0
	received      map[string]struct{} // loads that ended and were not reported yet
	ending        map[string]struct{} // ended by the engine, with operations in progress
	announced     map[string]struct{} // ended by the engine, and reported
	order         []string            // of announced, oldest first
	requests      map[string]struct{} // requests with a failed load
	blocks        map[int]struct{}    // blocks of failed loads
}

func (l *ledger) init() {
	l.stores, l.loads = make(map[string]int), make(map[string]int)
	l.received, l.ending, l.announced = make(map[string]struct{}), make(map[string]struct{}), make(map[string]struct{})
	l.requests, l.blocks = make(map[string]struct{}), make(map[int]struct{})
}

// begin records an operation. It also forgets that the end of an earlier request of the same id was reported.
func (l *ledger) begin(op *lmcache.LoadStore) {
	l.forget(op.RequestID)
	if op.Direction == lmcache.Store {
		l.stores[op.RequestID]++
	} else {
		l.loads[op.RequestID]++
	}
}

// forget allows the end of the request id to be reported once more.
func (l *ledger) forget(id string) {
	if _, ok := l.announced[id]; ok {
		delete(l.announced, id)
		if i := slices.Index(l.order, id); i >= 0 {
			l.order = slices.Delete(l.order, i, i+1)
		}
	}
}

// end records that an operation has ended. Without `ok` it failed: a load's request, and the blocks that it may have written, are then
// reported as errors.
func (l *ledger) end(j *job, ok bool, blockTokens int) {
	if j.Direction == lmcache.Store {
		less(l.stores, j.RequestID, j.parts)
		return
	}
	less(l.loads, j.RequestID, j.parts)
	l.received[j.RequestID] = struct{}{}
	if ok {
		return
	}
	l.requests[j.RequestID] = struct{}{}
	for _, ids := range j.Blocks {
		for _, id := range ids[min(max(0, j.SkipFirst)/blockTokens, len(ids)):] {
			if id != 0 || len(j.Blocks) == 1 { // a hybrid engine has id 0 where it keeps no block
				l.blocks[id] = struct{}{}
			}
		}
	}
}

func less(m map[string]int, id string, n int) {
	if m[id] -= n; m[id] <= 0 {
		delete(m, id)
	}
}

func (l *ledger) busy(id string) bool { return l.stores[id]+l.loads[id] > 0 }

// take returns what Worker.Finished reports, given the requests that the engine has ended since the last call.
func (l *ledger) take(ended []string) Finished {
	for _, id := range ended {
		if _, ok := l.announced[id]; !ok {
			l.ending[id] = struct{}{}
		}
	}
	var out Finished
	for id := range l.ending {
		if l.busy(id) {
			continue
		}
		delete(l.ending, id)
		l.recordAnnounced(id)
		if _, ok := l.received[id]; !ok {
			out.Sent = append(out.Sent, id)
		}
	}
	for id := range l.received {
		if l.loads[id] == 0 { // else another load of the request runs
			out.Received = append(out.Received, id)
			delete(l.received, id)
		}
	}
	slices.Sort(out.Received)
	slices.Sort(out.Sent)
	return out
}

func (l *ledger) recordAnnounced(id string) {
	if len(l.order) >= maxAnnounced {
		delete(l.announced, l.order[0])
		l.order = append(l.order[:0], l.order[1:]...)
	}
	l.announced[id] = struct{}{}
	l.order = append(l.order, id)
}

func (l *ledger) takeErrors() LoadErrors {
	out := LoadErrors{Requests: slices.Sorted(maps.Keys(l.requests)), Blocks: slices.Sorted(maps.Keys(l.blocks))}
	clear(l.requests)
	clear(l.blocks)
	return out
}
