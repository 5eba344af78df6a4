// SPDX-License-Identifier: Apache-2.0

package plot

import (
	"encoding/xml"
	"io"
	"math"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func isRound(v float64) bool {
	if v == 0 || powerOfTwo(v) {
		return true
	}
	m := math.Abs(v) / math.Pow(10, math.Floor(math.Log10(math.Abs(v))+1e-9))
	return slices.ContainsFunc([]float64{1, 2, 5, 10}, func(r float64) bool { return math.Abs(m-r) < 1e-6 })
}

// Ticks are round: multiples of 1, 2 or 5 times a power of ten; on logarithmic axes these numbers themselves, or powers of two. They are few and inside the axis.
func TestTicksAreRound(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		xs := rapid.SliceOfN(rapid.Float64Range(0.001, 1e7), 1, 12).Draw(r, "x")
		slices.Sort(xs)
		xs = slices.Compact(xs)
		x, y := xScale(xs), yScale(rapid.Float64Range(0, 1e7).Draw(r, "most"))
		if !x.log && len(xs) > 1 && len(x.ticks) > 1 && !isRound(x.ticks[1]-x.ticks[0]) || !isRound(y.ticks[1]) {
			r.Fatalf("steps of ticks %v, %v", x.ticks, y.ticks)
		}
		for _, v := range x.ticks {
			if a := x.at(v); a < -1e-6 || a > 1+1e-6 || x.log && !isRound(v) {
				r.Fatalf("tick %v of %v to %v is at %v", v, x.low, x.high, a)
			}
		}
		if len(y.ticks) < 3 || len(y.ticks) > 8 || len(x.ticks) > 14 {
			r.Fatalf("%d and %d ticks", len(x.ticks), len(y.ticks))
		}
	})
	f := func(want []float64, xs ...float64) {
		t.Helper()
		if s := xScale(xs); !slices.Equal(s.ticks, want) {
			t.Errorf("of %v: %v, want %v", xs, s.ticks, want)
		}
	}
	f([]float64{1, 2, 4, 8, 16}, 1, 2, 4, 8, 16)
	f([]float64{1000, 2000, 5000, 10000, 20000}, 1000, 2000, 5000, 10000, 20000)
	f([]float64{1, 2, 5, 10}, 1, 3, 10.9)
	f([]float64{4, 6, 8, 10, 12}, 3, 5, 12.5)
	f([]float64{7}, 7)
	if got := yScale(80.66).ticks; !slices.Equal(got, []float64{0, 20, 40, 60, 80, 100}) {
		t.Error(got)
	}
}

// An axis of time has equal steps from 0, whatever the points are, and a line of many points has no mark at each.
func TestOverTime(t *testing.T) {
	l := Line{Name: "a"}
	for i := range 60 {
		l.X, l.Y = append(l.X, float64(i+1)/4), append(l.Y, float64(i))
	}
	var b strings.Builder
	if err := Write(&b, Panel{Lines: []Line{l}, OverTime: true}); err != nil {
		t.Fatal(err)
	}
	var ticks []string
	for _, part := range strings.Split(b.String(), `class="xtick"`)[1:] {
		text, _, _ := strings.Cut(part[strings.Index(part, ">")+1:], "<")
		ticks = append(ticks, text)
	}
	if want := []string{"0", "5", "10", "15"}; !slices.Equal(ticks, want) {
		t.Errorf("ticks %q, want %q", ticks, want)
	}
	if strings.Contains(b.String(), "<circle") {
		t.Error("there are marks")
	}
	b.Reset()
	if err := Write(&b, Panel{Lines: []Line{{Name: "one", X: []float64{0}, Y: []float64{3}}, {Name: "none"}}, OverTime: true}, Panel{OverTime: true}); err != nil || strings.Count(b.String(), "<circle") != 1 || strings.Contains(b.String(), "NaN") {
		t.Errorf("%v, a point alone: %s", err, b.String())
	}
}

// visible returns how many pixels of each line are not painted over by a later one, where lines have the given points: each line is walked in
// steps of a tenth of a pixel, with the phase of its dashes.
func visible(lines [][]Point, runs [][]Run) []float64 {
	type dot struct{ x, y int }
	top, out := map[dot]int{}, make([]float64, len(lines))
	for i, l := range lines {
		for _, r := range runs[i] {
			walked := 0.0
			for k := r.From + 1; k <= r.To; k++ {
				a, b := l[k-1], l[k]
				length := math.Hypot(b.X-a.X, b.Y-a.Y)
				for at := 0.05; at < length; at += 0.1 {
					phase := math.Mod(walked+at+r.Offset, r.Own+r.Gap)
					if phase < 0 {
						phase += r.Own + r.Gap
					}
					if r.Own == 0 || phase < r.Own {
						top[dot{int(math.Round(10 * (a.X + (b.X-a.X)*at/length))), int(math.Round(10 * (a.Y + (b.Y-a.Y)*at/length)))}] = i
					}
				}
				walked += length
			}
		}
	}
	for _, i := range top {
		out[i] += 0.1
	}
	return out
}

