// SPDX-License-Identifier: Apache-2.0

package tier

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
)

// restingTier is a tier whose calls fail while it is down. After three failures it pauses its own calls, as the tier of a
// Redis server does.
type restingTier struct {
	*Memory
	down     bool
	failures int
}

var errGone = errors.New("it is gone")

func (r *restingTier) call() error {
	switch {
	case !r.down:
		r.failures = 0
		return nil
	case r.failures >= 3:
		return fmt.Errorf("server: %w", ErrResting)
	}
	r.failures++
	return errGone
}

func (r *restingTier) Stat(ctx context.Context, keys []kv.Key, metas []Meta) error {
	if err := r.call(); err != nil {
		return err
	}
	return r.Memory.Stat(ctx, keys, metas)
}

func (r *restingTier) Write(ctx context.Context, k kv.Key, m Meta, src []byte) error {
	if err := r.call(); err != nil {
		return err
	}
	return r.Memory.Write(ctx, k, m, src)
}

// A tier that is gone causes one warning until it answers again, however many lookups get an answer without it meanwhile: from
// memory, or because its calls are paused.
func TestAnswersWithoutTheTierChangeNoState(t *testing.T) {
	f := func(wrap func(Tier) Tier) {
		t.Helper()
		synctest.Test(t, func(t *testing.T) {
			var log strings.Builder
			place := &restingTier{Memory: NewMemory(1 << 20)}
			c := Counted(wrap(place), "redis")
			c.Watch(slog.New(slog.NewTextHandler(&log, nil)))
			use := func() {
				for i := range byte(20) {
					k := kv.Key{Chunk: kv.Hash{i}}
					_ = c.Stat(t.Context(), []kv.Key{k}, make([]Meta, 1)) // both may fail
					_ = c.Write(t.Context(), k, Meta{Len: 1}, []byte{i})
					time.Sleep(time.Millisecond)
				}
			}
			use()
			place.down = true
			use()
			use()
			if n := strings.Count(log.String(), "\n"); n != 1 || c.Condition().State != Unreachable {
				t.Errorf("%d warnings, the state is %s:\n%s", n, c.Condition().State, &log)
			}
			place.down = false
			time.Sleep(time.Minute)
			use()
			if n := strings.Count(log.String(), "\n"); n != 2 || c.Condition().State != Works {
				t.Errorf("%d warnings, the state is %s:\n%s", n, c.Condition().State, &log)
			}
		})
	}
	bounded := func(place Tier) Tier { return Bounded(place, Limits{}) }
	f(bounded)
	f(func(place Tier) Tier { return Remembered(bounded(place), Absence{For: time.Second}) })
}

// A tier that had no name for a model works again once it takes objects and no model has lacked a name for a while.
func TestStateAfterTheLastNamelessModel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		c := &conditions{log: slog.New(slog.NewTextHandler(&log, nil)), name: "fs"}
		nameless := fmt.Errorf("%w: %w: model m", ErrNotKept, ErrName)
		want := func(state State, warnings int) {
			t.Helper()
			if n := strings.Count(log.String(), "\n"); n != warnings || c.get().State != state {
				t.Errorf("%d warnings, the state is %s, want %d and %s:\n%s", n, c.get().State, warnings, state, &log)
			}
		}
		c.recordCall(true, false, nil)
		c.recordCall(true, false, nameless)
		want(Nameless, 1)
		for range 20 { // both models are served
			time.Sleep(time.Second)
			c.recordCall(true, false, nil)
			c.recordCall(true, false, nameless)
		}
		want(Nameless, 1)
		time.Sleep(stateHold)
		c.recordCall(false, false, nil) // a read shows no name
		want(Nameless, 1)
		c.recordCall(true, false, nil)
		want(Works, 2)
	})
}
