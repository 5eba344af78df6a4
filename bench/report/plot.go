// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"html/template"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/kvasir-kv/kvasir/bench"
	svg "github.com/kvasir-kv/kvasir/internal/plot"
)

// plot is a drawing as wide as the place where it is shown. Its lines and areas are stretched with it; its texts stand beside them and
// keep their size.
type plot struct {
	Title, Note string
	Height      int // in CSS pixels
	X, Y        []tick
	XLabel      string
	Paths       []drawn
	Legend      []legend
}

// tick is a mark on an axis.
type tick struct {
	At   string // place on the axis, in percent
	Text string
}

// drawn is a shape, in thousandths of the plot from its upper left corner.
type drawn struct {
	Class string
	D     string
	Title string       // shown when the pointer rests on the shape
	Style template.CSS // dashes of a line that overlaps others, or the width of a dot that is covered by others
}

type legend struct{ Class, Text string }

// axis is the range of values on an axis.
type axis struct{ low, high float64 }

func (a axis) at(v float64) float64 {
	if !(a.high > a.low) {
		return 0
	}
	return min(max((v-a.low)/(a.high-a.low), 0), 1)
}

// upTo returns an axis from 0 to the first round number that is not below most, and the ticks of that axis.
func upTo(most float64) (axis, []tick) {
	if !(most > 0) || most > 1e15 {
		most = 1
	}
	step := math.Pow(10, math.Floor(math.Log10(most)))
	for _, part := range []float64{0.2, 0.5, 1, 2, 5} {
		if most/(step*part) <= 5 {
			step *= part
			break
		}
	}
	n := int(math.Ceil(most/step - 1e-9))
	a := axis{0, float64(n) * step}
	var ticks []tick
	for i := range n + 1 {
		v := float64(i) * step
		ticks = append(ticks, tick{percent(a.at(v)), short(v)})
	}
	return a, ticks
}

// percent returns a share in the form that a style needs.
func percent(share float64) string { return strconv.FormatFloat(100*share, 'f', 2, 64) + "%" }

// short returns a number with about three digits.
func short(v float64) string {
	switch a := math.Abs(v); {
	case a >= 1e6:
		return trim(v/1e6) + " M"
	case a >= 1e5:
		return trim(v/1e3) + " k"
	default:
		return trim(v)
	}
}

func trim(v float64) string {
	digits := 0
	if a := math.Abs(v); a > 0 && a < 100 {
		digits = 2 - int(math.Floor(math.Log10(a)))
	}
	text := strconv.FormatFloat(v, 'f', min(max(digits, 0), 6), 64)
	if strings.Contains(text, ".") {
		text = strings.TrimRight(strings.TrimRight(text, "0"), ".")
	}
	return text
}

// point returns a point of a path; y counts upwards.
func point(x, y float64) string { return fmt.Sprintf("%.1f %.1f", 1000*x, 1000-1000*y) }

// rect returns a path around a rectangle, in shares of the plot; y counts downwards.
func rect(x, y, w, h float64) string {
	return fmt.Sprintf("M%.2f %.2fh%.2fv%.2fh-%.2fz", 1000*x, 1000*y, 1000*w, 1000*h, 1000*w)
}

// bins is the number of bars of a histogram.
const bins = 48

