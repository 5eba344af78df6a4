// SPDX-License-Identifier: Apache-2.0

package tiertest

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/seal"
)

// RaceSealed compares encrypted objects of 1 and 4 MiB with plain ones: stores and loads one after the other, as a server does them (checksum
// included), in nine turns that alternate. It reports the median of each, and the ratio of the medians. open returns two places alike.
func RaceSealed(b *testing.B, open func(b *testing.B) (one, other tier.Tier)) {
	const turns, objects = 9, 16
	for _, n := range []int{1 << 20, 4 << 20} {
		b.Run(fmt.Sprintf("%dMiB", n>>20), func(b *testing.B) {
			one, other := open(b)
			tiers := []tier.Tier{seal.New(one, nil, seal.Options{}), seal.New(other, Keys(b, 1), seal.Options{})}
			src, dst := shm.MakeAligned(n, tier.Page), shm.MakeAligned(n, tier.Page)
			_, _ = rand.Read(src)
			meta := tier.Meta{Len: int64(n), Sum: xxh3.Hash(src)}
			var stores, loads [2][]time.Duration
			for range b.N {
				for turn := range turns + 1 { // the first one warms
					for which := range tiers {
						if turn%2 == 1 {
							which = 1 - which
						}
						x := tiers[which]
						keys := make([]kv.Key, objects)
						began := time.Now()
						for i := range keys {
							keys[i] = Key(turn*objects + i)
							if err := x.Write(b.Context(), keys[i], meta, src); err != nil {
								b.Fatal(err)
							}
						}
						stored := time.Since(began)
						began = time.Now()
						for _, k := range keys {
							got, sum, err := tier.ReadSummed(b.Context(), x, k, dst)
							if err != nil || got != meta || sum != meta.Sum {
								b.Fatalf("%+v, %x, %v", got, sum, err)
							}
						}
						loaded := time.Since(began)
						if !bytes.Equal(dst, src) {
							b.Fatal("other bytes")
						}
						if err := x.Delete(b.Context(), keys); err != nil {
							b.Fatal(err)
						}
						if turn > 0 {
							stores[which] = append(stores[which], stored/objects)
							loads[which] = append(loads[which], loaded/objects)
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
