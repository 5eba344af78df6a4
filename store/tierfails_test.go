// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// An object that could not be read is not tried again at once, however often it is asked
// for, and is after a while, or once it was written again.
func TestFailedLoadsAreNotRepeatedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newTiered(t, 8, "read * missing", store.Options{})
		defer b.close()
		h := prompt(1, 1)
		keep(t, b.memory, one, h...)
		for i := range 20 {
			if got := b.await(t, nobody, one, h); got.Hit != 0 {
				t.Fatal(i, got)
			}
		}
		if got := b.flaky.Calls("read"); got != 1 {
			t.Errorf("%d reads of one object that is not there", got)
		}
		time.Sleep(time.Minute)
		b.await(t, nobody, one, h)
		if got := b.flaky.Calls("read"); got != 2 {
			t.Errorf("%d reads a minute later", got)
		}
		b.store.EndSession([]byte("r"), nobody)
	})
}

// What is stored while the tier rests after failures waits for it, and is written once it
// works again.
func TestStoresWaitWhileTheTierRests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		script := ""
		for i := range 40 { // it fails often enough to rest several times
			script += fmt.Sprintf("write %d error;", i+1)
		}
		flaky, err := tiertest.NewFlaky(tier.NewMemory(1<<30), script)
		if err != nil {
			t.Fatal(err)
		}
		const n = 64
		bench := newBench(t, t.TempDir(), n, store.Options{Below: tier.Bounded(flaky, tier.Limits{Failures: 4, Pause: 5 * time.Second})})
		defer bench.stop()
		defer bench.run()()
		h := prompt(1, n)
		bench.put("p", h, 0, n, n)
		time.Sleep(30 * time.Second)
		if got := bench.store.Stats(); got.Outbox.Waiting < n-20 {
			t.Errorf("while it rests %d of %d wait", got.Outbox.Waiting, n)
		}
		time.Sleep(time.Hour)
		if got := bench.store.Stats(); got.WrittenChunks < n-12 || got.Outbox.Waiting != 0 {
			t.Errorf("in the end: %+v", got)
		}
	})
}

// The reason of a miss names the tier that failed.
func TestMissesNameTheTier(t *testing.T) {
	for script, want := range map[string]string{"stat 1 error": "one", "read * error": "one", "read * wrong": "", "": ""} {
		synctest.Test(t, func(t *testing.T) {
			memory := tier.NewMemory(1 << 20)
			flaky, err := tiertest.NewFlaky(memory, script)
			if err != nil {
				t.Fatal(err)
			}
			b := &tiered{memory: memory, flaky: flaky, bench: newBench(t, t.TempDir(), 4, store.Options{Below: tier.Counted(flaky, "one")})}
			defer b.close()
			h := prompt(1, 2)
			keep(t, memory, one, h[0])
			if got := b.await(t, nobody, one, h); got.Tier != want || got.Why.IsBelow() != (script != "") {
				t.Errorf("%q: %+v, want tier %q", script, got, want)
			}
			b.store.EndSession([]byte("r"), nobody)
		})
	}
}

// One chunk, or some, are stored while every write fails. The tier is left alone after a few of them, and however long
// it fails, all that was stored is written when it works: no lookup has to ask for it.
func TestStoredWhileTheTierFails(t *testing.T) {
	for _, n := range []int{1, 3, 12} {
		synctest.Test(t, func(t *testing.T) {
			script := ""
			for call := range 40 {
				script += fmt.Sprintf("write %d error; ", call+1)
			}
			memory := tier.NewMemory(1 << 30)
			flaky, err := tiertest.NewFlaky(memory, strings.TrimSuffix(script, "; "))
			if err != nil {
				t.Fatal(err)
			}
			b := &tiered{memory: memory, flaky: flaky, bench: newBench(t, t.TempDir(), 2*n, store.Options{Below: tier.Bounded(flaky, tier.Limits{})})}
			defer b.close()
			defer b.run()()
			b.put("p", prompt(0, n), 0, n, n)
			time.Sleep(5 * time.Minute)
			if got := b.below(t, prompt(0, n)); got != n || flaky.Calls("write") != 40+n {
				t.Errorf("%d of %d chunks are below after %d writes: %+v", got, n, flaky.Calls("write"), b.store.Stats())
			}
			b.idle()
		})
	}
}
