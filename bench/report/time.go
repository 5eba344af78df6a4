// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"fmt"
	"html/template"
	"math"
	"slices"
	"strings"

	"github.com/kvasir-kv/kvasir/bench"
)

// maxRows is the largest number of requests in a timeline; of more requests, only every n-th is drawn.
const maxRows = 300

// timeline draws each request as a row: its wait in the client, the time to its first token, and the time to its last token.
func (v *view) timeline(run int, r Run) {
	all := r.Result.Samples()
	var shown []bench.Sample
	first, last := math.Inf(1), 0.0
	for i := range all {
		if s := all[i]; s.Start < 1e15 && s.Latency < 1e15 && s.Queue < 1e15 {
			shown = append(shown, s)
			first = min(first, s.Start-max(s.Queue, 0))
		}
	}
	if len(shown) == 0 {
		return
	}
	slices.SortStableFunc(shown, func(a, b bench.Sample) int { return cmp.Compare(a.Start, b.Start) })
	note := ""
	if step := (len(shown) + maxRows - 1) / maxRows; step > 1 {
		n := len(shown)
		for i := range n / step {
			shown[i] = shown[i*step]
		}
		shown = shown[:n/step]
		note = fmt.Sprintf("Every %dth request is shown.", step)
	}
	for i := range shown {
		last = max(last, shown[i].Start-first+shown[i].Latency)
	}
	for _, e := range r.Result.Engines {
		for _, p := range e.Points {
			if p.At < 1e15 {
				last = max(last, p.At)
			}
		}
	}
	a, ticks := upTo(last)
	pl := &plot{Title: "Requests, in the order in which they were sent", Height: min(max(4*len(shown), 90), 420), X: ticks, XLabel: "s"}
	height := 1 / float64(len(shown))
	kinds := map[string]bool{}
	for i := range shown {
		s := &shown[i]
		at := s.Start - first
		title := fmt.Sprintf("sent at %s s, %d prompt tokens, ", short(at), s.Input)
		draw := func(kind string, from, to float64) {
			if to > from {
				kinds[kind] = true
				pl.Paths = append(pl.Paths, drawn{Class: kind, D: rect(a.at(from), float64(i)*height, max(a.at(to)-a.at(from), 0.0005), height*0.85), Title: title})
			}
		}
		if s.Failed() {
			title += "failed: " + s.Error
			draw("failed", at, at+max(s.Latency, last/200))
			continue
		}
		title += fmt.Sprintf("first token after %s ms, %d tokens in %s ms", short(1000*s.TTFT), s.Output, short(1000*s.Latency))
		draw("waits", at-max(s.Queue, 0), at)
		draw("prefill", at, at+min(s.TTFT, s.Latency))
		draw("decode", at+min(s.TTFT, s.Latency), at+s.Latency)
	}
	for _, k := range [][2]string{{"waits", "waits in the client"}, {"prefill", "to the first token (P, transfer, D's first step)"}, {"decode", "to the last token (D)"}, {"failed", "failed"}} {
		if kinds[k[0]] {
			pl.Legend = append(pl.Legend, legend{"key " + k[0], k[1]})
		}
	}
	t := timeline{Name: r.Name, Note: note, Plot: pl}
	for _, e := range r.Result.Engines {
		if p := engine(e, last); p != nil {
			t.Engines = append(t.Engines, p)
		}
	}
	v.Timelines = append(v.Timelines, t)
}

// engine draws the requests of an engine over time.
func engine(e bench.Engine, seconds float64) *plot {
	if len(e.Points) < 2 {
		return nil
	}
	running, waiting, usage := line{name: "running", class: 0}, line{name: "waiting", class: 1}, line{name: "KV memory in use, % of the height", class: 2, dashed: true}
	most := 1.0
	for _, p := range e.Points {
		running.x, running.y = append(running.x, p.At), append(running.y, float64(p.Running))
		waiting.x, waiting.y = append(waiting.x, p.At), append(waiting.y, float64(p.Waiting))
		most = max(most, float64(p.Running), float64(p.Waiting))
	}
	for _, p := range e.Points {
		usage.x, usage.y = append(usage.x, p.At), append(usage.y, most*min(max(p.Usage, 0), 1))
	}
	name := "The engine"
	if e.Role != "" {
		name = e.Role
	}
	return curves(name+": requests running and waiting", seconds, []line{running, waiting, usage})
}

// maxBuckets is the largest number of moments of a run in the plot of throughput against interactivity. The moments of a longer run are
// longer.
const maxBuckets = 80

