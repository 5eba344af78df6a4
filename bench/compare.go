// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
)

// Ratio compares one figure of two results, A and B.
type Ratio struct {
	Figure string  `json:"figure"` // key of the figure in the JSON of a result
	Name   string  `json:"name"`   // name of the figure in words
	A      float64 `json:"a"`
	B      float64 `json:"b"`
	Ratio  float64 `json:"ratio"` // B ÷ A; 0 if A is 0

	// The 95 % interval of the ratio. Both are 0 unless both results have their requests.
	Low  float64 `json:"low,omitempty"`
	High float64 `json:"high,omitempty"`

	HigherIsBetter bool `json:"higher_is_better"`
}

// Verdict returns a word that says whether the interval shows B to be better or worse than A; "": there is no interval.
func (r *Ratio) Verdict() string {
	switch {
	case r.High == 0:
		return ""
	case r.Low <= 1 && r.High >= 1:
		return "no difference shown"
	case (r.Low > 1) == r.HigherIsBetter:
		return "b is better"
	}
	return "b is worse"
}

// resamples is how many times a bootstrap draws. maxDraws bounds the values looked at in all draws together: if there are very many
// values, fewer draws suffice.
const (
	resamples = 2000
	maxDraws  = 400 << 20
)

// Compare compares two results, figure by figure. Intervals are bootstrapped: requests are drawn with replacement from each run, with
// all their gaps, and the figure is computed from them; the interval leaves out 2.5 % of the ratios at each end. The same results
// always give the same intervals. A throughput is one value per run and has no interval.
func Compare(a, b *Result) []Ratio {
	var out []Ratio
	add := func(key, name string, x, y float64, higher bool) *Ratio {
		r := Ratio{Figure: key, Name: name, A: x, B: y, HigherIsBetter: higher}
		if x > 0 && y/x < math.MaxFloat64 {
			r.Ratio = y / x
		}
		out = append(out, r)
		return &out[len(out)-1]
	}
	add("request_throughput", "Request throughput (req/s)", a.RequestThroughput, b.RequestThroughput, true)
	if a.RequestGoodput != nil && b.RequestGoodput != nil {
		add("request_goodput", "Request goodput (req/s)", *a.RequestGoodput, *b.RequestGoodput, true)
	}
	add("output_throughput", "Output token throughput (tok/s)", a.OutputThroughput, b.OutputThroughput, true)
	add("total_token_throughput", "Total token throughput (tok/s)", a.TotalThroughput, b.TotalThroughput, true)
	of := b.distributions()
	for i, d := range a.distributions() {
		x, y := *d.at, *of[i].at
		if x == nil || y == nil {
			continue
		}
		from := len(out)
		points := []float64{-1, 50} // -1 means the mean; other values are percentiles
		add("mean_"+d.key+"_ms", "Mean "+d.short+" (ms)", x.Mean, y.Mean, false)
		add("median_"+d.key+"_ms", "Median "+d.short+" (ms)", x.Median, y.Median, false)
		for _, p := range x.Percentiles {
			if v, ok := y.At(p.P); ok && p.P != 50 {
				add("p"+word(p.P)+"_"+d.key+"_ms", "P"+word(p.P)+" "+d.short+" (ms)", p.Millis, v, false)
				points = append(points, p.P)
			}
		}
		interval(out[from:], newPopulation(a.samples, d.key), newPopulation(b.samples, d.key), points)
	}
	return out
}

// population holds the values of a metric, and the request to which each belongs.
type population struct {
	requests int
	values   []float64 // sorted
	owners   []int
}

func newPopulation(samples []Sample, key string) *population {
	p := &population{}
	for i := range samples {
		s := &samples[i]
		if s.Failed() {
			continue
		}
		values := []float64{s.Latency}
		switch key {
		case "ttft":
			values[0] = s.TTFT
		case "tpot":
			v, ok := s.TPOT()
			if values[0] = v; !ok {
				continue
			}
		case "itl":
			values = s.ITL
		case "client_queue_time":
			values[0] = s.Queue
		case "e2el_including_client_queue":
			values[0] += s.Queue
		}
		for _, v := range values {
			p.values, p.owners = append(p.values, v), append(p.owners, p.requests)
		}
		p.requests++
	}
	order := make([]int, len(p.values))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(p.values[a], p.values[b]) })
	values, owners := make([]float64, len(order)), make([]int, len(order))
	for i, from := range order {
		values[i], owners[i] = p.values[from], p.owners[from]
	}
	p.values, p.owners = values, owners
	return p
}

