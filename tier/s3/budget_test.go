// SPDX-License-Identifier: Apache-2.0

package s3

import (
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"
)

// Callers never spend more than the budget in any hour, however they ask for it. An amount that was spent an hour and a
// minute ago may be spent again.
func TestBudgetOfAnHour(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		seed := rand.Uint64()
		rnd := rand.New(rand.NewPCG(seed, 1))
		const most = 100
		b := newBudget(most, time.Hour)
		type spent struct {
			at time.Time
			n  int
		}
		var all []spent
		for range 3000 {
			now, n := time.Now(), 1+rnd.IntN(5)
			hour, longer := 0, 0
			for _, s := range all {
				if now.Sub(s.at) < time.Hour {
					hour += s.n
				}
				if now.Sub(s.at) <= time.Hour+time.Minute {
					longer += s.n
				}
			}
			switch took := b.take(n); {
			case took && hour+n > most:
				t.Fatalf("seed %d: %d within an hour", seed, hour+n)
			case !took && longer+n <= most:
				t.Fatalf("seed %d: %d are refused after %d within an hour and a minute", seed, n, longer)
			case took:
				all = append(all, spent{now, n})
			}
			time.Sleep(time.Duration(rnd.ExpFloat64() * float64(30*time.Second)))
		}
		if time.Sleep(2 * time.Hour); !b.take(1000) || b.take(1) {
			t.Error("more than there can ever be is not taken when nothing was spent, or something is left beside it")
		}
	})
}
