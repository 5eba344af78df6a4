// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"context"
	"fmt"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/sim/cluster"
	"github.com/kvasir-kv/kvasir/sim/costmodel"
)

// kneeSource names the source of T3.
const kneeSource = "Mooncake, git history of docs/source/performance/vllm-benchmark-results-v0.2.md: Qwen2.5-7B-Instruct-GPTQ-Int4, 1P1D on two A10 servers, vLLM v0 connector, 200 requests, output 6, Poisson"

// kneeRow is a row of T3, with times in milliseconds.
type kneeRow struct {
	tp, tokens   int
	rate         float64
	reached      float64
	mean, median float64 // of TTFT
}

var kneeTable = []kneeRow{
	{1, 1024, 2, 2.01, 1056.76, 635.00},
	{2, 1024, 2, 2.02, 314.87, 231.20},
	{4, 1024, 2, 2.03, 198.10, 160.03},
	{4, 1024, 4, 4.02, 341.88, 240.68},
	{4, 1024, 6, 5.98, 851.15, 501.59},
	{4, 1024, 8, 7.36, 4835.08, 5733.45},
	{4, 2048, 2, 2.02, 723.76, 488.67},
	{4, 4096, 2, 1.70, 14616.48, 18323.82},
	{4, 8192, 2, 0.81, 75783.36, 79331.60},
}

// kneeBudget is max_num_batched_tokens of vLLM v0 without chunked prefill: the longest sequence that the source's command lines allow.
const kneeBudget = 10000

func kneeProfile(tp int) (*costmodel.Profile, error) {
	p, err := costmodel.Get(costmodel.A10QwenInt4)
	if err != nil {
		return nil, err
	}
	p.TP, p.TokenBudget = tp, kneeBudget
	return p, nil
}

// arrivalSeeds is the number of random orders of arrivals that are played for a table whose own order is unknown.
const arrivalSeeds = 20

// playKnee returns the medians of the figures over random arrivals.
func playKnee(ctx context.Context, p *costmodel.Profile, row kneeRow) (map[string]float64, error) {
	return playKneeSeeds(ctx, p, row, arrivalSeeds)
}

func playKneeSeeds(ctx context.Context, p *costmodel.Profile, row kneeRow, seeds int) (map[string]float64, error) {
	return medians(seeds, func(seed uint64) (map[string]float64, error) {
		list := fixed(200, row.tokens, 6)
		if err := workload.Arrive(list, row.rate, 1, seed); err != nil {
			return nil, err
		}
		r, err := cluster.Run(ctx, list, cluster.Options{Profile: p, Prefill: 1, Decode: 1, Transport: cluster.Pipe, NoPrefixCache: true})
		if err != nil {
			return nil, err
		}
		return values(r)
	})
}

// saturated is the share of the requested rate below which a row has passed the knee. Runs of 200 requests that keep up reach the rate,
// or a little more.
const saturated = 0.97

// checkKnee plays T3 and checks its shape: in which rows P is saturated, and the order of the mean TTFTs.
func checkKnee(ctx context.Context, o *Options) (*Check, error) {
	c := &Check{Table: "T3", Source: kneeSource}
	var ours []float64
	wrongKnee := 0
	for i, row := range kneeTable {
		p, err := kneeProfile(row.tp)
		if err != nil {
			return nil, err
		}
		if err := o.Apply(p); err != nil {
			return nil, err
		}
		got, err := playKneeSeeds(ctx, p, row, o.Seeds)
		if err != nil {
			return c, err
		}
		name := fmt.Sprintf("TP%d %d tokens, %v/s", row.tp, row.tokens, row.rate)
		use := "printed"
		if i == 1 {
			use = "calibrated"
		}
		c.add(name, "request_throughput", row.reached, got["request_throughput"], "judged")
		c.add(name, "mean_ttft_ms", row.mean, got["mean_ttft_ms"], "printed")
		c.add(name, "median_ttft_ms", row.median, got["median_ttft_ms"], use)
		ours = append(ours, got["mean_ttft_ms"])
		if (row.reached < saturated*row.rate) != (got["request_throughput"] < saturated*row.rate) {
			wrongKnee++
		}
	}
	wrongOrder := 0
	for i := range kneeTable {
		for j := range i {
			if (kneeTable[i].mean < kneeTable[j].mean) != (ours[i] < ours[j]) {
				wrongOrder++
			}
		}
	}
	pairs := len(kneeTable) * (len(kneeTable) - 1) / 2
	c.Limits = append(c.Limits,
		Limit{fmt.Sprintf("rows of %d on the wrong side of the knee", len(kneeTable)), float64(wrongKnee), 0, wrongKnee == 0},
		Limit{fmt.Sprintf("pairs of %d whose mean TTFTs are in the wrong order", pairs), float64(wrongOrder), 0, wrongOrder == 0})
	return c, nil
}
