// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"context"
	"fmt"

	"github.com/kvasir-kv/kvasir/sim/costmodel"
)

// Moved is the result for the Mooncake row of the original's table with one constant, or the token budget, changed.
type Moved struct {
	What  string  `json:"what"`
	Refit bool    `json:"refit"` // calibrated constants were derived again
	MAPE  float64 `json:"mape"`
	Worst string  `json:"worst_figure"`
}

// Sensitivity plays the row with each calibrated constant changed by a tenth; with each assumed constant at the ends of its range, once
// with the calibrated ones unchanged and once with them derived again; and with other token budgets.
func Sensitivity(ctx context.Context, refit Refit) (out []Moved, err error) {
	move := func(what string, refit bool, o Options) error {
		ours, err := o.playRow(ctx, Mooncake, Reference())
		if err != nil {
			return err
		}
		m := Moved{What: what, Refit: refit}
		m.MAPE, m.Worst = MAPE(against(Mooncake, ours))
		out = append(out, m)
		return nil
	}
	if err := move("as calibrated", false, Options{}); err != nil {
		return out, err
	}
	p, err := costmodel.Get(costmodel.A10Qwen)
	if err != nil {
		return out, err
	}
	for _, t := range Calibrations()[0].Targets {
		v, err := p.Constants.Get(t.Constant)
		if err != nil {
			return out, err
		}
		for _, factor := range []float64{0.9, 1.1} {
			if err := move(fmt.Sprintf("%s x %v", t.Constant, factor), false, Options{Set: []Setting{{t.Constant, v * factor}}}); err != nil {
				return out, err
			}
		}
	}
	for _, term := range costmodel.Terms {
		if term.High == 0 {
			continue
		}
		for _, value := range []float64{term.Low, term.High} {
			s := Setting{term.Name, value}
			if err := move(fmt.Sprintf("%s %v", term.Name, value), false, Options{Set: []Setting{s}}); err != nil {
				return out, err
			}
			set, err := refit(ctx, s)
			if err != nil {
				return out, err
			}
			if err := move(fmt.Sprintf("%s %v", term.Name, value), true, Options{Set: set}); err != nil {
				return out, err
			}
		}
	}
	for _, budget := range []int{1024, 8192} {
		if err := move(fmt.Sprintf("token budget %d", budget), false, Options{TokenBudget: budget}); err != nil {
			return out, err
		}
	}
	return out, nil
}

// against returns the figures of a row beside the original's, without the token totals.
func against(row string, ours map[string]float64) (out []Row) {
	for _, figure := range figureOrder {
		if !tokenTotals(figure) {
			o := Original(row, figure)
			out = append(out, Row{Row: row, Figure: figure, Original: o, Ours: ours[figure], Error: ours[figure]/o - 1, Use: use(figure)})
		}
	}
	return out
}

// Refit returns an assumption together with the constants of the A10 profile derived again under it.
type Refit func(context.Context, Setting) ([]Setting, error)

// NewRefit returns a Refit that remembers its results. Only one goroutine may call it.
func NewRefit() Refit {
	type result struct {
		set []Setting
		err error
	}
	known := make(map[Setting]result)
	return func(ctx context.Context, s Setting) ([]Setting, error) {
		r, ok := known[s]
		if !ok {
			if r.set, r.err = refit(ctx, s); ctx.Err() == nil {
				known[s] = r
			}
		}
		return r.set, r.err
	}
}

func refit(ctx context.Context, s Setting) ([]Setting, error) {
	a10 := Calibrations()[0]
	p, err := a10.profile()
	if err != nil {
		return nil, err
	}
	if err := p.Constants.Set(s.Name, s.Value); err != nil {
		return nil, err
	}
	if err := Fit(ctx, p, a10.Targets, func(p *costmodel.Profile) (map[string]float64, error) { return a10.play(ctx, p) }); err != nil {
		return nil, err
	}
	out := []Setting{s}
	for _, t := range a10.Targets {
		v, err := p.Constants.Get(t.Constant)
		if err != nil {
			return nil, err
		}
		out = append(out, Setting{t.Constant, v})
	}
	return out, nil
}
