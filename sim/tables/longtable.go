// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"context"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/sim/cluster"
	"github.com/kvasir-kv/kvasir/sim/costmodel"
)

// longSource names the source of T6.
const longSource = "vllm-project/vllm#18242, comment of 2025-06-16: Llama-3.1-8B, 1P1D over P2P NCCL on H100 (TP 1 taken), 200 prompts of 8,000 tokens, output 200, 3.6 requests per second, burstiness 100"

var longTable = []struct {
	figure   string
	original float64
}{
	{"mean_ttft_ms", 309.84},
	{"median_ttft_ms", 298.10},
	{"p95_ttft_ms", 359.73},
	{"mean_tpot_ms", 10.45},
	{"median_tpot_ms", 10.37},
	{"p95_tpot_ms", 11.34},
}

// checkLong plays T6. Only GPU, model and token budget differ from the original's table.
func checkLong(ctx context.Context, o *Options) (*Check, error) {
	p, err := costmodel.Get(costmodel.H100Llama)
	if err != nil {
		return nil, err
	}
	p = p.NCCL()
	if err := o.Apply(p); err != nil {
		return nil, err
	}
	got, err := medians(o.Seeds, func(seed uint64) (map[string]float64, error) {
		list := fixed(200, 8000, 200)
		if err := workload.Arrive(list, 3.6, 100, seed); err != nil {
			return nil, err
		}
		r, err := cluster.Run(ctx, list, cluster.Options{Profile: p, Prefill: 1, Decode: 1, Transport: cluster.Push})
		if err != nil {
			return nil, err
		}
		return values(r)
	})
	if err != nil {
		return nil, err
	}
	c := &Check{Table: "T6", Source: longSource}
	for _, f := range longTable {
		c.add("1P1D", f.figure, f.original, got[f.figure], "judged")
	}
	c.limit("mean TTFT", c.Rows[:1], 0.1)
	c.limit("mean TPOT", c.Rows[3:4], 0.2)
	c.limitMAPE("mean absolute error", c.judged(), 0.15)
	return c, nil
}
