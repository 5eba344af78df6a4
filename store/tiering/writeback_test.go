// SPDX-License-Identifier: Apache-2.0

package tiering_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/store/tiering"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// Objects that wait come out once, oldest first, and no more of them wait than may.
func TestOnceAndInOrder(t *testing.T) {
	b := tiering.NewWriteBack(30)
	for slot, want := range []bool{true, true, true, false} {
		if got := b.Add(tiering.WriteItem{Slot: uint32(slot), Bytes: 10}); got != want {
			t.Errorf("slot %d: %v", slot, got)
		}
	}
	if !b.Add(tiering.WriteItem{Slot: 1, Bytes: 10}) {
		t.Error("what waits already is refused")
	}
	if got := b.Stats(); got != (tiering.WriteBackStats{Waiting: 3, WaitingBytes: 30, Skipped: 1}) {
		t.Errorf("%+v", got)
	}
	for slot := range uint32(3) {
		if it, ok := b.Next(t.Context()); !ok || it.Slot != slot {
			t.Errorf("%+v, %v, want slot %d", it, ok, slot)
		}
	}
	if !b.Add(tiering.WriteItem{Slot: 1, Generation: 2, Bytes: 100}) {
		t.Error("one object alone is too large")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if it, ok := b.Next(ctx); !ok || it.Generation != 2 {
		t.Errorf("%+v, %v", it, ok)
	}
	if _, ok := b.Next(ctx); ok {
		t.Error("an empty box gives something")
	}
}

// The same slot with another object waits beside the earlier one.
func TestAnotherGenerationIsAnotherObject(t *testing.T) {
	b := tiering.NewWriteBack(100)
	for g := range uint32(3) {
		b.Add(tiering.WriteItem{Slot: 5, Generation: g, Bytes: 1})
	}
	for g := range uint32(3) {
		if it, ok := b.Next(t.Context()); !ok || it.Generation != g {
			t.Errorf("%+v, %v, want generation %d", it, ok, g)
		}
	}
}

// An object that is dropped gives its room to others at once, and does not come out. An object that has taken its slot since then waits on
// its own.
func TestDropped(t *testing.T) {
	b := tiering.NewWriteBack(30)
	for slot := range uint32(3) {
		b.Add(tiering.WriteItem{Slot: slot, Bytes: 10})
	}
	b.Drop(0)
	b.Drop(7) // nothing of it waits
	if !b.Add(tiering.WriteItem{Slot: 0, Generation: 1, Bytes: 10}) || b.Add(tiering.WriteItem{Slot: 8, Bytes: 10}) {
		t.Error("what went took room, or gave more than it had")
	}
	if got := b.Stats(); got != (tiering.WriteBackStats{Waiting: 3, WaitingBytes: 30, Skipped: 1}) {
		t.Errorf("%+v", got)
	}
	for _, want := range []tiering.WriteItem{{Slot: 1, Bytes: 10}, {Slot: 2, Bytes: 10}, {Slot: 0, Generation: 1, Bytes: 10}} {
		if it, ok := b.Next(t.Context()); !ok || it != want {
			t.Errorf("%+v, %v, want %+v", it, ok, want)
		}
	}
	for g := range uint32(1000) { // of a place that takes nothing for long
		b.Add(tiering.WriteItem{Slot: 3, Generation: g, Bytes: 10})
		b.Add(tiering.WriteItem{Slot: 4, Generation: g, Bytes: 10})
		b.Drop(3)
		if g > 0 {
			b.Drop(4)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for got := 0; ; got++ {
		if it, ok := b.Next(ctx); !ok {
			if got > 1 {
				t.Errorf("%d came out", got)
			}
			break
		} else if it.Slot != 4 || it.Generation > 0 {
			t.Errorf("%+v came out", it)
		}
	}
	if got := b.Stats(); got.Waiting != 0 || got.WaitingBytes != 0 {
		t.Errorf("%+v", got)
	}
}

// Run writes so many objects at once, after what goes first or after a short while. A write that
// does not end keeps only its own writer.
func TestRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		b := tiering.NewWriteBack(100)
		for slot := range uint32(5) {
			b.Add(tiering.WriteItem{Slot: slot, Bytes: 1})
		}
		begun := make(chan uint32, 50)
		first := make(chan struct{}) // never closed
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			b.Run(ctx, 2, func() chan struct{} { return first }, func(it tiering.WriteItem) (chan tiering.WriteOutcome, bool) {
				begun <- it.Slot
				done := make(chan tiering.WriteOutcome, 1)
				if it.Slot > 0 {
					done <- tiering.Settled
				}
				return done, true
			})
		}()
		synctest.Wait()
		if len(begun) != 0 {
			t.Errorf("%d were begun although others go first", len(begun))
		}
		time.Sleep(300 * time.Millisecond)
		if len(begun) != 2 {
			t.Errorf("%d were begun at once", len(begun))
		}
		time.Sleep(time.Minute)
		if len(begun) != 5 {
			t.Errorf("%d were begun", len(begun))
		}
		cancel()
		<-ended
	})
}

// A write that fails is tried ten times in all. A write to a tier that rests is tried until the
// tier works.
func TestTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		b := tiering.NewWriteBack(100)
		b.Add(tiering.WriteItem{Slot: 1, Bytes: 1})
		b.Add(tiering.WriteItem{Slot: 2, Bytes: 1})
		tries := map[uint32]int{}
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			b.Run(ctx, 1, func() chan struct{} { return nil }, func(it tiering.WriteItem) (chan tiering.WriteOutcome, bool) {
				done := make(chan tiering.WriteOutcome, 1)
				tries[it.Slot]++
				switch {
				case it.Slot == 1:
					done <- tiering.Failed
				case tries[2] < 20:
					done <- tiering.Resting
				default:
					done <- tiering.Settled
				}
				return done, true
			})
		}()
		time.Sleep(time.Hour)
		cancel()
		<-ended
		if tries[1] != 10 || tries[2] != 20 {
			t.Errorf("tries: %v, want 10 and 20", tries)
		}
		if got := b.Stats(); got.Waiting != 0 {
			t.Errorf("%+v", got)
		}
	})
}
