// SPDX-License-Identifier: Apache-2.0

package tiertest

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/seal"
)

// RaceSealed compares encrypted objects of 1 and 4 MiB with plain ones. It stores and loads them as a server does (checksum included), one
// after the other and four at a time, in nine turns that alternate. It reports the median time of an object, and the ratio of the medians.
// open must return two equal tiers.
func RaceSealed(b *testing.B, open func(b *testing.B) (one, other tier.Tier)) {
	const turns, objects = 9, 16
	for _, n := range []int{1 << 20, 4 << 20} {
		for _, atOnce := range []int{1, 4} {
			b.Run(fmt.Sprintf("%dMiB/%d", n>>20, atOnce), func(b *testing.B) {
				one, other := open(b)
				tiers := []tier.Tier{seal.New(one, nil, seal.Options{}), seal.New(other, Keys(b, 1), seal.Options{})}
				src := shm.MakeAligned(n, tier.Page)
				dst := make([][]byte, atOnce)
				for i := range dst {
					dst[i] = shm.MakeAligned(n, tier.Page)
				}
				_, _ = rand.Read(src)
				meta := tier.Meta{Len: int64(n), Sum: xxh3.Hash(src)}
				each := func(do func(key kv.Key, dst []byte) error, keys []kv.Key) time.Duration {
					began := time.Now()
					var wg sync.WaitGroup
					for g := range atOnce {
						wg.Go(func() {
							for i := g; i < len(keys); i += atOnce {
								if err := do(keys[i], dst[g]); err != nil {
									b.Error(err)
								}
							}
						})
					}
					wg.Wait()
					return time.Since(began) / time.Duration(len(keys))
				}
				var stores, loads [2][]time.Duration
				for range b.N {
					for turn := range turns + 1 { // the first one warms
						for which := range tiers {
							if turn%2 == 1 {
								which = 1 - which
							}
							x := tiers[which]
							keys := make([]kv.Key, objects)
							for i := range keys {
								keys[i] = Key(turn*objects + i)
							}
							stored := each(func(key kv.Key, _ []byte) error { return x.Write(b.Context(), key, meta, src) }, keys)
							loaded := each(func(key kv.Key, dst []byte) error {
								got, sum, err := tier.ReadSummed(b.Context(), x, key, dst)
								if err == nil && (got != meta || sum != meta.Sum) {
									err = fmt.Errorf("%+v, %x", got, sum)
								}
								return err
							}, keys)
							for _, d := range dst {
								if !bytes.Equal(d, src) {
									b.Fatal("other bytes")
								}
							}
							if err := x.Delete(b.Context(), keys); err != nil {
								b.Fatal(err)
							}
							if turn > 0 {
								stores[which] = append(stores[which], stored)
								loads[which] = append(loads[which], loaded)
							}
						}
					}
				}
				report := func(what string, times [2][]time.Duration) {
					var medians [2]float64
					for i := range times {
						slices.Sort(times[i])
						medians[i] = float64(times[i][len(times[i])/2].Microseconds())
					}
					b.ReportMetric(medians[0], "us/"+what+"-plain")
					b.ReportMetric(medians[1], "us/"+what+"-sealed")
					b.ReportMetric(medians[1]/medians[0], what+"-ratio")
				}
				report("store", stores)
				report("load", loads)
				b.ReportMetric(0, "ns/op")
				if err := errors.Join(tiers[0].Close(), tiers[1].Close()); err != nil {
					b.Fatal(err)
				}
			})
		}
	}
}
