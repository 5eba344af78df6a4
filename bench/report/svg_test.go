// SPDX-License-Identifier: Apache-2.0

package report_test

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"io"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/bench"
	"github.com/kvasir-kv/kvasir/bench/report"
)

// shape is a path of a plot.
type shape struct{ class, d, style string }

// drawing is a plot as it is drawn: its ticks with their places, pixels, and its shapes.
type drawing struct {
	title      string
	wide, high float64
	x, y       [][2]float64 // value and place
	shapes     []shape
}

// parseSVG reads the plots of a picture.
func parseSVG(t *testing.T, text string) (out []drawing) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(text))
	var into string
	var place float64
	depth := 0
	for {
		token, err := d.Token()
		if err == io.EOF {
			return out
		}
		if err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
		switch e := token.(type) {
		case xml.StartElement:
			at := map[string]string{}
			for _, a := range e.Attr {
				at[a.Name.Local] = a.Value
			}
			number := func(name string) float64 { v, _ := strconv.ParseFloat(at[name], 64); return v }
			switch {
			case e.Name.Local == "svg":
				if depth++; depth == 2 {
					out[len(out)-1].wide, out[len(out)-1].high = number("width"), number("height")
				}
			case e.Name.Local == "g":
				out = append(out, drawing{})
			case e.Name.Local == "path":
				last := &out[len(out)-1]
				last.shapes = append(last.shapes, shape{at["class"], at["d"], at["style"]})
			case e.Name.Local == "text":
				into, place = at["class"], number("x")
				if into == "ytick" {
					place = number("y")
				}
			default:
				into = ""
			}
		case xml.EndElement:
			if e.Name.Local == "svg" {
				depth--
			}
			into = ""
		case xml.CharData:
			last := len(out) - 1
			switch into {
			case "title":
				out[last].title = string(e)
			case "xtick":
				out[last].x = append(out[last].x, [2]float64{value(t, string(e)), place})
			case "ytick":
				out[last].y = append(out[last].y, [2]float64{value(t, string(e)), place})
			}
		}
	}
}

// value reads a tick.
func value(t *testing.T, s string) float64 {
	t.Helper()
	unit := 1.0
	for suffix, of := range map[string]float64{" M": 1e6, " k": 1e3} {
		if text, ok := strings.CutSuffix(s, suffix); ok {
			s, unit = text, of
		}
	}
	v, err := strconv.ParseFloat(s, 64)
	if err != nil {
		t.Fatal(err)
	}
	return v * unit
}

// checkTicks fails unless an axis begins at 0 and has equal steps of 1, 2 or 5 times a power of ten, in its values and in its pixels.
func checkTicks(t *testing.T, name string, ticks [][2]float64) {
	t.Helper()
	if len(ticks) < 2 || len(ticks) > 7 || ticks[0][0] != 0 {
		t.Errorf("%s: ticks %v", name, ticks)
		return
	}
	step, apart := ticks[1][0], ticks[1][1]-ticks[0][1]
	m := step / math.Pow(10, math.Floor(math.Log10(step)+1e-9))
	if !slices.ContainsFunc([]float64{1, 2, 5}, func(r float64) bool { return math.Abs(m-r) < 1e-6 }) {
		t.Errorf("%s: steps of %v", name, step)
	}
	for i, k := range ticks {
		if math.Abs(k[0]-float64(i)*step) > 1e-6*step || math.Abs(k[1]-ticks[0][1]-float64(i)*apart) > 0.3 {
			t.Errorf("%s: tick %d is %v", name, i, k)
		}
	}
}

var (
	numbers = regexp.MustCompile(`-?[0-9.]+`)
	dashes  = regexp.MustCompile(`stroke-dasharray:([0-9.]+) ([0-9.]+);stroke-dashoffset:(-?[0-9.]+)`)
	inClass = regexp.MustCompile(`^(line|dash|mark) c[0-9]$`)
)

