// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"context"
	"fmt"

	"github.com/kvasir-kv/kvasir/sim/cluster"
	"github.com/kvasir-kv/kvasir/sim/costmodel"
)

// Calibration says from which figures the constants of one profile are derived.
type Calibration struct {
	Name    string
	Targets []Target

	profile func() (*costmodel.Profile, error)
	play    func(context.Context, *costmodel.Profile) (map[string]float64, error)
}

// Calibrated is a constant as derived from its figure, beside its value in the profile.
type Calibrated struct {
	Calibration string  `json:"calibration"`
	Constant    string  `json:"constant"`
	Figure      string  `json:"figure"`
	Want        float64 `json:"want"`
	Got         float64 `json:"got"`
	Value       float64 `json:"value"`
	Stored      float64 `json:"stored"` // value in the profile
}

// Calibrations returns the calibrations of all profiles.
func Calibrations() []Calibration {
	named := func(name string) func() (*costmodel.Profile, error) {
		return func() (*costmodel.Profile, error) { return costmodel.Get(name) }
	}
	return []Calibration{
		{
			Name: "a10", profile: named(costmodel.A10Qwen),
			Targets: []Target{
				{"prefill_efficiency", "mean_ttft_ms", Original(Mooncake, "mean_ttft_ms"), 0.3, 1},
				{"bandwidth_efficiency", "mean_itl_ms", Original(Mooncake, "mean_itl_ms"), 0.5, 1},
			},
			play: func(ctx context.Context, p *costmodel.Profile) (map[string]float64, error) {
				return play(ctx, p, cluster.Pull, Reference(), 0)
			},
		},
		{
			Name: "nccl",
			profile: func() (*costmodel.Profile, error) {
				p, err := costmodel.Get(costmodel.A10Qwen)
				if err != nil {
					return nil, err
				}
				return p.NCCL(), nil
			},
			Targets: []Target{
				{"setup_ms", "mean_ttft_ms", Original(P2pNccl, "mean_ttft_ms") - Original(Mooncake, "mean_ttft_ms"), 0, 1000},
				{"receive_layer_us", "mean_itl_ms", Original(P2pNccl, "mean_itl_ms") - Original(Mooncake, "mean_itl_ms"), 0, 200},
			},
			play: playDifference,
		},
		{
			Name: "h800", profile: named(costmodel.H800Qwen3),
			Targets: []Target{
				{"transfer_ms", "512 transfer_ms", lengthTable[2].transfer, 0, 0.9},
				{"transfer_gbps", "8192 transfer_ms", lengthTable[6].transfer, 50, 500},
				{"host_fixed_ms", "512 mean_ttft_ms", lengthTable[2].ttft, 0, 60},
				{"host_token_us", "8192 mean_ttft_ms", lengthTable[6].ttft, 0, 30},
			},
			play: func(ctx context.Context, p *costmodel.Profile) (map[string]float64, error) {
				return playLengths(ctx, p, 512, 8192)
			},
		},
		{
			Name: "pipe", profile: func() (*costmodel.Profile, error) { return kneeProfile(2) },
			Targets: []Target{{"pipe_mbps", "median_ttft_ms", kneeTable[1].median, 50, 10000}},
			play: func(ctx context.Context, p *costmodel.Profile) (map[string]float64, error) {
				return playKnee(ctx, p, kneeTable[1])
			},
		},
	}
}

// playDifference returns the figures of the second row minus those of the first.
func playDifference(ctx context.Context, p *costmodel.Profile) (map[string]float64, error) {
	first, err := costmodel.Get(costmodel.A10Qwen)
	if err != nil {
		return nil, err
	}
	a, err := play(ctx, first, cluster.Pull, Reference(), 0)
	if err != nil {
		return nil, err
	}
	b, err := play(ctx, p, cluster.Push, Reference(), 1)
	if err != nil {
		return nil, err
	}
	for figure := range b {
		b[figure] -= a[figure]
	}
	return b, nil
}

// Recalibrate derives the constants of a calibration again.
func (c *Calibration) Recalibrate(ctx context.Context) ([]Calibrated, error) {
	p, err := c.profile()
	if err != nil {
		return nil, err
	}
	stored := p.Constants
	if err := Fit(ctx, p, c.Targets, func(p *costmodel.Profile) (map[string]float64, error) { return c.play(ctx, p) }); err != nil {
		return nil, fmt.Errorf("calibration %s: %w", c.Name, err)
	}
	got, err := c.play(ctx, p)
	if err != nil {
		return nil, err
	}
	var out []Calibrated
	for _, t := range c.Targets {
		value, err := p.Constants.Get(t.Constant)
		if err != nil {
			return nil, err
		}
		was, err := stored.Get(t.Constant)
		if err != nil {
			return nil, err
		}
		out = append(out, Calibrated{c.Name, t.Constant, t.Figure, t.Want, got[t.Figure], value, was})
	}
	return out, nil
}
