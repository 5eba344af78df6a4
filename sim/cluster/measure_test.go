// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"math"
	"testing"

	"github.com/kvasir-kv/kvasir/bench"
	"github.com/kvasir-kv/kvasir/sim/cluster"
)

// Measure gives a run the same figures as Figures does, and stages whose sum is the mean TTFT without the
// way to P and to the client.
func TestMeasure(t *testing.T) {
	p := profile(t)
	r := run(t, equal(40, 300, 30), cluster.Options{Profile: p, Prefill: 1, Decode: 1})
	f, m := r.Figures(), r.Measure(bench.Options{})
	near := func(name string, got, want float64) {
		t.Helper()
		if math.Abs(got/want-1) > 1e-9 {
			t.Errorf("%s %v, want %v", name, got, want)
		}
	}
	near("mean TTFT", m.TTFT.Mean, f.MeanTTFT)
	p99, _ := m.TTFT.At(99)
	near("P99 TTFT", p99, f.P99TTFT)
	near("median TPOT", m.TPOT.Median, f.MedianTPOT)
	near("mean ITL", m.ITL.Mean, f.MeanITL)
	near("median E2EL", m.E2EL.Median, f.MedianE2EL)
	near("output throughput", m.OutputThroughput, f.OutputThroughput)
	sum := 0.0
	for _, s := range m.Stages {
		if s.Millis < 0 {
			t.Errorf("%+v", s)
		}
		sum += s.Millis
	}
	queued := 0.0
	for _, q := range r.Records {
		queued += (q.Queued - q.Sent).Seconds() * 1e3 / 40
	}
	near("stages and the ways", sum+queued, f.MeanTTFT)
}
