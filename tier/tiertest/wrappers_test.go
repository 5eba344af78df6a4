// SPDX-License-Identifier: Apache-2.0

package tiertest_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

func memory() *tier.Memory { return tier.NewMemory(64 << 20) }

func byRank(k kv.Key) int { return int(k.Rank) % 2 }

// Every wrapper, and wrappers of wrappers, do what a Tier must do.
func TestWrappers(t *testing.T) {
	for name, open := range map[string]func() tier.Tier{
		"counted":                            func() tier.Tier { return tier.Counted(memory(), "memory") },
		"bounded":                            func() tier.Tier { return tier.Bounded(memory(), tier.Limits{Calls: 3, Bytes: 1 << 20}) },
		"cascade":                            func() tier.Tier { return tier.Cascade(tier.CascadeOptions{}, memory(), memory()) },
		"cascade over a place that is full":  func() tier.Tier { return tier.Cascade(tier.CascadeOptions{}, full{memory()}, memory()) },
		"cascade above a place that is full": func() tier.Tier { return tier.Cascade(tier.CascadeOptions{}, memory(), full{memory()}) },
		"admitted":                           func() tier.Tier { return tier.Admitted(memory(), tier.Admission{}) },
		"remembered":                         func() tier.Tier { return tier.Remembered(memory(), tier.Absence{For: time.Hour}) },
		"noted":                              func() tier.Tier { return tier.Recorded(memory(), watched(), 1) },
		"noted by nobody":                    func() tier.Tier { return tier.Recorded(memory(), tier.NewChanges(), 1) },
		"route":                              func() tier.Tier { return tier.Route(byRank, memory(), memory()) },
		"all of them": func() tier.Tier {
			low := tier.Counted(tier.Bounded(memory(), tier.Limits{}), "low")
			return tier.Counted(tier.Bounded(tier.Cascade(tier.CascadeOptions{}, tier.Route(byRank, memory(), tier.Bounded(memory(), tier.Limits{Calls: 2})), low), tier.Limits{}), "all")
		},
	} {
		t.Run(name, func(t *testing.T) { tiertest.Run(t, func(*testing.T) tier.Tier { return open() }) })
	}
}

func watched() *tier.Changes {
	c := tier.NewChanges()
	c.Watch(1 << 10)
	return c
}

// full is a Tier that keeps nothing.
type full struct{ *tier.Memory }

func (full) Write(context.Context, kv.Key, tier.Meta, []byte) error { return tier.ErrNotKept }

func put(t *testing.T, x tier.Tier, seed, n int) ([]byte, tier.Meta) {
	t.Helper()
	b, m := tiertest.Object(seed, n)
	if err := x.Write(t.Context(), tiertest.Key(seed), m, b); err != nil {
		t.Fatal(err)
	}
	return b, m
}

func has(t *testing.T, x tier.Tier, seeds ...int) (out []int) {
	t.Helper()
	for _, s := range seeds {
		metas := make([]tier.Meta, 1)
		if err := x.Stat(t.Context(), []kv.Key{tiertest.Key(s)}, metas); err != nil {
			t.Fatal(err)
		}
		if metas[0].Len > 0 {
			out = append(out, s)
		}
	}
	return out
}

