// SPDX-License-Identifier: Apache-2.0

package redis_test

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/redis"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// BenchmarkReal reads and writes 32 chunks of a size, 16 at once, in a real Redis (KVASIR_REDIS). cpu-s/GB is the
// processor time of this process.
func BenchmarkReal(b *testing.B) {
	addr := os.Getenv("KVASIR_REDIS")
	if addr == "" {
		b.Skip("KVASIR_REDIS names no server")
	}
	const chunks, width = 32, 16
	for name, layout := range map[string]redis.Layout{"native": redis.Native, "resp": redis.RESP} {
		for _, size := range []int{1 << 20, 4 << 20} {
			o := redis.Options{Addrs: []string{addr}, Layout: layout, MayDelete: true, Names: tier.NewNames()}
			unique := fmt.Sprintf("bench-%d", time.Now().UnixNano())
			o.Names.Add(tiertest.Key(0).Namespace, unique, nil)
			if layout == redis.Native {
				o.Prefix = unique + ":"
			}
			x, err := redis.Open(o)
			if err != nil {
				b.Fatal(err)
			}
			data, meta := tiertest.Object(1, size)
			slots := make([][]byte, chunks)
			for i := range slots {
				slots[i] = []byte(strings.Repeat("x", size))
			}
			bench := func(what string, f func(i int) error, before func()) {
				b.Run(fmt.Sprintf("%s/%dMiB/%s", name, size>>20, what), func(b *testing.B) {
					b.SetBytes(int64(chunks * size))
					var used time.Duration
					for b.Loop() {
						b.StopTimer()
						before()
						b.StartTimer()
						began := cpu()
						var wg sync.WaitGroup
						for w := range width {
							wg.Go(func() {
								for i := w; i < chunks; i += width {
									if err := f(i); err != nil {
										b.Error(err)
									}
								}
							})
						}
						wg.Wait()
						used += cpu() - began
					}
					b.ReportMetric(used.Seconds()/(float64(b.N)*float64(chunks*size)/1e9), "cpu-s/GB")
				})
			}
			bench("write", func(i int) error { return x.Write(b.Context(), tiertest.Key(i), meta, data) }, func() {
				for i := range chunks {
					if err := x.Delete(b.Context(), []kv.Key{tiertest.Key(i)}); err != nil {
						b.Fatal(err)
					}
				}
			})
			bench("read", func(i int) error {
				_, _, err := tier.ReadSummed(b.Context(), x, tiertest.Key(i), slots[i])
				return err
			}, func() {})
			for i := range chunks {
				_ = x.Delete(b.Context(), []kv.Key{tiertest.Key(i)})
			}
			_ = x.Close()
		}
	}
}

// cpu is the processor time of this process.
func cpu() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkSealed compares encrypted objects with plain ones, in a real Redis (KVASIR_REDIS).
func BenchmarkSealed(b *testing.B) {
	addr := os.Getenv("KVASIR_REDIS")
	if addr == "" {
		b.Skip("KVASIR_REDIS names no server")
	}
	tiertest.RaceSealed(b, func(b *testing.B) (one, other tier.Tier) {
		place := func(name string) tier.Tier {
			x, err := redis.Open(redis.Options{Addrs: []string{addr}, Prefix: fmt.Sprintf("bench-%s-%d:", name, time.Now().UnixNano())})
			if err != nil {
				b.Fatal(err)
			}
			return x
		}
		return place("plain"), place("sealed")
	})
}
