// SPDX-License-Identifier: Apache-2.0

package tiertest_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

func TestAbsenceValidate(t *testing.T) { testkit.CheckNumbers[tier.Absence](t) }

// remembered returns a node's view of a memory that others share, and a Flaky that counts the calls to that memory.
func remembered(t *testing.T, shared tier.Tier, script string, o tier.Absence) (*tier.Remembering, *tiertest.Flaky) {
	t.Helper()
	f, err := tiertest.NewFlaky(shared, script)
	if err != nil {
		t.Fatal(err)
	}
	return tier.Remembered(f, o), f
}

// For the time that is set the wrapper does not ask again for a missing object. Exactly when it is over it asks, and finds an
// object that another node wrote meanwhile. It always asks for objects that were there.
func TestAbsentIsNotAskedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := memory()
		a, asked := remembered(t, shared, "", tier.Absence{For: time.Second})
		put(t, shared, 2, 100)
		if got := has(t, a, 1, 2); len(got) != 1 || got[0] != 2 {
			t.Fatal(got)
		}
		put(t, shared, 1, 100) // by another node
		time.Sleep(time.Second - time.Nanosecond)
		if got := has(t, a, 1, 2); len(got) != 1 || asked.Calls("stat") != 3 || a.Spared() != 1 {
			t.Errorf("%v after %d calls, %d spared", got, asked.Calls("stat"), a.Spared())
		}
		time.Sleep(time.Nanosecond)
		if got := has(t, a, 1, 2); len(got) != 2 || asked.Calls("stat") != 5 {
			t.Errorf("%v after %d calls: what another node wrote is not found in time", got, asked.Calls("stat"))
		}
	})
}

// One call has some that are remembered and some that are not, each in its place.
func TestAbsentAmongOthers(t *testing.T) {
	shared := memory()
	a, asked := remembered(t, shared, "", tier.Absence{For: time.Hour})
	put(t, shared, 1, 10)
	put(t, shared, 4, 40)
	has(t, a, 0, 3)
	keys, metas := make([]kv.Key, 6), make([]tier.Meta, 6)
	for i := range keys {
		keys[i], metas[i] = tiertest.Key(i), tier.Meta{Len: 9}
	}
	if err := a.Stat(t.Context(), keys, metas); err != nil {
		t.Fatal(err)
	}
	for i, want := range []int64{0, 10, 0, 0, 40, 0} {
		if metas[i].Len != want {
			t.Errorf("object %d: %+v", i, metas[i])
		}
	}
	if asked.Calls("stat") != 3 || a.Spared() != 2 {
		t.Errorf("%d calls, %d spared", asked.Calls("stat"), a.Spared())
	}
}

// An object that this node writes is found at once, also if a Stat that began before the write
// ends after it.
func TestOwnWritesAreFound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, _ := remembered(t, lateStat{memory()}, "", tier.Absence{For: time.Hour})
		ended := make(chan []int)
		go func() { ended <- has(t, a, 1) }() // finds nothing, and says so after a second
		time.Sleep(time.Millisecond)
		put(t, a, 1, 100)
		if got := <-ended; len(got) != 0 {
			t.Fatal(got)
		}
		if got := has(t, a, 1); len(got) != 1 {
			t.Error("an object that was written during a Stat is not found")
		}
		has(t, a, 2)
		put(t, a, 2, 100)
		if got := has(t, a, 2); len(got) != 1 {
			t.Error("an object that was written after a Stat is not found")
		}
	})
}

// lateStat is a memory that answers a second after it has looked.
type lateStat struct{ *tier.Memory }

func (l lateStat) Stat(ctx context.Context, keys []kv.Key, metas []tier.Meta) error {
	err := l.Memory.Stat(ctx, keys, metas)
	time.Sleep(time.Second)
	return err
}

// After a failed call the wrapper does not remember objects as missing.
func TestFailedStatIsNotRemembered(t *testing.T) {
	shared := memory()
	put(t, shared, 1, 100)
	a, _ := remembered(t, shared, "stat 1 error", tier.Absence{For: time.Hour})
	metas := make([]tier.Meta, 1)
	if err := a.Stat(t.Context(), []kv.Key{tiertest.Key(1)}, metas); err == nil {
		t.Fatal("no error")
	}
	if got := has(t, a, 1); len(got) != 1 {
		t.Error("it is not found after a call that failed")
	}
}