// A Cascade reads an object that only the lower place has from there, and copies it to the upper place. An object
// that was deleted meanwhile does not come back.
func TestCascadeFillsTheUpperPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		upper, lower := memory(), memory()
		slow, err := tiertest.NewFlaky(upper, "write * slow 1s")
		if err != nil {
			t.Fatal(err)
		}
		c := tier.Cascade(tier.CascadeOptions{FillBytes: 2000}, slow, lower)
		for seed := range 3 {
			put(t, lower, seed, 1000)
		}
		for seed := range 3 { // the third finds that too much waits
			if _, err := c.Read(t.Context(), tiertest.Key(seed), make([]byte, 1000)); err != nil {
				t.Fatal(err)
			}
		}
		if err := c.Delete(t.Context(), []kv.Key{tiertest.Key(1)}); err != nil { // waits for its fill
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if got := has(t, upper, 0, 1, 2); !slices.Equal(got, []int{0}) {
			t.Errorf("the upper place has %v", got)
		}
		if got := has(t, c, 0, 1, 2); !slices.Equal(got, []int{0, 2}) || c.Skipped() != 1 {
			t.Errorf("both have %v, %d were skipped", got, c.Skipped())
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

// If one place fails, only the objects that no other place has are lost.
func TestCascadeGoesOnWithOnePlace(t *testing.T) {
	for _, which := range []int{0, 1} {
		places := []tier.Tier{memory(), memory()}
		for _, p := range places {
			put(t, p, 1, 100)
		}
		bad, err := tiertest.NewFlaky(places[which], "stat * error; read * error; write * error")
		if err != nil {
			t.Fatal(err)
		}
		places[which] = bad
		c := tier.Cascade(tier.CascadeOptions{}, places...)
		put(t, c, 2, 100)
		if got := has(t, c, 1, 2, 3); !slices.Equal(got, []int{1, 2}) {
			t.Errorf("without place %d: %v", which, got)
		}
		for _, seed := range []int{1, 2} {
			if _, err := c.Read(t.Context(), tiertest.Key(seed), make([]byte, 100)); err != nil {
				t.Errorf("without place %d: %v", which, err)
			}
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// After failures in a row calls to the tier are paused: all objects are misses, none are kept, and
// the tier gets no call. After the pause one call tries it, and if that works all calls go on.
func TestBoundedRestsAfterFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		flaky, err := tiertest.NewFlaky(memory(), "read 1 error; read 2 error; read 3 error; read 4 error")
		if err != nil {
			t.Fatal(err)
		}
		b := tier.Bounded(flaky, tier.Limits{Failures: 3, Pause: time.Minute})
		data, meta := put(t, b, 1, 100)
		read := func() error {
			_, err := b.Read(t.Context(), tiertest.Key(1), make([]byte, 100))
			return err
		}
		for range 3 {
			if err := read(); !errors.Is(err, tiertest.ErrScript) {
				t.Fatal(err)
			}
		}
		resting := func() {
			t.Helper()
			calls := flaky.Calls("read") + flaky.Calls("stat") + flaky.Calls("write")
			if err := read(); !errors.Is(err, tier.ErrMissing) || !b.Resting() {
				t.Errorf("Read while it rests: %v", err)
			}
			if got := has(t, b, 1); got != nil {
				t.Errorf("while it rests there is %v", got)
			}
			if err := b.Write(t.Context(), tiertest.Key(2), meta, data); !errors.Is(err, tier.ErrResting) {
				t.Errorf("Write while it rests: %v", err)
			}
			if now := flaky.Calls("read") + flaky.Calls("stat") + flaky.Calls("write"); now != calls {
				t.Errorf("%d calls while it rests", now-calls)
			}
		}
		resting()
		time.Sleep(time.Minute)
		if err := read(); !errors.Is(err, tiertest.ErrScript) { // the trial fails
			t.Fatal(err)
		}
		resting()
		time.Sleep(time.Minute)
		if err := read(); err != nil {
			t.Fatal(err)
		}
		if b.Resting() || read() != nil {
			t.Error("it rests although the trial worked")
		}
	})
}

// Calls that hang count as failures when their time is over, and then other calls get their places. A
// call waits for a place no longer than its own context.
func TestBoundedWhenCallsHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		flaky, err := tiertest.NewFlaky(memory(), "read * hang")
		if err != nil {
			t.Fatal(err)
		}
		b := tier.Bounded(flaky, tier.Limits{Calls: 2, Failures: 2, Timeout: time.Second, Pause: time.Hour})
		for range 2 {
			go func() { _, _ = b.Read(t.Context(), tiertest.Key(1), make([]byte, 100)) }()
		}
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		if err := b.Stat(ctx, []kv.Key{tiertest.Key(1)}, make([]tier.Meta, 1)); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Stat while all calls hang: %v", err)
		}
		time.Sleep(time.Second)
		if !b.Resting() {
			t.Error("it does not rest while calls hang")
		}
		if got := has(t, b, 1); got != nil {
			t.Error(got)
		}
		flaky.Release()
	})
}

