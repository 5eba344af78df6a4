// SPDX-License-Identifier: Apache-2.0

package tiertest_test

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
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// answering is a tier whose answers a test sets.
type answering struct {
	tier.Tier
	err, write error
}

func (a *answering) Stat(ctx context.Context, keys []kv.Key, metas []tier.Meta) error {
	if a.err != nil {
		return a.err
	}
	return a.Tier.Stat(ctx, keys, metas)
}

func (a *answering) Write(ctx context.Context, k kv.Key, m tier.Meta, src []byte) error {
	if err := errors.Join(a.err, a.write); err != nil {
		return err
	}
	return a.Tier.Write(ctx, k, m, src)
}

// Each change of a tier's state is one warning, and the state has the error that showed it.
func TestEachStateOfATierIsReportedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		a := &answering{Tier: tier.NewMemory(1 << 20)}
		c := tier.Counted(a, "x")
		c.Watch(slog.New(slog.NewTextHandler(&log, nil)))
		ask := func() {
			_ = c.Stat(t.Context(), []kv.Key{tiertest.Key(1)}, make([]tier.Meta, 1))
			b, m := tiertest.Object(1, 10)
			_ = c.Write(t.Context(), tiertest.Key(1), m, b)
		}
		want := func(when string, state tier.State, text string) {
			t.Helper()
			log.Reset()
			for range 5 {
				ask()
				time.Sleep(4 * time.Second)
			}
			got := c.Condition()
			if got.State != state || !strings.Contains(got.Err, text) {
				t.Errorf("%s: %+v, want %s with %q", when, got, state, text)
			}
			if n := strings.Count(log.String(), "level=WARN"); n != 1 || !strings.Contains(log.String(), "state="+string(state)) {
				t.Errorf("%s: %d warnings:\n%s", when, n, log.String())
			}
			for s, n := range c.Stats().States {
				if (n == 1) != (s == string(state)) {
					t.Errorf("%s: the gauge of %s is %d", when, s, n)
				}
			}
		}
		ask()
		if got := c.Condition(); got.State != tier.Works || log.Len() > 0 {
			t.Errorf("at first: %+v, %s", got, log.String())
		}
		for _, why := range []struct {
			err   error
			state tier.State
		}{{tier.ErrFull, tier.Full}, {tier.ErrBudget, tier.OverBudget}, {tier.ErrReadOnly, tier.ReadOnly}} {
			a.write = fmt.Errorf("%w: %w: because", tier.ErrNotKept, why.err)
			want("refusing", why.state, "because")
			a.write = nil
			want("taking again", tier.Works, "")
		}
		a.err = errors.New("connection refused")
		want("away", tier.Unreachable, "connection refused")
		a.err = nil
		want("back", tier.Works, "")
		a.write = fmt.Errorf("%w: %w: too long", tier.ErrNotKept, tier.ErrName)
		want("a model without a name", tier.Nameless, "too long")
	})
}

// Results that say nothing about the tier change no state: single failures, callers that gave up, and
// objects that are not taken for another reason. If the very first call fails, the state changes at once.
func TestWhatChangesNoStateOfATier(t *testing.T) {
	a := &answering{Tier: tier.NewMemory(1 << 20)}
	c := tier.Counted(a, "x")
	stat := func() { _ = c.Stat(t.Context(), []kv.Key{tiertest.Key(1)}, make([]tier.Meta, 1)) }
	stat()
	for _, err := range []error{context.Canceled, tier.ErrNotKept, errors.New("once"), fmt.Errorf("%w: %w: still counting", tier.ErrResting, tier.ErrNotReady)} {
		a.err = err
		stat()
		stat()
		a.err = nil
		stat()
		if got := c.Condition(); got.State != tier.Works {
			t.Errorf("after %v: %+v", err, got)
		}
	}
	c = tier.Counted(a, "z")
	a.err = fmt.Errorf("%w: %w: still counting", tier.ErrResting, tier.ErrNotReady)
	stat()
	if got := c.Condition(); got.State != tier.Works {
		t.Errorf("while it begins its work: %+v", got)
	}
	a.err = nil
	c = tier.Counted(a, "y")
	c.Probe(t.Context(), func(context.Context) error { return errors.New("no such host") })
	if got := c.Condition(); got.State != tier.Unreachable || !strings.Contains(got.Err, "no such host") {
		t.Errorf("%+v", got)
	}
}
