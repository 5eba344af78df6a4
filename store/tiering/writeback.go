// SPDX-License-Identifier: Apache-2.0

package tiering

import (
	"container/list"
	"context"
	"sync"
	"time"
)

// WriteItem is an object at one moment: the one that a slot has in that generation.
type WriteItem struct {
	Slot, Generation uint32
	Bytes            int64

	tries int // number of writes that failed
}

// WriteBackStats are the figures of a WriteBack.
type WriteBackStats struct {
	Waiting      int    // objects that wait
	WaitingBytes int64  // bytes of these objects
	Skipped      uint64 // objects that were not taken because too many bytes waited
}

// WriteBack is a queue of slots whose objects wait to be written to the tier below the pool, oldest first. It copies no bytes: an object
// that is evicted while it waits is not written. Its methods are safe for concurrent use; its mutex is a leaf.
type WriteBack struct {
	limit int64
	came  chan struct{} // has a value when something may wait; capacity 1

	mu struct {
		sync.Mutex
		queue   list.List                // of WriteItems
		waiting map[uint32]*list.Element // by slot: its newest WriteItem that waits
		bytes   int64
		skipped uint64
	}
}

// NewWriteBack returns an empty WriteBack in which `limit` bytes may wait, or one object of any size.
func NewWriteBack(limit int64) *WriteBack {
	b := &WriteBack{limit: limit, came: make(chan struct{}, 1)}
	b.mu.waiting = make(map[uint32]*list.Element)
	return b
}

// Add queues an object, unless it is waiting already. If too many bytes wait, it counts the object as skipped and reports false.
func (b *WriteBack) Add(it WriteItem) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if e, ok := b.mu.waiting[it.Slot]; ok && e.Value.(WriteItem).Generation == it.Generation {
		return true
	}
	if b.mu.bytes > 0 && b.mu.bytes+it.Bytes > b.limit {
		b.mu.skipped++
		return false
	}
	b.mu.waiting[it.Slot] = b.mu.queue.PushBack(it)
	b.mu.bytes += it.Bytes
	b.wake()
	return true
}

// Drop removes the object of a slot, which is about to be dropped, from the queue. A nil WriteBack has an empty queue.
func (b *WriteBack) Drop(slot uint32) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if e, ok := b.mu.waiting[slot]; ok {
		b.removeLocked(e)
	}
}

func (b *WriteBack) removeLocked(e *list.Element) WriteItem {
	it := b.mu.queue.Remove(e).(WriteItem)
	b.mu.bytes -= it.Bytes
	if b.mu.waiting[it.Slot] == e {
		delete(b.mu.waiting, it.Slot)
	}
	return it
}

func (b *WriteBack) wake() {
	select {
	case b.came <- struct{}{}:
	default:
	}
}

// Next waits for an object, and removes and returns it. It reports false once ctx has ended.
func (b *WriteBack) Next(ctx context.Context) (WriteItem, bool) {
	for {
		if it, ok := b.take(); ok {
			return it, true
		}
		select {
		case <-b.came:
		case <-ctx.Done():
			return WriteItem{}, false
		}
	}
}

func (b *WriteBack) take() (WriteItem, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	first := b.mu.queue.Front()
	if first == nil {
		return WriteItem{}, false
	}
	it := b.removeLocked(first)
	if b.mu.queue.Len() > 0 {
		b.wake() // another goroutine may wait for the next one
	}
	return it, true
}

// WriteOutcome says how the write of an object ended.
type WriteOutcome uint8

// WriteOutcomes.
const (
	Settled WriteOutcome = iota // the object is in the tier, or must not be written
	Failed                      // it is tried again, maxWriteTries times in all
	Resting                     // it is tried again until it has another outcome
)

const (
	// writePatience is how long a write waits for reads that go first.
	writePatience = 200 * time.Millisecond

	// writeRetryDelay is how long a writer waits after a write that failed.
	writeRetryDelay = time.Second

	// maxWriteTries is more than the failures in a row after which a tier rests (tier.Limits). So an object that waits alone is given up
	// only if the tier works for other calls.
	maxWriteTries = 10
)

// Run takes objects out of the queue and calls write to begin the write of each, n at once, until ctx ends. It then returns, although a
// write may still run: its owner must wait for that. write reports false when no more writes may begin. busy returns a channel that is
// closed when something that goes first has ended, or nil if there is nothing.
func (b *WriteBack) Run(ctx context.Context, n int, busy func() chan struct{}, write func(WriteItem) (ended chan WriteOutcome, ok bool)) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for range n {
		wg.Go(func() {
			for {
				it, ok := b.Next(ctx)
				if !ok {
					return
				}
				waitWhileBusy(ctx, busy)
				ended, ok := write(it)
				if !ok {
					return
				}
				select {
				case o := <-ended:
					b.settle(ctx, it, o)
				case <-ctx.Done():
					return
				}
			}
		})
	}
}

// waitWhileBusy waits until busy returns nil, for writePatience at most.
func waitWhileBusy(ctx context.Context, busy func() chan struct{}) {
	timer := time.NewTimer(writePatience)
	defer timer.Stop()
	for next := busy(); next != nil; next = busy() {
		select {
		case <-next:
		case <-timer.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// settle queues an object again if its write failed or the tier rests, and then waits for writeRetryDelay. After maxWriteTries failures it
// does not queue the object again.
func (b *WriteBack) settle(ctx context.Context, it WriteItem, o WriteOutcome) {
	switch o {
	case Settled:
		return
	case Failed:
		if it.tries++; it.tries < maxWriteTries {
			b.Add(it)
		}
	case Resting:
		b.Add(it)
	}
	timer := time.NewTimer(writeRetryDelay)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// Stats returns the figures.
func (b *WriteBack) Stats() WriteBackStats {
	b.mu.Lock()
	defer b.mu.Unlock()
	return WriteBackStats{Waiting: b.mu.queue.Len(), WaitingBytes: b.mu.bytes, Skipped: b.mu.skipped}
}
