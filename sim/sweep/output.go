// SPDX-License-Identifier: Apache-2.0

package sweep

import (
	"encoding/csv"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"text/tabwriter"
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

// WriteCSV writes the points with a line of names.
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

// Sizes of the plot, pixels.
const (
	panelWidth, panelHeight = 360.0, 260.0
	margin                  = 56.0
	legendLine              = 18.0
)

var colours = []string{"#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22"}

// series are the points that differ in one quantity alone, which lies on the x axis.
type series struct {
	name   string
	points []*Point
}

// axis is a quantity that was swept.
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

// split makes series over the axis with the most values.
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

// WriteSVG draws mean TTFT, mean TPOT and goodput over the quantity with the most values, a
// line for each combination of the others.
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
	var b strings.Builder
	width, height := 3*(panelWidth+margin)+margin/2, panelHeight+2*margin+legendLine*float64(len(list))
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %.0f %.0f" font-family="sans-serif" font-size="12"><rect width="100%%" height="100%%" fill="white"/>`+"\n", width, height)
	for i, panel := range panels {
		left := margin + float64(i)*(panelWidth+margin)
		draw(&b, left, panel.title, x, list, panel.of)
	}
	for i, s := range list {
		y := panelHeight + 1.7*margin + legendLine*float64(i)
		fmt.Fprintf(&b, `<rect x="%.0f" y="%.0f" width="14" height="4" fill="%s"/><text x="%.0f" y="%.0f">%s</text>`+"\n", margin, y, colours[i%len(colours)], margin+20, y+6, s.name)
	}
	b.WriteString("</svg>\n")
	_, err := io.WriteString(w, b.String())
	return err
}

func draw(b *strings.Builder, left float64, title string, x axis, list []*series, y func(*Point) float64) {
	lowX, highX, highY := math.Inf(1), math.Inf(-1), 0.0
	for _, s := range list {
		for _, p := range s.points {
			lowX, highX, highY = min(lowX, x.of(p)), max(highX, x.of(p)), max(highY, y(p))
		}
	}
	if !(highX > lowX) {
		lowX, highX = lowX-1, lowX+1
	}
	if !(highY > 0) {
		highY = 1
	}
	top := margin * 0.7
	atX := func(v float64) float64 { return left + (v-lowX)/(highX-lowX)*panelWidth }
	atY := func(v float64) float64 { return top + panelHeight*(1-v/highY) }
	fmt.Fprintf(b, `<text x="%.0f" y="%.0f" font-weight="bold">%s</text><path d="M%.1f %.1fV%.1fH%.1f" fill="none" stroke="black"/>`+"\n", left, top-10, title, left, top, top+panelHeight, left+panelWidth)
	for i := range 5 {
		v := highY * float64(i) / 4
		fmt.Fprintf(b, `<path d="M%.1f %.1fh%.0f" stroke="#ddd"/><text x="%.1f" y="%.1f" text-anchor="end">%.4g</text>`+"\n", left, atY(v), panelWidth, left-4, atY(v)+4, v)
		h := lowX + (highX-lowX)*float64(i)/4
		fmt.Fprintf(b, `<text x="%.1f" y="%.1f" text-anchor="middle">%.4g</text>`+"\n", atX(h), top+panelHeight+16, h)
	}
	fmt.Fprintf(b, `<text x="%.1f" y="%.1f" text-anchor="middle">%s</text>`+"\n", left+panelWidth/2, top+panelHeight+32, x.name)
	for i, s := range list {
		colour := colours[i%len(colours)]
		var line strings.Builder
		for _, p := range s.points {
			fmt.Fprintf(&line, "%.1f,%.1f ", atX(x.of(p)), atY(y(p)))
			fmt.Fprintf(b, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`, atX(x.of(p)), atY(y(p)), colour)
		}
		fmt.Fprintf(b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="2"/>`+"\n", strings.TrimSpace(line.String()), colour)
	}
}
