// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"context"
	"fmt"
	"math"

	"github.com/kvasir-kv/kvasir/sim/costmodel"
)

// Target is a figure from which a constant is derived.
type Target struct {
	Constant  string
	Figure    string
	Want      float64
	Low, High float64 // range in which the constant is searched
}

const (
	fitRounds = 8    // rounds in which Fit sets each constant once; after them it leaves the constants as they are
	near      = 2e-4 // relative error of a figure that is near enough
)

// Fit changes the constants of p until play returns the figures that the targets want. Each target sets one constant; Fit solves them
// in turns until all figures agree.
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
	return nil // as near as possible: a schedule changes in steps
}

// solve finds the value between two ends at which a figure is right. A schedule changes in steps, so it may jump over the figure.
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
		return 0, fmt.Errorf("tables: no value of %s from %v to %v makes %s %v: it is from %.4g to %.4g", t.Constant, low, high, t.Figure, t.Want, t.Want*(1+atLow), t.Want*(1+atHigh))
	}
	for range 20 {
		// Next, the value at which the line between both ends is right, but at least a tenth of the way from each end.
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
