// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"context"
	"fmt"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/sim/cluster"
	"github.com/kvasir-kv/kvasir/sim/costmodel"
)

// sharedSource names the source of T5.
const sharedSource = "Mooncake, docs/source/performance/sglang/sglang-benchmark-results-v1.md at 41cbeeb: Qwen2.5-7B-Instruct-GPTQ-Int4 on two A10 servers, SGLang, Poisson arrivals; nominal lengths taken"

// sharedFigures are the figures of T5; the first four are judged.
var sharedFigures = []string{"mean_ttft_ms", "p99_ttft_ms", "mean_itl_ms", "p99_itl_ms", "mean_e2el_ms", "output_throughput", "total_token_throughput"}

// sharedTable is T5: by load, and within a load by deployment, with the figures in the order of sharedFigures.
var sharedTable = []struct {
	name                     string
	tp, input, output, count int
	rate                     float64
	separate, regular        []float64
}{
	{
		"TP4", 4, 8192, 512, 50, 1,
		[]float64{732.54, 2952.57, 7.23, 10.76, 3413.86, 407.59, 7084.46},
		[]float64{767.18, 1264.88, 10.30, 12.73, 4586.54, 427.65, 7433.27},
	},
	{
		"TP2", 2, 2048, 512, 200, 4,
		[]float64{1111.94, 2725.89, 17.06, 19.72, 11519.24, 1215.17, 6161.43},
		[]float64{310.01, 720.91, 25.74, 294.89, 11683.15, 1223.03, 6201.29},
	},
}

// checkShared plays T5: one P and one D against two engines that do both, with SGLang's scheduling.
func checkShared(ctx context.Context, o *Options) (*Check, error) {
	c := &Check{Table: "T5", Source: sharedSource}
	type key struct{ row, figure string }
	ours, original := make(map[key]float64), make(map[key]float64)
	for _, load := range sharedTable {
		for _, d := range []struct {
			name      string
			deploy    cluster.Options
			published []float64
		}{
			{"1P1D", cluster.Options{Prefill: 1, Decode: 1, FirstToken: true}, load.separate},
			{"2 regular", cluster.Options{Decode: 2, PrefillAlone: true}, load.regular},
		} {
			p, err := costmodel.Get(costmodel.A10QwenInt4)
			if err != nil {
				return nil, err
			}
			p.TP = load.tp
			if err := o.Apply(p); err != nil {
				return nil, err
			}
			d.deploy.Profile = p
			got, err := medians(o.Seeds, func(seed uint64) (map[string]float64, error) {
				list := fixed(load.count, load.input, load.output)
				if err := workload.Arrive(list, load.rate, 1, seed); err != nil {
					return nil, err
				}
				r, err := cluster.Run(ctx, list, d.deploy)
				if err != nil {
					return nil, err
				}
				return values(r)
			})
			if err != nil {
				return c, err
			}
			row := load.name + " " + d.name
			for i, figure := range sharedFigures {
				use := "judged"
				if i >= 4 {
					use = "printed"
				}
				c.add(row, figure, d.published[i], got[figure], use)
				ours[key{row, figure}], original[key{row, figure}] = got[figure], d.published[i]
			}
		}
	}
	for _, r := range []struct{ figure, over, under string }{
		{"mean_itl_ms", "TP4 1P1D", "TP4 2 regular"},
		{"mean_itl_ms", "TP2 1P1D", "TP2 2 regular"},
		{"p99_itl_ms", "TP2 2 regular", "TP2 1P1D"},
		{"mean_ttft_ms", "TP2 1P1D", "TP2 2 regular"},
	} {
		over, under := key{r.over, r.figure}, key{r.under, r.figure}
		c.add(fmt.Sprintf("%s / %s", r.over, r.under), r.figure, original[over]/original[under], ours[over]/ours[under], "ratio")
	}
	c.limitMAPE("mean absolute error of TTFT and ITL", c.judged(), 0.25)
	c.limit("largest error of a ratio", c.filter(func(r *Row) bool { return r.Use == "ratio" }), 0.15)
	c.Notes = append(c.Notes, "The source contradicts itself: its latencies and ITLs belong to 371 to 610 tokens, where 512 at most were asked for.")
	return c, nil
}
