// SPDX-License-Identifier: Apache-2.0

// Package tables plays published measurements of vLLM and SGLang, with and without separate prefill and decode, in virtual time, and
// compares each figure.
//
// Constants are calibrated on the original's table (Original). All other tables are held out: they are printed whatever their errors
// are.
package tables

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"slices"

	"github.com/kvasir-kv/kvasir/bench"
	"github.com/kvasir-kv/kvasir/sim/cluster"
	"github.com/kvasir-kv/kvasir/sim/costmodel"
)

// The names of the rows of the original's table.
const (
	Mooncake = "mooncake"
	P2pNccl  = "p2pnccl"
)

// Names lists the rows, in the order of Length.Output.
var Names = []string{Mooncake, P2pNccl}

// OriginalSource names the source of the original's table.
const OriginalSource = "vLLM's pull request that introduces the MooncakeConnector (2025-09-12): Qwen2.5-7B-Instruct, 1P1D on 2 A10 servers, vllm bench serve, 100 prompts of ShareGPT, all at once"

// figureOrder is the order of the figures, under the keys of vllm bench serve.
var figureOrder = []string{
	"duration", "total_input_tokens", "total_output_tokens", "request_throughput", "output_throughput", "total_token_throughput",
	"mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms", "mean_itl_ms", "median_itl_ms", "p99_itl_ms",
}

// tokenTotals reports whether a figure is a total of tokens, which is given and not predicted: its error does not count.
func tokenTotals(figure string) bool {
	return figure == "total_input_tokens" || figure == "total_output_tokens"
}

// original is the original's table, with the figures in the order of figureOrder.
var original = map[string][]float64{
	Mooncake: {30.93, 23260, 21350, 3.23, 690.19, 1442.12, 2692.51, 2662.22, 4799.88, 37.64, 37.76, 42.77, 37.26, 37.34, 43.69},
	P2pNccl:  {31.97, 23260, 21881, 3.13, 684.44, 1412.02, 2934.43, 3148.52, 5053.23, 38.22, 38.10, 43.22, 37.47, 37.59, 46.06},
}

// Original returns a figure of the original's table, by row and by the key of vllm bench serve.
func Original(row, figure string) float64 {
	i := slices.Index(figureOrder, figure)
	if i < 0 || original[row] == nil {
		return math.NaN()
	}
	return original[row][i]
}

// Row is one figure beside the original's figure.
type Row struct {
	Row      string  `json:"row"`
	Figure   string  `json:"figure"`
	Original float64 `json:"original"`
	Ours     float64 `json:"ours"`
	Error    float64 `json:"error"` // ours ÷ original − 1
	// Use says what the figure is used for: calibrated (a constant was derived from it), predicted, or given.
	Use string `json:"use"`
}

// Spread is the spread of one figure over generated workloads.
type Spread struct {
	Row       string  `json:"row"`
	Figure    string  `json:"figure"`
	Condition bool    `json:"condition"` // the longest output is as long as the table implies
	Seeds     int     `json:"seeds"`     // number of workloads played
	Original  float64 `json:"original"`
	P5        float64 `json:"p5"`
	Median    float64 `json:"median"`
	P95       float64 `json:"p95"`
	Error     float64 `json:"error"` // error of the median
}

// Table is the original's table together with our results.
type Table struct {
	Source      string             `json:"source"`
	Profile     *costmodel.Profile `json:"profile"`
	Rows        []Row              `json:"rows"`
	Differences []Row              `json:"differences"` // P2pNccl minus Mooncake
	Seeds       int                `json:"seeds,omitempty"`
	Spread      []Spread           `json:"spread,omitempty"`
	MAPE        []RowMAPE          `json:"mape"`
	Sensitivity []Moved            `json:"sensitivity,omitempty"`

	// Results are our rows in the form of a client's benchmark, in the order of Names.
	Results []*bench.Result `json:"-"`
}

// RowMAPE is the mean absolute error of a row's figures, without token totals.
type RowMAPE struct {
	Row   string  `json:"row"`
	MAPE  float64 `json:"mape"`
	Worst string  `json:"worst_figure"`
}

// Options says how the original's table is played.
type Options struct {
	Lengths     []Length // default Reference
	Seeds       int      // number of generated workloads to play in addition
	TokenBudget int      // most tokens of a step; default the profile's
	Set         []Setting
	Sensitivity bool // also play with every constant, and the token budget, changed
}

// Setting gives one constant of a profile another value.
type Setting struct {
	Name  string
	Value float64
}

// Profile returns the profile of that name, or of a file (costmodel.Open), with the changes in o.
func Profile(name string, o Options) (*costmodel.Profile, error) {
	p, err := costmodel.Open(name)
	if err != nil {
		return nil, err
	}
	return p, o.Apply(p)
}

// Apply makes the changes in o to a profile.
func (o *Options) Apply(p *costmodel.Profile) error {
	for _, s := range o.Set {
		if err := p.Constants.Set(s.Name, s.Value); err != nil {
			return err
		}
	}
	p.TokenBudget = cmp.Or(o.TokenBudget, p.TokenBudget)
	return p.Validate()
}

// rowProfile returns the profile and the transport of a row.
func (o *Options) rowProfile(row string) (*costmodel.Profile, cluster.Transport, error) {
	p, err := costmodel.Get(costmodel.A10Qwen)
	if err != nil {
		return nil, 0, err
	}
	transport := cluster.Pull
	if row == P2pNccl {
		p, transport = p.NCCL(), cluster.Push
	}
	return p, transport, o.Apply(p)
}

