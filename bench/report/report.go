// SPDX-License-Identifier: Apache-2.0

// Package report writes benchmark results as one HTML page that needs nothing else: no script, no font, no request. It follows the
// reader's choice of light or dark, and can be read on a telephone as well as on a screen.
package report

import (
	_ "embed"
	"errors"
	"fmt"
	"html/template"
	"io"
	"math"
	"slices"
	"strings"
	"sync"

	"github.com/kvasir-kv/kvasir/bench"
)

// Run is one result with its name.
type Run struct {
	Name   string
	Result *bench.Result
}

//go:embed page.html
var source string

var page = sync.OnceValue(func() *template.Template { return template.Must(template.New("page").Parse(source)) })

type view struct {
	Title, Subtitle string
	Tiles           []tile
	Runs            []legend
	Header          []string
	Rows            []row
	Note            string
	Distributions   []*plot
	Timelines       []timeline
	Waterfalls      []waterfall
	Hits            []bar
	Pareto          *plot
	Detailed        bool
}

type tile struct{ Value, Unit, Name string }

type row struct {
	Name  string
	Cells []string
	Class string
}

type timeline struct {
	Name    string
	Note    string
	Plot    *plot
	Engines []*plot
}

type waterfall struct {
	Name  string
	Total string
	Parts []part
}

type part struct {
	Class, Name, Millis string
	Left, Width         string
}

type bar struct{ Name, Text, Width, Class string }

// Write writes the page. It leaves out what the results lack, such as requests or figures of engines.
func Write(w io.Writer, runs []Run) error {
	v, err := newView(runs)
	if err != nil {
		return err
	}
	return page().Execute(w, v)
}

func newView(runs []Run) (v view, err error) {
	if len(runs) == 0 {
		return v, errors.New("report: no result is given")
	}
	first := runs[0].Result
	v = view{Title: "Benchmark of " + first.Model, Subtitle: subtitle(runs)}
	if len(runs) == 1 {
		v.Tiles = tiles(first)
	}
	for i, r := range runs {
		v.Runs = append(v.Runs, legend{class("key", i), r.Name})
		v.Detailed = v.Detailed || len(r.Result.Samples()) > 0
	}
	v.figures(runs)
	v.distributions(runs)
	for i, r := range runs {
		v.timeline(i, r)
		if stages := r.Result.Stages; len(stages) > 0 {
			v.Waterfalls = append(v.Waterfalls, newWaterfall(r.Name, stages))
		}
		v.hits(i, r, len(runs) > 1)
	}
	v.Pareto = pareto(runs)
	return v, nil
}

func subtitle(runs []Run) string {
	if len(runs) > 1 {
		return fmt.Sprintf("%d runs", len(runs))
	}
	r := runs[0].Result
	text := fmt.Sprintf("%d requests", r.NumPrompts)
	switch {
	case r.RampUp != "":
		text += fmt.Sprintf(", %v to %v per second", r.RampUpStart, r.RampUpEnd)
	case math.IsInf(float64(r.Rate), 1):
		text += ", as fast as allowed"
	case r.Rate > 0:
		text += fmt.Sprintf(", %v per second", float64(r.Rate))
	}
	if r.MaxConcurrency != nil {
		text += fmt.Sprintf(", at most %d at a time", *r.MaxConcurrency)
	}
	if r.Date != "" {
		text += ", " + r.Date
	}
	if r.Interrupted {
		text += fmt.Sprintf("; interrupted: %d requests did not finish", r.Unfinished)
	}
	return text
}

func tiles(r *bench.Result) []tile {
	out := []tile{{fmt.Sprint(r.Completed), "", "requests succeeded"}}
	if r.Failed > 0 {
		out = append(out, tile{fmt.Sprint(r.Failed), "", "requests failed"})
	}
	out = append(out, tile{short(r.RequestThroughput), "req/s", "request throughput"}, tile{short(r.OutputThroughput), "tok/s", "output throughput"})
	if r.RequestGoodput != nil {
		out = append(out, tile{short(*r.RequestGoodput), "req/s", "goodput: " + limits(r.SLOs)})
	}
	for _, d := range []struct {
		name string
		d    *bench.Distribution
	}{{"TTFT", r.TTFT}, {"TPOT", r.TPOT}, {"ITL", r.ITL}} {
		if d.d != nil {
			out = append(out, tile{short(d.d.Median), "ms", "median " + d.name})
		}
	}
	if r.Interactivity > 0 {
		out = append(out, tile{short(r.Interactivity), "tok/s", "interactivity, per user"})
	}
	if rate, ok := r.HitRate(); ok {
		out = append(out, tile{short(100 * rate), "%", "of prompt tokens not computed"})
	}
	return out
}

func limits(slos []bench.SLO) string {
	var words []string
	for _, s := range slos {
		words = append(words, fmt.Sprintf("%s ≤ %v ms", strings.ToUpper(s.Metric), s.Millis))
	}
	return strings.Join(words, ", ")
}

