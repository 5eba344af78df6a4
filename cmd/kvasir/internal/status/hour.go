// SPDX-License-Identifier: Apache-2.0

package status

import (
	"math"

	"github.com/kvasir-kv/kvasir/server/admin"
)

// maxHour bounds the points of an hour: a server that keeps more is cut.
const maxHour = 720

// hour has the points of a server's last hour: those from before the first request, which the server kept, and those since.
type hour struct {
	last       int       // number of the newest point
	asked, hit []float64 // tokens a second
	took       []float64 // seconds
	p50, p99   []float64 // seconds; NaN: no lookup
}

// add takes the points that are new; nil for none.
func (h *hour) add(p *admin.Points) {
	if p == nil {
		return
	}
	n := min(len(p.Asked), len(p.Hit), len(p.Took), len(p.P50), len(p.P99))
	fresh := min(n, p.Last-h.last)
	if fresh <= 0 {
		return
	}
	tail := func(to []float64, from admin.Column) []float64 {
		to = append(to, from[len(from)-fresh:]...)
		return to[max(0, len(to)-maxHour):]
	}
	h.last = p.Last
	h.asked, h.hit, h.took, h.p50, h.p99 = tail(h.asked, p.Asked), tail(h.hit, p.Hit), tail(h.took, p.Took), tail(h.p50, p.P50), tail(h.p99, p.P99)
}

// seconds returns how long the points are together.
func (h *hour) seconds() (all float64) {
	for _, s := range h.took {
		all += s
	}
	return all
}

// rates returns hit rates of the hour in at most most equal parts, NaN where nothing was asked for.
func (h *hour) rates(most int) []float64 {
	n := min(len(h.asked), max(most, 0))
	out := make([]float64, n)
	for i := range out {
		var asked, hit float64
		for k := i * len(h.asked) / n; k < (i+1)*len(h.asked)/n; k++ {
			asked += h.asked[k]
			hit += h.hit[k]
		}
		out[i] = math.NaN()
		if asked > 0 {
			out[i] = min(1, max(0, hit/asked))
		}
	}
	return out
}

// times returns the median and the 99th percentile of lookups in the newest point that has any, of the last five minutes.
func (h *hour) times() (p50, p99 float64, ok bool) {
	for i := len(h.p50) - 1; i >= max(0, len(h.p50)-60); i-- {
		if !math.IsNaN(h.p50[i]) && h.p50[i] > 0 {
			return h.p50[i], h.p99[i], true
		}
	}
	return 0, 0, false
}
