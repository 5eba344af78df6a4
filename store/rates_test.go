package store_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/store"
)

// Who found all of its prompt computes none of it: what it stores later, of its answer, is no measure of
// how fast engines compute prompts.
func TestWholeHitsMeasureNoComputing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, found := range []int{1, 2} {
			b := newTiered(t, 64, "", store.Options{LoadIfFaster: true, Write: store.WriteNever})
			for seed := range 8 {
				h := prompt(10+seed, 4)[1:]
				b.put("p", h, 0, found, found)
				if got := b.await(t, nobody, one, h[:2]); got.Hit != found {
					t.Fatalf("%+v", got)
				}
				time.Sleep(time.Second)
				b.put("r", h, 2, 3, 1)
				b.store.EndSession([]byte("r"), nobody)
			}
			if rate := b.store.Stats().Rates.ComputeRate; (rate > 0) != (found < 2) {
				t.Errorf("%d of 2 chunks found: engines compute %v bytes/s", found, rate)
			}
			b.close()
		}
	})
}
