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

// Check is a held-out table, played with the constants as they are.
type Check struct {
	Table  string  `json:"table"`
	Source string  `json:"source"`
	Rows   []Row   `json:"rows"` // Use: judged, ratio, calibrated or printed
	Limits []Limit `json:"limits"`
	Terms  []Terms `json:"terms,omitempty"` // of T1's TTFT
	// Ranges is how the judged figures move with what is assumed.
	Ranges []Range  `json:"ranges,omitempty"`
	Notes  []string `json:"notes,omitempty"`
}

// Limit is what a table is asked to keep.
type Limit struct {
	What  string  `json:"what"`
	Value float64 `json:"value"`
	Limit float64 `json:"limit"`
	Kept  bool    `json:"kept"`
}

// Range is one end of the range of an assumed constant. Calibrated constants are fitted anew
// for it, since the assumption goes into them.
type Range struct {
	Constant string  `json:"constant"`
	Value    float64 `json:"value"`
	MAPE     float64 `json:"mape"` // of the judged figures
	Worst    string  `json:"worst_figure"`
	Problem  string  `json:"problem,omitempty"` // why it cannot be
}

// Assumed lists the constants that are assumed and that all tables depend on: those of hosts and
// of all-reduces.
var Assumed = []string{"host_step_ms", "host_sequence_ms", "host_token_us", "hop_ms", "spacing_ms", "all_reduce_gbps", "all_reduce_us"}

// ErrTable means that there is no such table.
var ErrTable = errors.New("tables: unknown table")

// CheckNames lists the held-out tables.
var CheckNames = []string{"T1", "T3", "T5", "T6"}

// CheckOptions change how a held-out table is played.
type CheckOptions struct {
	Options
	Ranges []string // run both ends of these assumed constants
	Refit  Refit    // fits the calibrated ones for them; default NewRefit
}

// RunCheck plays a held-out table of CheckNames. Options.Seeds is how many orders of arrivals
// the medians are over; default 20. When ctx ends, the rows so far are returned with its error.
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

// judged returns the rows whose errors count.
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

// limit records whether the largest absolute error of rows keeps a limit.
func (c *Check) limit(what string, rows []Row, most float64) {
	worst := 0.0
	for _, r := range rows {
		worst = max(worst, math.Abs(r.Error))
	}
	c.Limits = append(c.Limits, Limit{what, worst, most, worst <= most})
}

// limitMAPE is limit for the mean of the absolute errors.
func (c *Check) limitMAPE(what string, rows []Row, most float64) {
	mape, _ := MAPE(rows)
	c.Limits = append(c.Limits, Limit{what, mape, most, mape <= most})
}