// sameDot is how near two dots must be for one to cover the other, in shares of the plot.
const sameDot = 0.01

// pareto draws throughput against interactivity: a dot for each run, and small dots for the moments of each run.
func pareto(runs []Run) *plot {
	type dot struct {
		x, y  float64
		run   int
		small bool
		title string
	}
	var dots []dot
	gpu := true
	for _, r := range runs {
		gpu = gpu && r.Result.OutputPerGPU > 0
	}
	for i, r := range runs {
		whole, per := r.Result.OutputThroughput, 1.0
		if gpu && whole > 0 {
			per = r.Result.OutputPerGPU / whole
		}
		if x := interactivity(r.Result); x > 0 && whole > 0 {
			dots = append(dots, dot{x, whole * per, i, false, fmt.Sprintf("%s: %s tok/s at %s tok/s per user", r.Name, short(whole*per), short(x))})
		}
		for _, m := range moments(r.Result) {
			dots = append(dots, dot{m[0], m[1] * per, i, true, ""})
		}
	}
	dots = slices.DeleteFunc(dots, func(d dot) bool { return !(d.x < 1e15 && d.y < 1e15) })
	if len(dots) == 0 {
		return nil
	}
	right, top := 0.0, 0.0
	for _, d := range dots {
		right, top = max(right, d.x), max(top, d.y)
	}
	x, xTicks := upTo(right)
	y, yTicks := upTo(top)
	pl := &plot{Title: "Throughput against interactivity", Height: 260, X: xTicks, Y: yTicks, XLabel: "tok/s per user (1000 / TPOT)", Note: "output tok/s"}
	if gpu {
		pl.Note = "output tok/s and GPU"
	}
	slices.SortStableFunc(dots, func(a, b dot) int { return cmp.Compare(a.x, b.x) })
	var joined strings.Builder
	for i, d := range dots {
		kind, style := "dot", template.CSS("")
		if d.small {
			kind = "speck"
		} else {
			covered := 0 // dots that are drawn over this one
			for _, o := range dots[i+1:] {
				if !o.small && math.Abs(x.at(o.x)-x.at(d.x)) < sameDot && math.Abs(y.at(o.y)-y.at(d.y)) < sameDot {
					covered++
				}
			}
			if covered > 0 {
				style = template.CSS(fmt.Sprintf("stroke-width:%dpx", 11+5*covered))
			}
			joined.WriteString(map[bool]string{true: "M", false: "L"}[joined.Len() == 0] + point(x.at(d.x), y.at(d.y)))
		}
		pl.Paths = append(pl.Paths, drawn{class(kind, d.run), "M" + point(x.at(d.x), y.at(d.y)) + "h0.01", d.title, style})
	}
	if len(runs) > 1 && joined.Len() > 0 {
		pl.Paths = append([]drawn{{Class: "joined", D: joined.String()}}, pl.Paths...)
	}
	return pl
}

func interactivity(r *bench.Result) float64 {
	if r.TPOT == nil || !(r.TPOT.Mean > 0) {
		return 0
	}
	return 1000 / r.TPOT.Mean
}

// moments divides a run into equal periods. For each period with enough gaps it returns the tokens per second of one user and of all
// users.
func moments(r *bench.Result) (out [][2]float64) {
	samples := r.Samples()
	first, last := math.Inf(1), math.Inf(-1)
	for i := range samples {
		if s := &samples[i]; !s.Failed() {
			first, last = min(first, s.Start), max(last, s.Start+s.Latency)
		}
	}
	if !(last-first > 0) || !(last-first < 1e15) {
		return nil
	}
	n := min(maxBuckets, max(1, len(samples)/2))
	width := (last - first) / float64(n)
	tokens, gaps, counts := make([]float64, n), make([]float64, n), make([]float64, n)
	for i := range samples {
		s := &samples[i]
		if s.Failed() {
			continue
		}
		at := s.Start + s.TTFT - first
		for j := range len(s.ITL) + 1 {
			if j > 0 {
				at += s.ITL[j-1]
			}
			b := min(max(int(at/width), 0), n-1)
			tokens[b]++
			if j > 0 {
				gaps[b] += s.ITL[j-1]
				counts[b]++
			}
		}
	}
	for b := range n {
		if counts[b] >= 5 && gaps[b] > 0 {
			out = append(out, [2]float64{counts[b] / gaps[b], tokens[b] / width})
		}
	}
	return out
}
