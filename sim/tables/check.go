// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/kvasir-kv/kvasir/sim/costmodel"
)

// Check is the result of playing a held-out table with the constants unchanged.
type Check struct {
	Table  string  `json:"table"`
	Source string  `json:"source"`
	Rows   []Row   `json:"rows"` // Use is judged, ratio, calibrated or printed
	Limits []Limit `json:"limits"`
	Terms  []Terms `json:"terms,omitempty"` // terms of the TTFT in T1
	// Ranges says how the judged figures change with the assumed constants.
	Ranges []Range  `json:"ranges,omitempty"`
	Notes  []string `json:"notes,omitempty"`
}

// Limit is a limit that a table must keep, and whether it does.
type Limit struct {
	What  string  `json:"what"`
	Value float64 `json:"value"`
	Limit float64 `json:"limit"`
	Kept  bool    `json:"kept"`
}

// Range is the result for one end of the range of an assumed constant. The calibrated constants are derived again for it, because they
// depend on the assumption.
type Range struct {
	Constant string  `json:"constant"`
	Value    float64 `json:"value"`
	MAPE     float64 `json:"mape"` // mean absolute error of the judged figures
	Worst    string  `json:"worst_figure"`
	Problem  string  `json:"problem,omitempty"` // why that end could not be played
}

// Assumed lists the assumed constants on which all tables depend: those of hosts and of all-reduces.
var Assumed = []string{"host_step_ms", "host_sequence_ms", "host_token_us", "hop_ms", "spacing_ms", "all_reduce_gbps", "all_reduce_us"}

// ErrTable means that there is no table of that name.
var ErrTable = errors.New("tables: unknown table")

// CheckNames lists the names of the held-out tables.
var CheckNames = []string{"T1", "T3", "T5", "T6"}

// CheckOptions says how a held-out table is played.
type CheckOptions struct {
	Options
	Ranges []string // assumed constants for which both ends of the range are played
	Refit  Refit    // derives the calibrated constants for these ends; default NewRefit
}

// RunCheck plays the held-out table of that name, one of CheckNames. Options.Seeds is the number of orders of arrivals over which
// medians are taken; default 20. When ctx ends first, it returns the rows so far with ctx's error.
func RunCheck(ctx context.Context, name string, o CheckOptions) (*Check, error) {
	check, ok := map[string]func(context.Context, *Options) (*Check, error){"T1": checkLengths, "T3": checkKnee, "T5": checkShared, "T6": checkLong}[strings.ToUpper(name)]
	if !ok {
		return nil, fmt.Errorf("%w: %.32q is none of %s", ErrTable, name, strings.Join(CheckNames, ", "))
	}
	if o.Seeds == 0 {
		o.Seeds = arrivalSeeds
	}
	c, err := check(ctx, &o.Options)
	if err != nil {
		if c == nil || len(c.Rows) == 0 || ctx.Err() == nil {
			return nil, err
		}
		c.Notes = append(c.Notes, "Interrupted: the other rows were not played, and limits are not judged.")
		return c, err
	}
	if o.Refit == nil {
		o.Refit = NewRefit()
	}
	for _, term := range costmodel.Terms {
		if !slices.Contains(o.Ranges, term.Name) {
			continue
		}
		for _, value := range []float64{term.Low, term.High} {
			r := Range{Constant: term.Name, Value: value}
			moved := o.Options
			if moved.Set, err = o.Refit(ctx, Setting{term.Name, value}); err == nil {
				var end *Check
				if end, err = check(ctx, &moved); err == nil {
					r.MAPE, r.Worst = MAPE(end.judged())
				}
			}
			if ctx.Err() != nil {
				return c, ctx.Err()
			}
			if err != nil {
				r.Problem = err.Error()
			}
			c.Ranges = append(c.Ranges, r)
		}
	}
	return c, nil
}

func (c *Check) add(row, figure string, original, ours float64, use string) {
	c.Rows = append(c.Rows, Row{Row: row, Figure: figure, Original: original, Ours: ours, Error: ours/original - 1, Use: use})
}

// judged returns the rows whose errors are judged.
func (c *Check) judged() []Row {
	return c.filter(func(r *Row) bool { return r.Use == "judged" })
}

func (c *Check) filter(f func(*Row) bool) (out []Row) {
	for i := range c.Rows {
		if f(&c.Rows[i]) {
			out = append(out, c.Rows[i])
		}
	}
	return out
}

// limit records, under the name `what`, whether the largest absolute error of rows is at most `most`.
func (c *Check) limit(what string, rows []Row, most float64) {
	worst := 0.0
	for _, r := range rows {
		worst = max(worst, math.Abs(r.Error))
	}
	c.Limits = append(c.Limits, Limit{what, worst, most, worst <= most})
}

// limitMAPE records, under the name `what`, whether the mean absolute error of rows is at most `most`.
func (c *Check) limitMAPE(what string, rows []Row, most float64) {
	mape, _ := MAPE(rows)
	c.Limits = append(c.Limits, Limit{what, mape, most, mape <= most})
}