// checkSeen fails unless about 10 pixels of each line stay visible under later lines. Paths of one class and colour are one line. It walks the
// paths in steps of a tenth of a pixel.
func checkSeen(t *testing.T, p *drawing) {
	t.Helper()
	type dot struct{ x, y int }
	top, seen := map[dot]string{}, map[string]float64{}
	for _, s := range p.shapes {
		if !inClass.MatchString(s.class) {
			continue
		}
		seen[s.class] += 0
		own, gap, offset := 1.0, 0.0, 0.0
		switch m := dashes.FindStringSubmatch(s.style); {
		case m != nil:
			own, _ = strconv.ParseFloat(m[1], 64)
			gap, _ = strconv.ParseFloat(m[2], 64)
			offset, _ = strconv.ParseFloat(m[3], 64)
		case strings.HasPrefix(s.class, "mark"):
			own, gap = 4, 3
		case strings.HasPrefix(s.class, "dash"):
			own, gap = 2, 3
		}
		var at []float64
		for _, n := range numbers.FindAllString(s.d, -1) {
			v, _ := strconv.ParseFloat(n, 64)
			at = append(at, v)
		}
		walked := 0.0
		for i := 2; i+1 < len(at); i += 2 {
			x, y := at[i-2]*p.wide/1000, at[i-1]*p.high/1000
			dx, dy := at[i]*p.wide/1000-x, at[i+1]*p.high/1000-y
			length := math.Hypot(dx, dy)
			for l := 0.05; l < length; l += 0.1 {
				if phase := math.Mod(walked+l+offset+1000*(own+gap), own+gap); phase < own {
					top[dot{int(math.Round(10 * (x + dx*l/length))), int(math.Round(10 * (y + dy*l/length)))}] = s.class
				}
			}
			walked += length
		}
	}
	for _, class := range top {
		seen[class] += 0.1
	}
	for class, n := range seen {
		if n < 10 {
			t.Errorf("%s: of the line %q %.1f pixels are seen", p.title, class, n)
		}
	}
}

// In the plots of a report ticks are round and no line hides another: of one run, of equal runs, of different ones, and of engines whose
// curves coincide.
func TestTicksAreRoundAndNoLineIsHidden(t *testing.T) {
	flat := result(60, 1)
	for i := range flat.Engines[0].Points {
		flat.Engines[0].Points[i] = bench.Point{At: float64(i), Running: 4, Waiting: 4, Usage: 1}
	}
	long := result(40, 4)
	long.Engines[0].Points = nil
	for i := range 600 {
		long.Engines[0].Points = append(long.Engines[0].Points, bench.Point{At: float64(i), Running: 3, Waiting: 3, Usage: float64(i%2) / 2})
	}
	f := func(plots int, results ...*bench.Result) {
		t.Helper()
		var runs []report.Run
		for i, r := range results {
			runs = append(runs, report.Run{Name: fmt.Sprintf("run <%d>", i), Result: r})
		}
		var b bytes.Buffer
		if err := report.WriteSVG(&b, runs); err != nil {
			t.Fatal(err)
		}
		got := parseSVG(t, b.String())
		if len(got) != plots {
			t.Errorf("%d plots, want %d", len(got), plots)
		}
		for i := range got {
			checkTicks(t, got[i].title+", x", got[i].x)
			if strings.Contains(got[i].title, "in the order in which") {
				continue // rows have no values
			}
			checkTicks(t, got[i].title+", y", got[i].y)
			checkSeen(t, &got[i])
		}
	}
	f(7, result(60, 1))
	f(7, flat)
	f(7, long)
	f(9, result(60, 1), result(60, 1))
	f(11, result(60, 1), result(60, 1), result(60, 1))
	f(9, flat, long)
	for _, scale := range []float64{1e-3, 0.07, 3, 9.9, 1234} {
		r := result(30, 5)
		samples := r.Samples()
		for i := range samples {
			s := &samples[i]
			s.Start, s.TTFT, s.Latency = s.Start*scale, s.TTFT*scale, s.Latency*scale
			for k := range s.ITL {
				s.ITL[k] *= scale
			}
		}
		r.Engines = nil
		f(6, r)
	}
	if err := report.WriteSVG(io.Discard, []report.Run{{Name: "none", Result: bench.Measure(nil, 0, bench.Options{})}}); err == nil || !strings.Contains(err.Error(), "--save-detailed") {
		t.Error(err)
	}
}
