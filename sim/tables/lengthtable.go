// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"context"
	"fmt"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/sim/cluster"
	"github.com/kvasir-kv/kvasir/sim/costmodel"
)

// lengthSource names the source of T1.
const lengthSource = "Mooncake, docs/source/performance/vllm/vllm-v1-pd-performance.md: Qwen3-8B, TP 8, two nodes of 8 H800, 8 x ConnectX-7, vLLM 0.11.2.dev358, one request at a time"

// lengthTable is T1: mean TTFT and transfer time by prompt length, in milliseconds.
var lengthTable = []struct {
	tokens         int
	ttft, transfer float64
}{
	{128, 46.09, 0.54},
	{256, 48.04, 0.61},
	{512, 59.91, 0.92},
	{1024, 67.29, 1.50},
	{2048, 85.31, 2.51},
	{4096, 124.42, 4.75},
	{8192, 212.05, 8.84},
	{16384, 387.52, 16.43},
	{32768, 749.62, 31.65},
}

// chatTokens is the number of tokens that the chat template adds: the table's bytes are those of prompts that are longer by that
// number, in whole blocks.
const chatTokens = 8

// playLengths returns the figures "LENGTH mean_ttft_ms" and "LENGTH transfer_ms" for prompts of these lengths.
func playLengths(ctx context.Context, p *costmodel.Profile, lengths ...int) (map[string]float64, error) {
	out := make(map[string]float64)
	q := *p
	q.MaxModel = 40960
	for _, n := range lengths {
		list := make([]workload.Request, 50)
		for i := range list {
			list[i] = workload.Request{Input: n + chatTokens, Output: 128, Conversation: i}
		}
		r, err := cluster.Run(ctx, list, cluster.Options{Profile: &q, Prefill: 1, Decode: 1, Concurrency: 1, NoPrefixCache: true})
		if err != nil {
			return nil, err
		}
		v, err := values(r)
		if err != nil {
			return nil, err
		}
		out[fmt.Sprint(n, " mean_ttft_ms")] = v["mean_ttft_ms"]
		transfer := 0.0
		for _, rec := range r.Records {
			transfer += (rec.Loaded - rec.Loading).Seconds() * 1e3 / float64(len(r.Records))
		}
		out[fmt.Sprint(n, " transfer_ms")] = transfer
	}
	return out, nil
}

// Terms are the parts of the modelled TTFT of one prompt length, in milliseconds.
type Terms struct {
	Tokens    int     `json:"tokens"`
	Hops      float64 `json:"hops"`
	Host      float64 `json:"host"` // host time of the request at P and D, and of the steps of both
	Linear    float64 `json:"linear"`
	Attention float64 `json:"attention"`
	Weights   float64 `json:"weights"` // reading of weights and KV, in the steps of P and D
	AllReduce float64 `json:"all_reduce"`
	Transfer  float64 `json:"transfer"`
	Rest      float64 `json:"rest"` // part of the original's TTFT that nothing explains
}

// checkLengths plays T1 with the profile, whose constants come from the rows 512 and 8,192.
func checkLengths(ctx context.Context, o *Options) (*Check, error) {
	p, err := costmodel.Get(costmodel.H800Qwen3)
	if err != nil {
		return nil, err
	}
	if err := o.Apply(p); err != nil {
		return nil, err
	}
	c := &Check{Table: "T1", Source: lengthSource}
	for _, l := range lengthTable {
		got, err := playLengths(ctx, p, l.tokens)
		if err != nil {
			return c, err
		}
		use := "judged"
		if l.tokens == 512 || l.tokens == 8192 {
			use = "calibrated"
		}
		row := fmt.Sprint(l.tokens)
		ttft, transfer := got[row+" mean_ttft_ms"], got[row+" transfer_ms"]
		c.add(row, "mean_ttft_ms", l.ttft, ttft, use)
		c.add(row, "transfer_ms", l.transfer, transfer, use)
		c.Terms = append(c.Terms, lengthTerms(p, l.tokens, transfer, l.ttft))
	}
	of := func(figure string) []Row {
		return c.filter(func(r *Row) bool { return r.Use == "judged" && r.Figure == figure })
	}
	c.limit("largest error of a transfer", of("transfer_ms"), 0.1)
	c.limitMAPE("mean absolute error of transfers", of("transfer_ms"), 0.05)
	c.limitMAPE("mean absolute error of TTFT", of("mean_ttft_ms"), 0.1)
	return c, nil
}

// lengthTerms adds up the terms of the TTFT of a prompt of so many tokens directly, without a run, in ms. `transfer` is the term of the
// transfer, and Rest is what all terms lack to `original`, the published TTFT.
func lengthTerms(p *costmodel.Profile, tokens int, transfer, original float64) Terms {
	n := tokens + chatTokens
	t := Terms{Tokens: tokens, Hops: 3 * p.Hop().Seconds() * 1e3, Host: 2 * p.Host(n).Seconds() * 1e3, Transfer: transfer}
	add := func(before, n int, samples bool) {
		var w costmodel.Work
		w.Add(before, n, samples)
		c := p.Cost(w)
		t.Host += c.Host * 1e3
		t.Linear += (c.Linear + c.Head) * 1e3
		t.Attention += c.Attention * 1e3
		t.Weights += (c.Weights + c.KV) * 1e3
		t.AllReduce += c.AllReduce * 1e3
	}
	for at := 0; at < n; at += p.TokenBudget {
		add(at, min(p.TokenBudget, n-at), at+p.TokenBudget >= n)
	}
	add(n-1, 1, true)
	t.Rest = original - (t.Hops + t.Host + t.Linear + t.Attention + t.Weights + t.AllReduce + t.Transfer)
	return t
}