// draw draws requests of a population with replacement, and stores the percentiles `points` of their values in `into`. points must rise;
// a point below 0 means the mean. `times` is memory for how often each request was drawn. ok is false if no value was drawn; into is then
// as it was.
func (p *population) draw(rnd *rand.Rand, times []int, points, into []float64) (ok bool) {
	clear(times)
	for range p.requests {
		times[rnd.IntN(p.requests)]++
	}
	n, sum := 0, 0.0
	for i, v := range p.values {
		t := times[p.owners[i]]
		n += t
		sum += float64(t) * v
	}
	if n == 0 {
		return false
	}
	seen, next := 0, 0
	for i, v := range p.values {
		if t := times[p.owners[i]]; t > 0 {
			for seen += t; next < len(points) && (points[next] < 0 || points[next]/100*float64(n-1) < float64(seen)); next++ {
				if points[next] < 0 {
					into[next] = sum / float64(n)
				} else {
					into[next] = p.at(times, i, seen, points[next]/100*float64(n-1), v)
				}
			}
		}
	}
	return true
}

// at returns the value at a place, counted from 0, among the sorted values, each repeated as often as its request was drawn; between
// two places it interpolates. v is value i, the last one at or before the place. seen is the number of repeated values up to and
// including value i.
func (p *population) at(times []int, i, seen int, place, v float64) float64 {
	if low := int(place); low == seen-1 { // the next repeated value is another value
		for j := i + 1; j < len(p.values); j++ {
			if times[p.owners[j]] > 0 {
				return between(v, p.values[j], place-float64(low))
			}
		}
	}
	return v
}

// interval sets the intervals of ratios. ratios[i] belongs to points[i].
func interval(ratios []Ratio, a, b *population, points []float64) {
	if a.requests < 2 || b.requests < 2 || len(a.values) == 0 || len(b.values) == 0 {
		return
	}
	n := min(resamples, max(200, maxDraws/((len(a.values)+len(b.values))*(1+len(points)))))
	rnd := rand.New(rand.NewPCG(1, 2))
	order := make([]int, len(points))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(x, y int) int { return cmp.Compare(points[x], points[y]) })
	rising := make([]float64, len(points))
	for i, at := range order {
		rising[i] = points[at]
	}
	ta, tb := make([]int, a.requests), make([]int, b.requests)
	xa, xb := make([]float64, len(points)), make([]float64, len(points))
	drawn := make([][]float64, len(points))
	for range n {
		if !a.draw(rnd, ta, rising, xa) || !b.draw(rnd, tb, rising, xb) {
			continue
		}
		for i := range points {
			if q := xb[i] / xa[i]; xa[i] > 0 && q >= 0 && q < math.MaxFloat64 {
				drawn[i] = append(drawn[i], q)
			}
		}
	}
	for i, at := range order {
		if len(drawn[i]) < n/2 {
			continue // a figure of 0 has no ratio
		}
		slices.Sort(drawn[i])
		ratios[at].Low, ratios[at].High = Quantile(drawn[i], 2.5), Quantile(drawn[i], 97.5)
	}
}

// WriteRatios prints a comparison as a table.
func WriteRatios(w io.Writer, ratios []Ratio) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%-34s %12s %12s %8s  %-15s\n", "", "a", "b", "b/a", "95 % interval")
	intervals := false
	for i := range ratios {
		r := &ratios[i]
		ratio, within := "-", ""
		if r.Ratio > 0 {
			ratio = fmt.Sprintf("%.3f", r.Ratio)
		}
		if r.High > 0 {
			intervals = true
			within = fmt.Sprintf("%.3f to %.3f", r.Low, r.High)
		}
		b.WriteString(strings.TrimRight(fmt.Sprintf("%-34s %12.2f %12.2f %8s  %-15s  %s", r.Name, r.A, r.B, ratio, within, r.Verdict()), " ") + "\n")
	}
	if !intervals {
		b.WriteString("no intervals: they need the requests of both runs (--save-detailed)\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}
