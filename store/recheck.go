package store

import (
	"context"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/pool"
	"github.com/kvasir-kv/kvasir/tier"
)

// What an earlier server noted as being below may have gone since: removed by hand, evicted there, lost with a
// disk. After a start the tier is asked for all of that, in the background, and what it lacks is written again.

const (
	recheckBatch = 256                   // objects in one call of the tier
	recheckPause = 10 * time.Millisecond // between two calls: a million objects take less than a minute
	recheckAgain = 5 * time.Second       // after a call that failed
)

// noted is an object that is noted as being below.
type noted struct {
	slot       pool.Slot
	generation uint32
	bytes      int64
}

// recheck asks the tier, once it knows all that it has, for what is noted as being there, until ctx ends.
func (s *Store) recheck(ctx context.Context) {
	if s.opts.BelowOpened != nil {
		select {
		case <-s.opts.BelowOpened:
		case <-ctx.Done():
			return
		}
	}
	pause := time.NewTimer(0)
	defer pause.Stop()
	for from, end := 0, s.slots(); from < end; {
		select {
		case <-pause.C:
		case <-ctx.Done():
			return
		}
		keys, of, next := s.notedBelow(from, end)
		wait := recheckPause
		if len(keys) > 0 && !s.recheckSome(ctx, keys, of) {
			next, wait = from, recheckAgain
		}
		from = next
		pause.Reset(wait)
	}
}

// recheckSome asks for some objects. It reports false where the tier did not answer. One that rests after failures
// may say that it has nothing: then writes find later that it has.
func (s *Store) recheckSome(ctx context.Context, keys []kv.Key, of []noted) bool {
	if !s.useBelow() {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, s.opts.LoadTimeout)
	defer cancel()
	metas, err := s.below.Ask(ctx, keys, s.goUnlessClosed)
	if err == nil {
		s.writeAgain(of, metas)
	}
	return err == nil
}

func (s *Store) slots() int {
	s.lock()
	defer s.unlock()
	return s.mu.pool.Slots()
}

// notedBelow returns what is noted as being below from a slot on, and the slot that is next.
func (s *Store) notedBelow(from, end int) (keys []kv.Key, of []noted, next int) {
	s.lock()
	defer s.unlock()
	if s.mu.closed {
		return nil, nil, end
	}
	p := s.mu.pool
	for next = from; next < min(end, from+batch) && len(keys) < recheckBatch; next++ {
		if slot := pool.Slot(next); p.StateOf(slot) == pool.Resident && p.Below(slot) == s.place {
			keys = append(keys, p.KeyOf(slot))
			of = append(of, noted{slot, p.Generation(slot), p.Length(slot)})
		}
	}
	return keys, of, next
}

// writeAgain has those objects written that the tier lacks.
func (s *Store) writeAgain(of []noted, metas []tier.Meta) {
	s.lock()
	defer s.unlock()
	for i, o := range of {
		if metas[i].Fits(o.bytes) || !s.sameLocked(o.slot, o.generation) || s.mu.pool.Below(o.slot) != s.place {
			continue
		}
		s.mu.pool.SetBelow(o.slot, 0)
		s.mu.n.GoneBelow++
		s.offerNewLocked(o.slot)
	}
}
