// SPDX-License-Identifier: Apache-2.0

package tiering_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/tiering"
	"github.com/kvasir-kv/kvasir/tier"
)

// notes are 1,000 objects, of which every third is not below any more. The tier fails to answer at first.
type notes struct {
	fails   int
	settled map[uint32]bool // which is there
}

func (n *notes) Slots() int { return 1000 }

func (n *notes) Recorded(from, end, most int) (keys []kv.Key, of []tiering.RecordedObject, next int) {
	for next = from; next < end && len(keys) < most; next++ {
		keys = append(keys, kv.Key{Chunk: kv.Hash{byte(next), byte(next >> 8)}})
		of = append(of, tiering.RecordedObject{Slot: uint32(next), Bytes: 7})
	}
	return keys, of, next
}

func (n *notes) Ask(_ context.Context, keys []kv.Key) ([]tier.Meta, error) {
	if n.fails--; n.fails >= 0 {
		return nil, errors.New("no answer")
	}
	out := make([]tier.Meta, len(keys))
	for i, k := range keys {
		if (int(k.Chunk[0])+int(k.Chunk[1])<<8)%3 > 0 {
			out[i].Len = 7
		}
	}
	return out, nil
}

func (n *notes) Settle(of []tiering.RecordedObject, metas []tier.Meta) {
	for i, o := range of {
		n.settled[o.Slot] = metas[i].Fits(o.Bytes)
	}
}

// Every object is asked for once the tier is open and answers, each in its place.
func TestAllIsAskedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, opened, done := &notes{fails: 2, settled: make(map[uint32]bool)}, make(chan struct{}), make(chan struct{})
		go func() {
			defer close(done)
			tiering.Recheck(t.Context(), n, opened)
		}()
		time.Sleep(time.Hour)
		if len(n.settled) > 0 {
			t.Fatal("it asks before the tier is open")
		}
		close(opened)
		<-done
		if len(n.settled) != 1000 {
			t.Fatalf("%d of 1000 are settled", len(n.settled))
		}
		for slot, there := range n.settled {
			if there != (slot%3 > 0) {
				t.Errorf("slot %d: %v", slot, there)
			}
		}
	})
}

// It ends with its context, while it waits for the tier and while that does not answer.
func TestRunEndsWithItsContext(t *testing.T) {
	f := func(open bool) {
		t.Helper()
		synctest.Test(t, func(t *testing.T) {
			var opened chan struct{}
			if !open {
				opened = make(chan struct{})
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			n := &notes{fails: 1 << 30, settled: make(map[uint32]bool)}
			tiering.Recheck(ctx, n, opened)
			if ctx.Err() == nil || len(n.settled) > 0 {
				t.Errorf("it ended early, with %d settled", len(n.settled))
			}
		})
	}
	f(false)
	f(true)
}