// playRow plays one row and returns its figures.
func (o *Options) playRow(ctx context.Context, row string, list []Length) (map[string]float64, error) {
	r, err := o.runRow(ctx, row, list)
	if err != nil {
		return nil, err
	}
	return values(r)
}

func (o *Options) runRow(ctx context.Context, row string, list []Length) (*cluster.Result, error) {
	p, transport, err := o.rowProfile(row)
	if err != nil {
		return nil, err
	}
	return runList(ctx, p, transport, list, slices.Index(Names, row))
}

func play(ctx context.Context, p *costmodel.Profile, transport cluster.Transport, list []Length, output int) (map[string]float64, error) {
	r, err := runList(ctx, p, transport, list, output)
	if err != nil {
		return nil, err
	}
	return values(r)
}

func runList(ctx context.Context, p *costmodel.Profile, transport cluster.Transport, list []Length, output int) (*cluster.Result, error) {
	return cluster.Run(ctx, requests(list, output), cluster.Options{Profile: p, Prefill: 1, Decode: 1, Transport: transport})
}

// values returns the figures of a run by their keys.
func values(r *cluster.Result) (map[string]float64, error) {
	f := r.Figures()
	if f.Failed > 0 {
		for _, q := range r.Records {
			if q.Error != "" {
				return nil, fmt.Errorf("tables: %d requests cannot be run: %s", f.Failed, q.Error)
			}
		}
	}
	text, err := json.Marshal(f)
	if err != nil {
		return nil, err
	}
	out := make(map[string]float64)
	return out, json.Unmarshal(text, &out)
}

// Play plays the original's table.
func Play(ctx context.Context, o Options) (*Table, error) {
	list := o.Lengths
	if list == nil {
		list = Reference()
	}
	t := &Table{Source: OriginalSource}
	ours := make(map[string]map[string]float64)
	for _, row := range Names {
		p, _, err := o.rowProfile(row)
		if err != nil {
			return nil, err
		}
		if t.Profile == nil {
			t.Profile = p
		}
		r, err := o.runRow(ctx, row, list)
		if err != nil {
			return nil, err
		}
		if ours[row], err = values(r); err != nil {
			return nil, err
		}
		m := r.Measure(bench.Options{GPUs: bench.GPUs{Prefill: 1, Decode: 1}})
		m.Model, m.Backend = p.Model.Name, "kvasir sim, "+row
		t.Results = append(t.Results, m)
		for _, figure := range figureOrder {
			r := Row{Row: row, Figure: figure, Original: Original(row, figure), Ours: ours[row][figure], Use: use(figure)}
			r.Error = r.Ours/r.Original - 1
			t.Rows = append(t.Rows, r)
		}
		mape, worst := MAPE(against(row, ours[row]))
		t.MAPE = append(t.MAPE, RowMAPE{row, mape, worst})
	}
	for _, figure := range figureOrder {
		if !tokenTotals(figure) {
			d := Row{Row: "difference", Figure: figure, Original: Original(P2pNccl, figure) - Original(Mooncake, figure), Ours: ours[P2pNccl][figure] - ours[Mooncake][figure], Use: use(figure)}
			d.Error = d.Ours/d.Original - 1
			t.Differences = append(t.Differences, d)
		}
	}
	if o.Seeds > 0 {
		if err := t.spread(ctx, &o); err != nil {
			return t, err
		}
	}
	if o.Sensitivity {
		moved, err := Sensitivity(ctx, NewRefit())
		t.Sensitivity = moved
		if err != nil {
			return t, err
		}
	}
	return t, nil
}

func use(figure string) string {
	switch {
	case tokenTotals(figure):
		return "given"
	case figure == "mean_ttft_ms" || figure == "mean_itl_ms":
		return "calibrated"
	}
	return "predicted"
}

// MAPE returns the mean of the absolute errors of rows, and the name of the figure with the largest.
func MAPE(rows []Row) (mean float64, worst string) {
	most := -1.0
	for _, r := range rows {
		e := math.Abs(r.Error)
		mean += e / float64(len(rows))
		if e > most {
			most, worst = e, r.Figure
		}
	}
	return mean, worst
}

// spread plays generated workloads, with and without the condition on the longest output. When ctx ends first, the spread is over the
// workloads that were played in both rows.
func (t *Table) spread(ctx context.Context, o *Options) error {
	t.Seeds = o.Seeds
	for _, condition := range []bool{true, false} {
		played, all := 0, make(map[[2]string][]float64) // all is by row and figure
		var err error
		for ; played < o.Seeds && err == nil; played++ {
			list := Generate(uint64(played)+1, condition)
			got := make(map[string]map[string]float64)
			for _, row := range Names {
				if got[row], err = o.playRow(ctx, row, list); err != nil {
					break
				}
			}
			if err != nil {
				break
			}
			for row, v := range got {
				for figure, x := range v {
					all[[2]string{row, figure}] = append(all[[2]string{row, figure}], x)
				}
			}
		}
		for _, row := range Names {
			for _, figure := range figureOrder {
				if played == 0 || tokenTotals(figure) {
					continue
				}
				v := all[[2]string{row, figure}]
				slices.Sort(v)
				s := Spread{Row: row, Figure: figure, Condition: condition, Seeds: played, Original: Original(row, figure)}
				s.P5, s.Median, s.P95 = cluster.Percentile(v, 5), cluster.Percentile(v, 50), cluster.Percentile(v, 95)
				s.Error = s.Median/s.Original - 1
				t.Spread = append(t.Spread, s)
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}