// figures fills the table: one column per run, and for two runs their ratio.
func (v *view) figures(runs []Run) {
	v.Header = []string{""}
	for _, r := range runs {
		v.Header = append(v.Header, r.Name)
	}
	var ratios []bench.Ratio
	two := len(runs) == 2
	if two {
		ratios = bench.Compare(runs[0].Result, runs[1].Result)
		v.Header = append(v.Header, "ratio", "95 % interval", "")
		v.Note = "The ratio is of the second run to the first. Intervals are bootstrapped over requests; without saved requests there are none."
	}
	for _, q := range []struct {
		name string
		of   func(r *bench.Result) float64
	}{
		{"Successful requests", func(r *bench.Result) float64 { return float64(r.Completed) }},
		{"Failed requests", func(r *bench.Result) float64 { return float64(r.Failed) }},
		{"Duration (s)", func(r *bench.Result) float64 { return r.Duration }},
		{"Input tokens", func(r *bench.Result) float64 { return float64(r.TotalInput) }},
		{"Output tokens", func(r *bench.Result) float64 { return float64(r.TotalOutput) }},
	} {
		cells := make([]string, 0, len(runs)+3)
		for _, r := range runs {
			cells = append(cells, short(q.of(r.Result)))
		}
		if two {
			cells = append(cells, "", "", "")
		}
		v.Rows = append(v.Rows, row{Name: q.name, Cells: cells})
	}
	columns := [][]bench.Ratio{}
	for _, r := range runs {
		if two {
			columns = append(columns, ratios)
			break
		}
		columns = append(columns, bench.Compare(plain(r.Result), plain(r.Result)))
	}
	for i := range columns[0] {
		q := columns[0][i]
		cells := []string{}
		for _, c := range columns {
			value := "–"
			if at := slices.IndexFunc(c, func(x bench.Ratio) bool { return x.Figure == q.Figure }); at >= 0 {
				value = short(c[at].A)
			}
			cells = append(cells, value)
		}
		kind := ""
		if two {
			cells = append(cells, short(q.B), ratioText(q.Ratio), intervalText(&q), q.Verdict())
			kind = map[string]string{"b is better": "better", "b is worse": "worse"}[q.Verdict()]
		}
		v.Rows = append(v.Rows, row{q.Name, cells, kind})
	}
}

// plain returns a result without its requests: comparing it with itself lists its figures.
func plain(r *bench.Result) *bench.Result { return r.WithoutSamples() }

func ratioText(v float64) string {
	if v == 0 {
		return "–"
	}
	return fmt.Sprintf("%.3f", v)
}

func intervalText(r *bench.Ratio) string {
	if r.High == 0 {
		return ""
	}
	return fmt.Sprintf("%.3f to %.3f", r.Low, r.High)
}

// values returns a metric of the successful requests of a run, in ms; `of` returns its values for one request, in seconds.
func values(r *bench.Result, of func(s *bench.Sample) []float64) (out []float64) {
	samples := r.Samples()
	for i := range samples {
		if s := &samples[i]; !s.Failed() {
			for _, v := range of(s) {
				out = append(out, 1000*v)
			}
		}
	}
	return out
}

func (v *view) distributions(runs []Run) {
	for _, m := range []struct {
		title string
		of    func(s *bench.Sample) []float64
	}{
		{"Time to first token (TTFT)", func(s *bench.Sample) []float64 { return []float64{s.TTFT} }},
		{"Time per output token (TPOT)", func(s *bench.Sample) []float64 {
			if t, ok := s.TPOT(); ok {
				return []float64{t}
			}
			return nil
		}},
		{"Between tokens (ITL, all gaps)", func(s *bench.Sample) []float64 { return s.ITL }},
		{"End to end (E2EL)", func(s *bench.Sample) []float64 { return []float64{s.Latency} }},
	} {
		var populations [][]float64
		var names []string
		for _, r := range runs {
			populations = append(populations, values(r.Result, m.of))
			name := r.Name
			if len(runs) == 1 {
				name = ""
			}
			names = append(names, name)
		}
		if p := histogram(m.title, populations, names); p != nil {
			v.Distributions = append(v.Distributions, p)
		}
	}
}

func newWaterfall(name string, stages []bench.Stage) waterfall {
	total := 0.0
	for _, s := range stages {
		total += s.Millis
	}
	w := waterfall{Name: name, Total: short(total)}
	at := 0.0
	for i, s := range stages {
		share := 0.0
		if total > 0 {
			share = s.Millis / total
		}
		w.Parts = append(w.Parts, part{class("bar", i), s.Name, short(s.Millis), percent(at), percent(share)})
		at += share
	}
	return w
}

// hits draws, as bars, where the prompt tokens came from.
func (v *view) hits(i int, r Run, several bool) {
	name := func(text string) string {
		if several {
			return r.Name + ": " + text
		}
		return text
	}
	add := func(what string, share float64) {
		share = min(max(share, 0), 1)
		v.Hits = append(v.Hits, bar{name(what), short(100*share) + " %", percent(share), class("bar", i)})
	}
	if rate, ok := r.Result.HitRate(); ok {
		add("prompt tokens not computed, by the answers", rate)
	}
	for _, e := range r.Result.Engines {
		if e.Queries <= 0 {
			continue
		}
		of := "the engine"
		if e.Role != "" {
			of = e.Role
		}
		add("prefix cache of "+of, float64(e.Hits)/float64(e.Queries))
		if e.Loaded > 0 {
			add("loaded by "+of+" from elsewhere", float64(e.Loaded)/float64(e.Queries))
		}
	}
}
