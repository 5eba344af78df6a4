// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/kvasir-kv/kvasir/bench"
	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/sim/cluster"
	"github.com/kvasir-kv/kvasir/sim/costmodel"
)

// ErrResult means that constants cannot be derived from a benchmark's result.
var ErrResult = errors.New("tables: result")

// maxResultRequests is the largest number of completed requests of one result. A result with more is ErrResult.
const maxResultRequests = 100000

// measured is a benchmark's result with the requests that it measured.
type measured struct {
	name        string
	list        []workload.Request
	concurrency int
	ttft, itl   float64 // means, ms
}

// newMeasured takes the lengths and send times of the requests from a result's details, or else its mean lengths and its rate.
func newMeasured(name string, r *bench.Result) (m measured, err error) {
	m.name = name
	if r.Completed < 1 || r.Completed > maxResultRequests || r.TTFT == nil || !(r.TTFT.Mean > 0) || r.TotalInput < r.Completed || r.TotalOutput < r.Completed {
		return m, fmt.Errorf("%w %s: %d completed requests, 1 to %d with mean_ttft_ms and tokens are needed", ErrResult, name, r.Completed, maxResultRequests)
	}
	m.ttft = r.TTFT.Mean
	if r.ITL != nil && r.TotalOutput > r.Completed {
		m.itl = r.ITL.Mean
	}
	if r.MaxConcurrency != nil {
		m.concurrency = *r.MaxConcurrency
	}
	first := math.Inf(1)
	for _, s := range r.Samples() {
		first = min(first, s.Start)
	}
	for i, s := range r.Samples() {
		if !s.Failed() && s.Input > 0 {
			m.list = append(m.list, workload.Request{Input: s.Input, Output: max(s.Output, 1), Arrival: time.Duration((s.Start - first) * 1e9), Conversation: i})
		}
	}
	if len(m.list) > 0 {
		return m, nil
	}
	m.list = fixed(r.Completed, r.TotalInput/r.Completed, r.TotalOutput/r.Completed)
	rate, burstiness := float64(r.Rate), float64(r.Burstiness)
	if !(burstiness > 0) {
		burstiness = 1
	}
	if rate > 0 && !math.IsInf(rate, 1) {
		return m, workload.Arrive(m.list, rate, burstiness, 1)
	}
	return m, nil
}

// FitResults derives the two efficiencies of a profile so that mean TTFT and mean ITL equal those of the results, on average over them.
// All results must come from the same deployment. Results with one token per request tell nothing about the ITL: then the bandwidth
// efficiency stays.
func FitResults(ctx context.Context, p *costmodel.Profile, deployment cluster.Options, names []string, results []*bench.Result) ([]Calibrated, error) {
	var all []measured
	targets := []Target{{"prefill_efficiency", "mean_ttft_ms", 1, 0.01, 1}}
	withITL := true
	for i, r := range results {
		m, err := newMeasured(names[i], r)
		if err != nil {
			return nil, err
		}
		withITL = withITL && m.itl > 0
		all = append(all, m)
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%w: none is given", ErrResult)
	}
	if withITL {
		targets = append(targets, Target{"bandwidth_efficiency", "mean_itl_ms", 1, 0.01, 1})
	}
	means := func(p *costmodel.Profile) (ttft, itl float64, err error) {
		deployment.Profile = p
		for _, m := range all {
			deployment.Concurrency = m.concurrency
			r, err := cluster.Run(ctx, m.list, deployment)
			if err != nil {
				return 0, 0, fmt.Errorf("%s: %w", m.name, err)
			}
			v, err := values(r)
			if err != nil {
				return 0, 0, fmt.Errorf("%s: %w", m.name, err)
			}
			ttft += v["mean_ttft_ms"] / m.ttft / float64(len(all))
			if m.itl > 0 {
				itl += v["mean_itl_ms"] / m.itl / float64(len(all))
			}
		}
		return ttft, itl, nil
	}
	play := func(p *costmodel.Profile) (map[string]float64, error) {
		ttft, itl, err := means(p)
		return map[string]float64{"mean_ttft_ms": ttft, "mean_itl_ms": itl}, err
	}
	stored := p.Constants
	if err := Fit(ctx, p, targets, play); err != nil {
		return nil, err
	}
	got, err := play(p)
	if err != nil {
		return nil, err
	}
	calibrated := make(map[string]string, len(p.Calibrated))
	for name, figure := range p.Calibrated {
		calibrated[name] = figure
	}
	var out []Calibrated
	for _, t := range targets {
		value, err := p.Constants.Get(t.Constant)
		if err != nil {
			return nil, err
		}
		was, err := stored.Get(t.Constant)
		if err != nil {
			return nil, err
		}
		calibrated[t.Constant] = fmt.Sprintf("%s of %d results of vllm bench serve", t.Figure, len(all))
		out = append(out, Calibrated{p.Name, t.Constant, t.Figure + ", ours / measured", 1, got[t.Figure], value, was})
	}
	p.Calibrated = calibrated
	return out, nil
}