// Bytes and calls at once stay within the limits, for writes within half of the calls.
func TestBoundedLimits(t *testing.T) {
	f := func(deed string, size int, l tier.Limits, want int) {
		t.Helper()
		synctest.Test(t, func(t *testing.T) {
			flaky, err := tiertest.NewFlaky(memory(), deed+" * slow 1s")
			if err != nil {
				t.Fatal(err)
			}
			b := tier.Bounded(flaky, l)
			data, meta := tiertest.Object(1, size)
			began := time.Now()
			done := make(chan struct{}, 12)
			for range 12 {
				go func() {
					if deed == "read" {
						_, _ = b.Read(t.Context(), tiertest.Key(1), make([]byte, size))
					} else if err := b.Write(t.Context(), tiertest.Key(1), meta, data); err != nil {
						t.Error(err)
					}
					done <- struct{}{}
				}()
			}
			for range 12 {
				<-done
			}
			if took := time.Since(began); took != time.Duration(12/want)*time.Second {
				t.Errorf("%s of %d bytes within %+v: 12 took %v, want %d at once", deed, size, l, took, want)
			}
		})
	}
	f("read", 100, tier.Limits{Calls: 4}, 4)
	f("write", 100, tier.Limits{Calls: 4}, 2)
	f("read", 100, tier.Limits{Calls: 8, Bytes: 250}, 2)
	f("read", 100, tier.Limits{Calls: 8, Bytes: 50}, 1)
}

// Each call is counted once, by its outcome.
func TestCounted(t *testing.T) {
	flaky, err := tiertest.NewFlaky(memory(), "read 2 error; read 3 missing; write 2 error")
	if err != nil {
		t.Fatal(err)
	}
	c := tier.Counted(flaky, "disk")
	put(t, c, 1, 100)
	data, meta := tiertest.Object(2, 50)
	_ = c.Write(t.Context(), tiertest.Key(2), meta, data)
	has(t, c, 1, 2, 3)
	for range 3 {
		_, _ = c.Read(t.Context(), tiertest.Key(1), make([]byte, 100))
	}
	_, _ = c.Read(t.Context(), tiertest.Key(1), make([]byte, 99))
	ctx, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	_, _ = c.Read(ctx, tiertest.Key(1), make([]byte, 100))
	got := c.Stats()
	if got.Hits != 1 || got.Misses != 2 || got.Reads != 1 || got.ReadBytes != 100 || got.Failures != 2 || got.Lost != 1 || got.Corrupt != 1 ||
		got.Late != 1 || got.Writes != 1 || got.WrittenBytes != 100 || got.InFlight != 0 || got.Free != -1 {
		t.Errorf("%+v", got)
	}
	if h := got.Took["read"]; h.Total() != 1 {
		t.Errorf("%d reads were timed", h.Total())
	}
	d := tier.Counted(full{memory()}, "full")
	_ = d.Write(t.Context(), tiertest.Key(2), meta, data)
	if got := d.Stats(); got.Dropped != 1 || got.Failures != 0 || d.Name() != "full" {
		t.Errorf("%+v", got)
	}
}

// A key of no route is nowhere, and nothing else suffers.
func TestRouteOutside(t *testing.T) {
	r := tier.Route(func(k kv.Key) int { return int(k.Rank) - 1 }, memory(), memory())
	put(t, r, 1, 10)
	put(t, r, 2, 10)
	data, meta := tiertest.Object(3, 10)
	if err := r.Write(t.Context(), tiertest.Key(3), meta, data); !errors.Is(err, tier.ErrNotKept) {
		t.Error(err)
	}
	if got := has(t, r, 1, 2, 3, 0); !slices.Equal(got, []int{1, 2}) {
		t.Error(got)
	}
}
