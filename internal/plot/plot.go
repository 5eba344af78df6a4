// SPDX-License-Identifier: Apache-2.0

// Package plot draws lines into an SVG that needs no other file: round ticks, a logarithmic axis if the values multiply from step to
// step, a label at the end of each line, and light or dark colours by the reader's setting. Lines that coincide are drawn with
// alternating dashes, so that none hides another.
package plot

import (
	"cmp"
	"fmt"
	"html"
	"io"
	"math"
	"math/bits"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Line is the values of one quantity. X and Y must have the same length. Points with a value that is not a number are left out.
type Line struct {
	Name string
	X, Y []float64
}

// Panel is one pair of axes with its lines. Y begins at 0.
type Panel struct {
	Title, XLabel string
	Lines         []Line
	OverTime      bool // X is time: it begins at 0, its ticks are equally far apart, and points have no marks
}

// Sizes, in pixels.
const (
	wide, high  = 420.0, 260.0
	left        = 56.0
	top, bottom = 38.0, 52.0
	labelHeight = 15.0
	letter      = 7.0  // approximate width of a letter
	near        = 1.5  // lines that are at most so far apart coincide
	period      = 36.0 // in a stretch of this length, each of the coinciding lines is drawn once
	largest     = 1e18 // largest value that is drawn
	exact       = 1e15 // largest number up to which ticks are counted exactly
)

const style = `<style>
svg { background: #fff; color: #24292f; font: 12px sans-serif }
text { fill: currentColor }
.grid { stroke: #d8dee4 } .axis { stroke: #57606a; fill: none }
.line { fill: none; stroke-width: 2 } .mark { stroke-width: 1.5; fill: #fff }
.s0 { --c: #0969da } .s1 { --c: #cf222e } .s2 { --c: #1a7f37 } .s3 { --c: #8250df } .s4 { --c: #bc4c00 } .s5 { --c: #57606a } .s6 { --c: #9a6700 } .s7 { --c: #bf3989 }
.line, .mark { stroke: var(--c) } text.name { fill: var(--c) }
@media (prefers-color-scheme: dark) {
svg { background: #0d1117; color: #e6edf3 } .grid { stroke: #30363d } .axis { stroke: #8b949e } .mark { fill: #0d1117 }
.s0 { --c: #58a6ff } .s1 { --c: #ff7b72 } .s2 { --c: #56d364 } .s3 { --c: #bc8cff } .s4 { --c: #ffa657 } .s5 { --c: #8b949e } .s6 { --c: #d29922 } .s7 { --c: #f778ba }
}
</style>
`

// styles is the number of colours.
const styles = 8

// Write draws the panels side by side.
func Write(w io.Writer, panels ...Panel) error {
	var b strings.Builder
	x := 0.0
	for i := range panels {
		x += draw(&b, x, &panels[i])
	}
	_, err := fmt.Fprintf(w, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %.0f %.0f">`+"\n%s%s</svg>\n", max(x, 1), top+high+bottom, style, b.String())
	return err
}

// scale is an axis: its range and its ticks.
type scale struct {
	low, high float64
	log       bool
	ticks     []float64
}

func (s *scale) at(v float64) float64 {
	if s.log {
		return math.Log(v/s.low) / math.Log(s.high/s.low)
	}
	return (v - s.low) / (s.high - s.low)
}

func draw(b *strings.Builder, at float64, p *Panel) (width float64) {
	xs, most := valuesOf(p.Lines)
	x, y := xScale(xs), yScale(most)
	if p.OverTime && len(xs) > 0 {
		x = linear(0, max(xs[len(xs)-1], 1/largest))
	}
	x0 := at + left
	fmt.Fprintf(b, `<text x="%.0f" y="18" font-weight="bold">%s</text>`+"\n", x0, text(p.Title))
	for _, v := range y.ticks {
		py := top + high*(1-y.at(v))
		fmt.Fprintf(b, `<path class="grid" d="M%.1f %.1fh%.0f"/><text class="ytick" x="%.1f" y="%.1f" text-anchor="end">%s</text>`+"\n", x0, py, wide, x0-6, py+4, short(v))
	}
	for _, v := range x.ticks {
		px := x0 + wide*x.at(v)
		fmt.Fprintf(b, `<path class="axis" d="M%.1f %.1fv4"/><text class="xtick" x="%.1f" y="%.1f" text-anchor="middle">%s</text>`+"\n", px, top+high, px, top+high+18, short(v))
	}
	fmt.Fprintf(b, `<path class="axis" d="M%.1f %.1fv%.0fh%.0f"/><text x="%.1f" y="%.1f" text-anchor="middle">%s</text>`+"\n",
		x0, top, high, wide, x0+wide/2, top+high+38, text(p.XLabel))
	lines := make([][]Point, len(p.Lines))
	longest := 0
	for i, l := range p.Lines {
		longest = max(longest, len([]rune(l.Name)))
		for k := range min(len(l.X), len(l.Y)) {
			if usable(l.X[k], l.Y[k]) {
				lines[i] = append(lines[i], Point{x0 + wide*x.at(l.X[k]), top + high*(1-y.at(l.Y[k]))})
			}
		}
		slices.SortStableFunc(lines[i], func(a, b Point) int { return cmp.Compare(a.X, b.X) })
	}
	runs := Share(lines)
	for i := range lines {
		fmt.Fprintf(b, `<g class="s%d">`+"\n", i%styles)
		drawLine(b, lines, i, runs[i], !p.OverTime)
		b.WriteString("</g>\n")
	}
	for _, l := range labels(lines) {
		fmt.Fprintf(b, `<text class="name s%d" x="%.1f" y="%.1f">%s</text>`+"\n", l.line%styles, x0+wide+10, l.y+4, text(p.Lines[l.line].Name))
	}
	return left + wide + 24 + letter*float64(longest)
}

// text returns a text escaped for XML. It replaces characters that XML does not allow, such as control characters.
func text(s string) string {
	return html.EscapeString(strings.Map(func(r rune) rune {
		if r < ' ' && r != '\t' && r != '\n' && r != '\r' || r == 0xfffe || r == 0xffff {
			return utf8.RuneError
		}
		return r
	}, s))
}

// usable reports whether a point can be drawn: both values are numbers, and not too large to compute with.
func usable(x, y float64) bool { return math.Abs(x) <= largest && math.Abs(y) <= largest }

// valuesOf returns the distinct values of x, sorted, and the largest y.
func valuesOf(lines []Line) (xs []float64, most float64) {
	for _, l := range lines {
		for k := range min(len(l.X), len(l.Y)) {
			if usable(l.X[k], l.Y[k]) {
				xs, most = append(xs, l.X[k]), max(most, l.Y[k])
			}
		}
	}
	slices.Sort(xs)
	return slices.Compact(xs), most
}

// step returns the smallest step of 1, 2 or 5 times a power of ten that divides a span into at most 6 parts.
func step(span float64) float64 {
	unit := math.Pow(10, math.Floor(math.Log10(span/5)))
	for _, m := range []float64{1, 2, 5} {
		if span/(m*unit) <= 6 {
			return m * unit
		}
	}
	return 10 * unit
}

func yScale(most float64) (s scale) {
	if !(most > 1/largest) {
		most = 1
	}
	d := step(most)
	n := math.Ceil(most/d - 1e-9)
	for i := range int(n) + 1 {
		s.ticks = append(s.ticks, float64(i)*d)
	}
	s.high = n * d
	return s
}

// xScale returns an axis for sorted values; it is logarithmic if the values multiply from step to step.
func xScale(xs []float64) (s scale) {
	if len(xs) == 0 {
		xs = []float64{0}
	}
	s.low, s.high = xs[0], xs[len(xs)-1]
	if s.low == s.high {
		around := max(1, math.Abs(s.low)/2)
		return scale{low: s.low - around, high: s.high + around, ticks: xs}
	}
	s.log = s.low > 1/largest && len(xs) >= 3 && s.high/s.low >= 8
	switch {
	case s.log && !slices.ContainsFunc(xs, func(x float64) bool { return !powerOfTwo(x) }):
		factor := math.Exp2(math.Ceil(math.Log2(s.high/s.low) / 10))
		for v := s.low; v <= s.high; v *= factor {
			s.ticks = append(s.ticks, v)
		}
	case s.log:
		s.ticks = decades(s.low, s.high)
	default:
		return linear(s.low, s.high)
	}
	return s
}

// linear returns an axis with equally spaced ticks from low to high; high must be larger than low.
func linear(low, high float64) scale {
	s := scale{low: low, high: high}
	d := step(s.high - s.low)
	from, to := math.Ceil(s.low/d-1e-9)+0, math.Floor(s.high/d+1e-9) // + 0 turns -0 into 0
	if to < exact && from > -exact {
		for i := from; i <= to; i++ {
			s.ticks = append(s.ticks, i*d)
		}
	} else { // the values differ by less than numbers of that size can show
		s.ticks = []float64{s.low, s.high}
	}
	return s
}

func powerOfTwo(x float64) bool {
	return x >= 1 && x < 1<<62 && x == math.Trunc(x) && bits.OnesCount64(uint64(x)) == 1
}

// decades returns the values between low and high that are 1, 2 or 5 times a power of ten. If there are more than 4 powers of ten, it
// returns only these.
func decades(low, high float64) (ticks []float64) {
	mantissas := []float64{1, 2, 5}
	if math.Log10(high/low) > 4 {
		mantissas = mantissas[:1]
	}
	for unit := math.Pow(10, math.Floor(math.Log10(low))); unit <= high; unit *= 10 {
		for _, m := range mantissas {
			if v := m * unit; v >= low*(1-1e-9) && v <= high*(1+1e-9) {
				ticks = append(ticks, v)
			}
		}
	}
	return ticks
}

// short returns the text of a tick: 0.5, 20, 5k, 2M.
func short(v float64) string {
	for _, unit := range []struct {
		of   float64
		name string
	}{{1e9, "G"}, {1e6, "M"}, {1e4, "k"}} {
		if math.Abs(v) >= unit.of {
			if unit.name == "k" {
				unit.of = 1e3
			}
			return strconv.FormatFloat(v/unit.of, 'g', 6, 64) + unit.name
		}
	}
	return strconv.FormatFloat(v, 'g', 6, 64)
}

// drawLine draws the line i, run by run, and its marks.
func drawLine(b *strings.Builder, lines [][]Point, i int, runs []Run, marks bool) {
	for _, r := range runs {
		dash := ""
		if array, offset := r.Dashes(); array != "" {
			dash = ` stroke-dasharray="` + array + `" stroke-dashoffset="` + offset + `"`
		}
		fmt.Fprintf(b, `<path class="line" d="M%.1f %.1f`, lines[i][r.From].X, lines[i][r.From].Y)
		for _, p := range lines[i][r.From+1 : r.To+1] {
			fmt.Fprintf(b, "L%.1f %.1f", p.X, p.Y)
		}
		fmt.Fprintf(b, `"%s/>`, dash)
	}
	for _, at := range lines[i] {
		if !marks && len(lines[i]) > 1 { // a single point has no line
			continue
		}
		r := 2.5
		for j := i + 1; j < len(lines); j++ { // a larger radius, so that earlier marks can be seen around later ones
			if slices.ContainsFunc(lines[j], func(p Point) bool { return same(p, at) }) {
				r += 1.5
			}
		}
		fmt.Fprintf(b, `<circle class="mark" cx="%.1f" cy="%.1f" r="%.1f"/>`, at.X, at.Y, r)
	}
	b.WriteString("\n")
}

// label is the name of a line at its end.
type label struct {
	line int
	y    float64
}

// labels places the names of the lines beside their ends, so that no name covers another.
func labels(lines [][]Point) (out []label) {
	for i, l := range lines {
		if len(l) > 0 {
			out = append(out, label{i, l[len(l)-1].Y})
		}
	}
	slices.SortStableFunc(out, func(a, b label) int { return cmp.Compare(a.y, b.y) })
	for i := 1; i < len(out); i++ {
		out[i].y = max(out[i].y, out[i-1].y+labelHeight)
	}
	lowest := top + high
	for i := len(out) - 1; i >= 0; i-- {
		out[i].y = min(out[i].y, lowest)
		lowest = out[i].y - labelHeight
	}
	return out
}