// Lines may coincide over all or a part of their length, and have segments shorter than a dash: each line is visible. Their names stand
// apart, inside the panel.
func TestNoLineIsHidden(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		n, steps := rapid.IntRange(1, 8).Draw(r, "lines"), rapid.SampledFrom([]int{1, 2, 7, 60}).Draw(r, "steps")
		lines := make([][]Point, n)
		ways, flat := [3][]float64{}, rapid.Bool().Draw(r, "flat")
		for w := range ways {
			for range steps + 1 {
				if y := float64(60 + 40*rapid.IntRange(0, 3).Draw(r, "y")); flat && len(ways[w]) > 0 {
					ways[w] = append(ways[w], ways[w][0])
				} else {
					ways[w] = append(ways[w], y)
				}
			}
		}
		for i := range lines {
			mine, other, from := rapid.IntRange(0, 2).Draw(r, "way"), rapid.IntRange(0, 2).Draw(r, "other"), rapid.IntRange(0, steps).Draw(r, "from")
			for k := range steps + 1 {
				y := ways[mine][k]
				if k >= from {
					y = ways[other][k]
				}
				lines[i] = append(lines[i], Point{float64(k) * wide / float64(steps), y})
			}
		}
		runs := Share(lines)
		for i, seen := range visible(lines, runs) {
			if seen < 15 {
				r.Fatalf("line %d of %d is seen on %.1f pixels: %v, %+v", i, n, seen, lines, runs)
			}
			at := 0
			for _, run := range runs[i] {
				if run.From != at || run.To <= at {
					r.Fatalf("line %d: runs %+v", i, runs[i])
				}
				at = run.To
			}
			if at != len(lines[i])-1 {
				r.Fatalf("line %d ends at %d of %d", i, at, len(lines[i]))
			}
		}
		names := labels(lines)
		for i, l := range names {
			if l.y < top-1 || l.y > top+high || i > 0 && l.y-names[i-1].y < labelHeight-1e-9 {
				r.Fatalf("names at %v", names)
			}
		}
	})
}

// Every drawing is XML, without NaN or an infinite number.
func TestWrite(t *testing.T) {
	f := func(panels ...Panel) {
		t.Helper()
		var b strings.Builder
		if err := Write(&b, panels...); err != nil || strings.Contains(b.String(), "NaN") || strings.Contains(b.String(), "Inf") {
			t.Errorf("%v: %s", err, b.String())
		}
		d := xml.NewDecoder(strings.NewReader(b.String()))
		for {
			if _, err := d.Token(); err == io.EOF {
				return
			} else if err != nil {
				t.Fatalf("%v: %s", err, b.String())
			}
		}
	}
	f()
	f(Panel{Title: `a<b>&"`})
	f(Panel{Title: "a\x00\x1b[31m\ufffe\uffff\xff", XLabel: "b\x01\r\n", Lines: []Line{{Name: "c\x7f\x02]]>", X: []float64{1}, Y: []float64{1}}}})
	for _, xs := range [][]float64{{1e17, 1e17 + 16}, {-1e17 - 16, -1e17}, {1e16, 1e16 + 2}, {1e17}, {-1e17}, {0, 1, 2, 4, 8}, {5e-324, 1, 2}, {5e-324, 1e-323}, {1e-300, 1, 1e300}, {1e308, 1.7e308}, {math.MaxFloat64, -math.MaxFloat64}, {1, math.Nextafter(1, 2)}} {
		for _, y := range []float64{0, 5e-324, 1e-30, 1, 1e18, 1e308, math.MaxFloat64, -1e308} {
			f(Panel{Title: "extreme", Lines: []Line{{Name: "a", X: xs, Y: slices.Repeat([]float64{y}, len(xs))}}})
		}
	}
	f(Panel{Title: "y", Lines: []Line{{Name: "<a>", X: []float64{1}, Y: []float64{1}}, {Name: "empty"}}})
	f(Panel{Lines: []Line{{Name: "a", X: []float64{math.NaN(), 1, 2, math.Inf(1)}, Y: []float64{1, math.NaN(), 3, 4}}}},
		Panel{Lines: []Line{{Name: "b", X: []float64{1, 2, 4, 8}, Y: []float64{0, 0, 0}}}})
}
