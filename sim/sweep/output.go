// SPDX-License-Identifier: Apache-2.0

package sweep

import (
	"encoding/csv"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/kvasir-kv/kvasir/internal/plot"
)

// Print prints the points as a table.
func Print(w io.Writer, points []Point) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "engines\tcache\tGB/s\tbudget\treq/s\tTTFT mean\tP99\tTPOT mean\tP99 ms\tgoodput\tper GPU\ttok/s\tcached\tP busy\tD busy\tfailed")
	for i := range points {
		p := &points[i]
		fmt.Fprintf(t, "%s\t%d\t%g\t%d\t%s\t%.0f\t%.0f\t%.1f\t%.1f\t%.2f\t%.3f\t%.0f\t%.0f %%\t%.0f %%\t%.0f %%\t%d\n", p.Engines, p.Cache, p.Link, p.Budget, p.rate(),
			p.Figures.MeanTTFT, p.Figures.P99TTFT, p.Figures.MeanTPOT, p.Figures.P99TPOT, p.Goodput, p.GoodPerGPU, p.Throughput,
			100*p.Cached, 100*p.PrefillBusy, 100*p.DecodeBusy, p.Failed)
	}
	return t.Flush()
}

func (p *Point) rate() string {
	if p.Rate == 0 {
		return "as sent"
	}
	return strconv.FormatFloat(p.Rate, 'g', -1, 64)
}

// WriteCSV writes the points as CSV, with a first line of column names.
func WriteCSV(w io.Writer, points []Point) error {
	c := csv.NewWriter(w)
	rows := [][]string{{
		"prefill", "decode", "cache_blocks", "link_gbps", "max_num_batched_tokens", "request_rate", "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms",
		"mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms", "mean_itl_ms", "p99_itl_ms", "request_throughput", "output_throughput", "request_goodput", "goodput_per_gpu",
		"cached", "prefill_busy", "decode_busy", "completed", "failed",
	}}
	n := strconv.Itoa
	x := func(v float64) string { return strconv.FormatFloat(v, 'g', 8, 64) }
	for i := range points {
		p := &points[i]
		f := &p.Figures
		rows = append(rows, []string{
			n(p.Prefill), n(p.Decode), n(p.Cache), x(p.Link), n(p.Budget), x(p.Rate), x(f.MeanTTFT), x(f.MedianTTFT), x(f.P99TTFT),
			x(f.MeanTPOT), x(f.MedianTPOT), x(f.P99TPOT), x(f.MeanITL), x(f.P99ITL), x(f.RequestThroughput), x(f.OutputThroughput), x(p.Goodput), x(p.GoodPerGPU),
			x(p.Cached), x(p.PrefillBusy), x(p.DecodeBusy), n(f.Completed), n(f.Failed),
		})
	}
	return c.WriteAll(rows)
}

// series holds points that differ in one quantity only, which is drawn on the x axis.
type series struct {
	name   string
	points []*Point
}

// axis is a quantity that is varied.
type axis struct {
	name string
	of   func(*Point) float64
	text func(*Point) string
}

var axes = []axis{
	{"requests per second", func(p *Point) float64 { return p.Rate }, func(p *Point) string { return p.rate() + " req/s" }},
	{"cache, blocks", func(p *Point) float64 { return float64(p.Cache) }, func(p *Point) string { return fmt.Sprint("cache ", p.Cache) }},
	{"network, GB/s", func(p *Point) float64 { return p.Link }, func(p *Point) string { return fmt.Sprintf("%g GB/s", p.Link) }},
	{"tokens of a step", func(p *Point) float64 { return float64(p.Budget) }, func(p *Point) string { return fmt.Sprint("budget ", p.Budget) }},
	{"engines that prefill", func(p *Point) float64 { return float64(p.Prefill) }, func(p *Point) string { return p.Engines }},
}

// split returns the quantity with the most values as the axis, and the points as series along it.
func split(points []Point) (axis, []*series) {
	best, most, varies := 0, 0, make([]bool, len(axes))
	for i, a := range axes {
		values := make(map[string]bool)
		for k := range points {
			values[a.text(&points[k])] = true
		}
		varies[i] = len(values) > 1
		if len(values) > most {
			best, most = i, len(values)
		}
	}
	var list []*series
	byName := make(map[string]*series)
	for k := range points {
		var words []string
		for i, a := range axes {
			if i != best && varies[i] {
				words = append(words, a.text(&points[k]))
			}
		}
		name := strings.Join(words, ", ")
		if byName[name] == nil {
			byName[name] = &series{name: name}
			list = append(list, byName[name])
		}
		byName[name].points = append(byName[name].points, &points[k])
	}
	return axes[best], list
}

// WriteSVG draws mean TTFT, mean TPOT and goodput, by the quantity with the most values, with one line for each combination of the
// others.
func WriteSVG(w io.Writer, points []Point) error {
	x, list := split(points)
	panels := []struct {
		title string
		of    func(*Point) float64
	}{
		{"mean TTFT, ms", func(p *Point) float64 { return p.Figures.MeanTTFT }},
		{"mean TPOT, ms", func(p *Point) float64 { return p.Figures.MeanTPOT }},
		{"goodput, requests per second", func(p *Point) float64 { return p.Goodput }},
	}
	out := make([]plot.Panel, len(panels))
	for i, panel := range panels {
		out[i] = plot.Panel{Title: panel.title, XLabel: x.name}
		for _, s := range list {
			l := plot.Line{Name: s.name}
			for _, p := range s.points {
				l.X, l.Y = append(l.X, x.of(p)), append(l.Y, panel.of(p))
			}
			out[i].Lines = append(out[i].Lines, l)
		}
	}
	return plot.Write(w, out...)
}
