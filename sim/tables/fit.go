// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"context"
	"fmt"
	"math"

	"github.com/kvasir-kv/kvasir/sim/costmodel"
)

// Target is a figure that a constant is to be calibrated from.
type Target struct {
	Constant  string
	Figure    string
	Want      float64
	Low, High float64 // where the constant is looked for
}

const (
	fitRounds = 8
	near      = 2e-4 // of a figure, relative
)

// Fit changes the constants of p so that play gives the figures that the targets want: one
// constant for each, in turns until all agree.
func Fit(ctx context.Context, p *costmodel.Profile, targets []Target, play func(*costmodel.Profile) (map[string]float64, error)) error {
	at := func(t Target, value float64) (float64, error) {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		if err := p.Constants.Set(t.Constant, value); err != nil {
			return 0, err
		}
		got, err := play(p)
		if err != nil {
			return 0, err
		}
		return got[t.Figure]/t.Want - 1, nil
	}
	for range fitRounds {
		worst := 0.0
		for _, t := range targets {
			now, err := p.Constants.Get(t.Constant)
			if err != nil {
				return err
			}
			wrong, err := at(t, now)
			if err != nil {
				return err
			}
			worst = max(worst, math.Abs(wrong))
			if math.Abs(wrong) < near/2 {
				continue
			}
			value, err := solve(t, at)
			if err != nil {
				return err
			}
			if _, err := at(t, value); err != nil {
				return err
			}
		}
		if worst < near {
			return nil
		}
	}
	return nil // as near as a schedule allows, which changes in steps
}

// solve finds where a figure is right between two ends. A schedule changes in steps, so that it may
// jump over the figure.
func solve(t Target, at func(Target, float64) (float64, error)) (float64, error) {
	low, high := t.Low, t.High
	atLow, err := at(t, low)
	if err != nil {
		return 0, err
	}
	atHigh, err := at(t, high)
	if err != nil {
		return 0, err
	}
	if atLow*atHigh > 0 {
		return 0, fmt.Errorf("tables: no %s from %v to %v makes %s %v: it is from %.4g to %.4g", t.Constant, low, high, t.Figure, t.Want, t.Want*(1+atLow), t.Want*(1+atHigh))
	}
	for range 20 {
		// Where the line between both ends is right, but not nearer to an end than a tenth.
		share := min(max(atLow/(atLow-atHigh), 0.1), 0.9)
		mid := low + share*(high-low)
		v, err := at(t, mid)
		if err != nil {
			return 0, err
		}
		switch {
		case math.Abs(v) < near/2:
			return mid, nil
		case v*atLow > 0:
			low, atLow = mid, v
		default:
			high, atHigh = mid, v
		}
	}
	return (low + high) / 2, nil
}
