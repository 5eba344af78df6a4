// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
)

// A prompt of 32k tokens in a cache shaped like Qwen2.5-7B's: 28 layers, 4 KV heads
// of 128, bf16, blocks of 16 tokens: 2,048 blocks of 32 KiB per layer, 1.75 GiB.
// Reported are the shares of the pull's time that are not the transfer engine's:
// side channel, decoding, planning, waiting for each other.
func BenchmarkPull7B(b *testing.B) {
	const layers, blocks, payload = 28, 2048, 32 << 10
	ids := make([]int, blocks)
	for i := range ids {
		ids[i] = i
	}
	shuffled := rand.New(rand.NewPCG(1, 2)).Perm(blocks)
	for _, lie := range []struct {
		name string
		p, d []int
	}{{"contiguous", ids, ids}, {"scattered", shuffled, ids}} {
		b.Run(lie.name, func(b *testing.B) {
			p, d := testCache(layers, blocks, payload), testCache(layers, blocks, payload)
			fill(p, 5)
			x := newPair(b, p, d, SenderOptions{}, ReceiverOptions{})
			b.SetBytes(layers * blocks * payload)
			n := 0
			one := func() {
				id := fmt.Sprint("x", n)
				n++
				x.sender.Offer("p"+id, id, [][]int{lie.p})
				if err := x.pull(b, "d"+id, id, lie.d); err != nil {
					b.Fatal(err)
				}
				x.sender.Finished()
				x.receiver.Results()
			}
			one() // touches the pages
			before, start := x.sender.Stats(), time.Now()
			for b.Loop() {
				one()
			}
			total := time.Since(start)
			after := x.sender.Stats()
			pushing := time.Duration(after.PushingNanos - before.PushingNanos)
			b.ReportMetric(100*float64(total-pushing)/float64(pushing), "overhead-%")
			b.ReportMetric(100*float64(after.PlanningNanos-before.PlanningNanos)/float64(pushing), "planning-%")
		})
	}
}
