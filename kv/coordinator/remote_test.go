// SPDX-License-Identifier: Apache-2.0

package coordinator_test

import (
	"errors"
	"testing"

	"github.com/kvasir-kv/kvasir/kv/coordinator"
)

// fakeStore answers from a function, refuses too large or repeated questions,
// and fails after a number of them.
type fakeStore struct {
	has   func(group, unit int) bool
	max   int // keys per question; 0 means any
	fail  int // fails from this question on; 0 means never
	calls int
	seen  map[[2]int]bool
	twice int
}

var errBroken = errors.New("broken")

func (f *fakeStore) Exists(probes []coordinator.Probe, present []bool) error {
	f.calls++
	if f.fail > 0 && f.calls >= f.fail {
		return errBroken
	}
	if f.max > 0 && len(probes) > f.max {
		return errors.New("too many keys")
	}
	for i, p := range probes {
		present[i] = f.has(p.Group, p.Unit)
		if f.seen != nil {
			if f.seen[[2]int{p.Group, p.Unit}] {
				f.twice++
			}
			f.seen[[2]int{p.Group, p.Unit}] = true
		}
	}
	return nil
}

const (
	longPrompt = 128 << 10 // tokens
	longUnits  = longPrompt / 16
)

func mustNew(t testing.TB, layout string, o coordinator.Options) *coordinator.Coordinator {
	t.Helper()
	l := coordinator.Layout{Scheduler: 16, HashUnit: 16} // a layout without groups has no text
	if layout != "" {
		var err error
		if l, err = coordinator.ParseLayout(layout); err != nil {
			t.Fatal(err)
		}
	}
	c, err := coordinator.New(l, o)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// A lookup of a long prompt asks few questions and few keys.
func TestRemoteQuestions(t *testing.T) {
	const layout = "full,bs=16 swa,bs=16,win=1024"
	f := func(what, layout string, shaped bool, has func(g, u int) bool, wantTokens, maxBatches, maxKeys int) {
		t.Helper()
		c := mustNew(t, layout, coordinator.Options{})
		r := coordinator.NewRemote(c, coordinator.RemoteOptions{PrefixShaped: shaped})
		store := &fakeStore{has: has, max: 256, seen: map[[2]int]bool{}}
		r.Reset(store)
		var hit coordinator.Result
		if err := c.Hit(&hit, r, coordinator.Query{Units: longUnits, MaxTokens: longPrompt}); err != nil {
			t.Fatal(err)
		}
		batches, keys := r.Asked()
		if err := r.Err(); err != nil || hit.Tokens != wantTokens || batches > maxBatches || keys > maxKeys || store.twice > 0 {
			t.Errorf("%s: hit %d, %d batches, %d keys (%d twice), error %v; want hit %d, at most %d and %d",
				what, hit.Tokens, batches, keys, store.twice, err, wantTokens, maxBatches, maxKeys)
		}
		t.Logf("%-34s hit %6d: %3d batches, %4d keys of %d", what, hit.Tokens, batches, keys, 2*longUnits)
	}
	all := func(int, int) bool { return true }
	none := func(int, int) bool { return false }
	half := func(_, u int) bool { return u < longUnits/2 }
	odd := func(g, u int) bool { return u < 5001 && (g == 0 || u >= 5001-64) }
	fullOnly := func(g, _ int) bool { return g == 0 }
	oldTail := func(g, u int) bool { return g == 0 || u >= 900 && u < 1000 }

	f("all stored", layout, true, all, longPrompt, 2, 80)
	f("all stored, exact", layout, false, all, longPrompt, 36, longUnits+64)
	f("nothing stored", layout, true, none, 0, 1, 16)
	f("nothing stored, exact", layout, false, none, 0, 1, 16)
	f("half stored", layout, true, half, longPrompt/2, 4, 220)
	f("prefix with its window's tail", layout, true, odd, 5001*16, 4, 220)
	f("windows evicted", layout, true, fullOnly, 0, 10, 300)
	f("an older window's tail", layout, true, oldTail, 1000*16, 12, 400)
	f("Mamba, last state", "full,bs=16 mamba,bs=16", true, all, longPrompt, 2, 30)
	f("Mamba, none", "full,bs=16 mamba,bs=16", true, fullOnly, 0, 37, longUnits+30)
	f("merged groups", "full,bs=16 full,bs=16 swa,bs=16,win=1024 swa,bs=16,win=1024", true, half, longPrompt/2, 8, 440)
}

// A store that fails during a lookup shortens the hit and returns an error. It never makes the hit longer.
func TestRemoteBroken(t *testing.T) {
	c := mustNew(t, "full,bs=16 swa,bs=16,win=1024", coordinator.Options{})
	for _, shaped := range []bool{false, true} {
		for fail := 1; fail < 8; fail++ {
			r := coordinator.NewRemote(c, coordinator.RemoteOptions{Batch: 64, PrefixShaped: shaped})
			r.Reset(&fakeStore{has: func(_, u int) bool { return u < 500 }, fail: fail})
			var hit coordinator.Result
			if err := c.Hit(&hit, r, coordinator.Query{Units: longUnits, MaxTokens: longPrompt}); err != nil {
				t.Fatal(err)
			}
			if broken := r.Err() != nil; hit.Tokens > 500*16 || !broken && hit.Tokens != 500*16 {
				t.Errorf("fails at question %d: hit %d, error %v", fail, hit.Tokens, r.Err())
			} else if broken && !errors.Is(r.Err(), errBroken) {
				t.Errorf("error %v", r.Err())
			}
		}
	}
}

// Lengths far beyond any prompt cost neither memory nor time.
func TestRemoteHuge(t *testing.T) {
	c := mustNew(t, "full,bs=16 swa,bs=16,win=1024 mamba,bs=16", coordinator.Options{})
	r := coordinator.NewRemote(c, coordinator.RemoteOptions{PrefixShaped: true})
	r.Reset(&fakeStore{has: func(g, u int) bool { return g == 0 || u < 100 }})
	var hit coordinator.Result
	if err := c.Hit(&hit, r, coordinator.Query{Units: 1 << 40, MaxTokens: 1 << 44}); err != nil {
		t.Fatal(err)
	}
	if hit.Tokens != 1600 {
		t.Errorf("hit %d, want 1600", hit.Tokens)
	}
}