// The number of remembered keys is bounded. Beyond it the tier gets more calls, and the answers stay right.
func TestAbsentForgets(t *testing.T) {
	a, asked := remembered(t, memory(), "", tier.Absence{For: time.Hour, Remember: 100})
	for seed := range 1000 {
		has(t, a, seed)
	}
	before := asked.Calls("stat")
	for seed := range 1000 {
		has(t, a, 999-seed)
	}
	if n := 1000 - (asked.Calls("stat") - before); n < 50 || n > 200 {
		t.Errorf("%d of 1,000 were remembered", n)
	}
}

// Random writes and deletes by two nodes: a node finds the objects that it wrote itself, and those of the other
// node once the time has passed. It never finds an object that is not there.
func TestRememberedAgainstModel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		seed := rand.Uint64()
		rnd := rand.New(rand.NewPCG(seed, 1))
		shared := memory()
		nodes := [2]*tier.Remembering{}
		for i := range nodes {
			nodes[i], _ = remembered(t, shared, "", tier.Absence{For: time.Second, Remember: 64})
		}
		since := map[int]time.Time{} // when it came, of what is there
		by := map[int]int{}
		for range 5000 {
			k, n := rnd.IntN(20), rnd.IntN(2)
			switch rnd.IntN(8) {
			case 0:
				if _, ok := since[k]; !ok {
					put(t, nodes[n], k, 10)
					since[k], by[k] = time.Now(), n
				}
			case 1:
				if err := nodes[n].Delete(t.Context(), []kv.Key{tiertest.Key(k)}); err != nil && !errors.Is(err, tier.ErrMissing) {
					t.Fatal(err)
				}
				delete(since, k)
			case 2:
				time.Sleep(time.Duration(rnd.IntN(700)) * time.Millisecond)
			default:
				found := len(has(t, nodes[n], k)) > 0
				came, there := since[k]
				if found && !there || !found && there && (by[k] == n || time.Since(came) >= time.Second) {
					t.Fatalf("seed %d: object %d of node %d, found %v, there %v for %v by node %d", seed, k, n, found, there, time.Since(came), by[k])
				}
			}
		}
	})
}

// While calls to a tier are paused after failures, the wrapper remembers no object as missing: objects are found when the pause is over.
func TestRestIsNotRemembered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := memory()
		put(t, shared, 1, 100)
		flaky, err := tiertest.NewFlaky(shared, "stat 1 error; stat 2 error")
		if err != nil {
			t.Fatal(err)
		}
		a := tier.Remembered(tier.Bounded(flaky, tier.Limits{Failures: 2, Pause: time.Minute}), tier.Absence{For: time.Hour})
		for range 2 {
			if err := a.Stat(t.Context(), []kv.Key{tiertest.Key(1)}, make([]tier.Meta, 1)); err == nil {
				t.Fatal("no error")
			}
		}
		if got := has(t, a, 1); len(got) != 0 || flaky.Calls("stat") != 2 {
			t.Fatalf("%v after %d calls of a tier that rests", got, flaky.Calls("stat"))
		}
		time.Sleep(time.Minute)
		if got := has(t, a, 1); len(got) != 1 {
			t.Error("what was asked for during the rest is missing after it")
		}
	})
}

// An object that one tenant's lookup did not find is still asked for when another tenant looks up the same chunk: which prompts a tenant
// asked for does not change how fast another tenant is answered.
func TestAbsenceIsOfOneTenant(t *testing.T) {
	a, asked := remembered(t, memory(), "", tier.Absence{For: time.Hour})
	ours := tiertest.Key(1)
	theirs := ours
	theirs.Namespace = kv.Namespace{2}
	metas := make([]tier.Meta, 1)
	for i, step := range []struct {
		key    kv.Key
		calls  int
		spared uint64
	}{{ours, 1, 0}, {theirs, 2, 0}, {ours, 2, 1}, {theirs, 2, 2}} {
		if err := a.Stat(t.Context(), []kv.Key{step.key}, metas); err != nil {
			t.Fatal(err)
		}
		if asked.Calls("stat") != step.calls || a.Spared() != step.spared {
			t.Errorf("step %d: %d calls, %d spared; want %d, %d", i, asked.Calls("stat"), a.Spared(), step.calls, step.spared)
		}
	}
}