// histogram draws the distribution of values, one population per run. The axis ends where 99.8 % of the values are covered; the rest is
// in the last bar.
func histogram(title string, populations [][]float64, names []string) *plot {
	most, any := 0.0, false
	sorted := make([][]float64, len(populations))
	for i, p := range populations {
		sorted[i] = slices.DeleteFunc(slices.Clone(p), func(v float64) bool { return !(v >= 0 && v < 1e15) })
		slices.Sort(sorted[i])
		if len(sorted[i]) > 0 {
			any = true
			most = max(most, bench.Quantile(sorted[i], 99.8))
		}
	}
	if !any {
		return nil
	}
	a, ticks := upTo(most)
	counts, highest := make([][]float64, len(sorted)), 0.0
	for i, p := range sorted {
		counts[i] = make([]float64, bins)
		for _, v := range p {
			counts[i][min(int(a.at(v)*bins), bins-1)]++
		}
		for j := range counts[i] {
			counts[i][j] *= 100 / float64(max(len(p), 1))
			highest = max(highest, counts[i][j])
		}
	}
	y, yTicks := upTo(highest)
	pl := &plot{Title: title, Height: 170, X: ticks, Y: yTicks, XLabel: "ms", Note: "% of values"}
	var outlines, medians []polyline
	for i := range counts {
		if len(sorted[i]) == 0 {
			continue
		}
		outline := polyline{class: class("line", i), title: names[i]}
		for j, c := range counts[i] {
			outline.at = append(outline.at, place{float64(j) / bins, y.at(c)}, place{float64(j+1) / bins, y.at(c)})
		}
		var d strings.Builder
		d.WriteString("M0 1000")
		for _, p := range outline.at {
			d.WriteString("L" + point(p.x, p.y))
		}
		d.WriteString("L1000 1000z")
		pl.Paths = append(pl.Paths, drawn{Class: class("area", i), D: d.String(), Title: names[i]})
		outlines = append(outlines, outline)
	}
	for i, p := range sorted {
		if len(p) == 0 {
			continue
		}
		median, tail := bench.Quantile(p, 50), bench.Quantile(p, 99)
		x := a.at(median)
		medians = append(medians, polyline{class("mark", i), "median " + short(median) + " ms", []place{{x, 0}, {x, 1}}})
		pl.Legend = append(pl.Legend, legend{class("key", i), strings.TrimSpace(names[i] + " median " + short(median) + ", P99 " + short(tail) + " ms")})
	}
	pl.strands(outlines)
	pl.strands(medians)
	return pl
}

// place is a point in a plot, in shares of the plot; y counts upwards.
type place struct{ x, y float64 }

// polyline is a line through points.
type polyline struct {
	class, title string
	at           []place
}

// usualWidth is the width of a plot for which dashes are computed, in CSS pixels.
const usualWidth = 450

// strands draws lines so that none hides another.
func (pl *plot) strands(lines []polyline) {
	points := make([][]svg.Point, len(lines))
	for i, l := range lines {
		for _, p := range l.at {
			points[i] = append(points[i], svg.Point{X: usualWidth * p.x, Y: float64(pl.Height) * (1 - p.y)})
		}
	}
	for i, runs := range svg.Share(points) {
		for _, r := range runs {
			path := drawn{Class: lines[i].class, Title: lines[i].title}
			for k := r.From; k <= r.To; k++ {
				path.D += map[bool]string{true: "M", false: "L"}[k == r.From] + point(lines[i].at[k].x, lines[i].at[k].y)
			}
			if array, offset := r.Dashes(); array != "" {
				path.Style = template.CSS("stroke-dasharray:" + array + ";stroke-dashoffset:" + offset)
			}
			pl.Paths = append(pl.Paths, path)
		}
	}
}

// runColours is the number of runs that have a colour of their own.
const runColours = 6

func class(kind string, run int) string { return fmt.Sprintf("%s c%d", kind, run%runColours) }

// line is a curve over time.
type line struct {
	name   string
	class  int
	dashed bool
	x, y   []float64
}

func curves(title string, seconds float64, all []line) *plot {
	most := 0.0
	for _, l := range all {
		for _, v := range l.y {
			if v < 1e15 {
				most = max(most, v)
			}
		}
	}
	a, ticks := upTo(seconds)
	y, yTicks := upTo(max(most, 1))
	pl := &plot{Title: title, Height: 110, X: ticks, Y: yTicks, XLabel: "s"}
	var drawn []polyline
	for _, l := range all {
		kind := "line"
		if l.dashed {
			kind = "dash"
		}
		s := polyline{class: class(kind, l.class), title: l.name}
		for i := range l.x {
			s.at = append(s.at, place{a.at(l.x[i]), y.at(l.y[i])})
		}
		if drawn = append(drawn, s); len(l.x) > 0 {
			pl.Legend = append(pl.Legend, legend{class("key "+kind, l.class), l.name})
		}
	}
	pl.strands(drawn)
	return pl
}
