package store

import (
	"context"
	"time"

	"github.com/kvasir-kv/kvasir/internal/share"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/pool"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/warming"
)

// A new server finds nothing in its pool. With Options.WarmBytes it reads what is the hottest in the tier
// below, in the background, into memory that nothing else has: nothing is evicted for it, and lookups go first.

const (
	warmPeer  = "warming"   // whose these reads are among all
	warmAgain = time.Second // after which a tier that does not answer is tried again
)

// warmer is the store as package warming sees it.
type warmer struct{ *Store }

func (s *Store) warm(ctx context.Context) {
	warming.Run(ctx, warmer{s}, warming.Options{Bytes: s.opts.WarmBytes, Time: s.opts.WarmTime, Longest: s.mu.pool.Bytes(), Log: s.log})
}

// Hottest implements warming.Reader.
func (w warmer) Hottest(ctx context.Context, n int, f func(kv.Key, tier.Meta) bool) error {
	return w.below.Hottest(ctx, n, f)
}

// Warmed implements warming.Reader.
func (w warmer) Warmed() (objects, bytes uint64) {
	n := w.Stats()
	return n.WarmedChunks, n.WarmedBytes
}

// Warm implements warming.Reader.
func (w warmer) Warm(ctx context.Context, k kv.Key, bytes int64) (room bool) {
	for ctx.Err() == nil {
		if !w.useBelow() {
			select {
			case <-time.After(warmAgain):
			case <-ctx.Done():
			}
			continue
		}
		w.memory.Have(bytes)
		fl, wait, room := w.beginWarm(&k, bytes)
		switch {
		case wait != nil:
			select {
			case <-wait:
			case <-ctx.Done():
			}
			continue
		case fl == nil:
			return room
		}
		ended := make(chan struct{})
		if w.goUnlessClosed(func() {
			defer close(ended)
			w.read(fl, k)
		}) {
			select {
			case <-ended:
			case <-ctx.Done(): // it stays, when it comes
			}
		}
		return true
	}
	return true
}

// beginWarm makes a slot and its flight. The flight is nil when the object is there or on its way, or when there
// is no room; wait is what to wait for while lookups read.
func (s *Store) beginWarm(k *kv.Key, bytes int64) (_ *flight, wait chan struct{}, room bool) {
	s.lock()
	defer s.unlock()
	size, l := s.mu.pool.Round(bytes), &s.mu.loading
	if l.All().Count > l.Of(warmPeer).Count || !s.mayLoadLocked(warmPeer, size) {
		return nil, l.Next(), true
	}
	if _, st := s.mu.pool.Find(k); st != pool.Free || s.mu.closed {
		return nil, nil, true
	}
	slot, err := s.mu.pool.Reserve(k, bytes, pool.Writer{})
	if err != nil {
		return nil, nil, false
	}
	s.mu.warmed.Add(uint32(slot))
	l.Add(warmPeer, share.Amount{Count: 1, Size: size})
	fl := s.newFlightLocked(slot)
	fl.begun, fl.below, fl.peer = true, true, warmPeer
	return fl, nil, true
}
