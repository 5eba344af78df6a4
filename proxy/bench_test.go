// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"slices"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/proxy"
)

// BenchmarkHandover is what P/D costs over one engine alone, with engines that compute at once: P and D
// at the same time, and one after the other.
func BenchmarkHandover(b *testing.B) {
	medians := map[string]float64{}
	for _, k := range []struct {
		name string
		pair pair
	}{
		{"alone", pair{model: "m", d: 1}},
		{"together", pair{model: "m", p: 1, d: 1}},
		{"serial", pair{model: "m", dialect: proxy.Mooncake013, p: 1, d: 1}},
	} {
		b.Run(k.name, func(b *testing.B) {
			x := &deployment{t: b}
			o := proxy.Options{HealthInterval: time.Second}
			x.pair(b, k.pair, &o, 0)
			x.stopAll()
			x.start(o)
			var took []time.Duration
			for i := 0; b.Loop(); i++ {
				start := time.Now()
				if status, text, _ := post(b, x.url, body(i, 1, "")); status != 200 {
					b.Fatal(status, text)
				}
				took = append(took, time.Since(start))
			}
			slices.Sort(took)
			medians[k.name] = took[len(took)/2].Seconds() * 1e3
			b.ReportMetric(medians[k.name], "ms/median")
			if k.name != "alone" {
				b.ReportMetric(medians[k.name]-medians["alone"], "ms/handover")
			}
		})
	}
}
