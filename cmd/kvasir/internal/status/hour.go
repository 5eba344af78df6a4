// SPDX-License-Identifier: Apache-2.0

package status

import (
	"math"

	"github.com/kvasir-kv/kvasir/server/admin"
)

// maxHour is how many points an hour keeps. Of a server that has more, the newest are kept.
const maxHour = 720

// hour holds the points of a server's last hour: those that the server had kept before the first request, and those since.
type hour struct {
	last       int       // number of the newest point
	asked, hit []float64 // tokens per second
	took       []float64 // how long each point is, in seconds
	p50, p99   []float64 // times of lookups in seconds; NaN: there was no lookup
}

// add appends those of the server's points p that are newer than the last one. p may be nil: then there are none.
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

// seconds returns how long all points are together.
func (h *hour) seconds() (all float64) {
	for _, s := range h.took {
		all += s
	}
	return all
}

// rates divides the hour into equal parts, at most `most` of them, and returns the hit rate of each; NaN for a part in which nothing was
// asked for.
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

// times returns the median and the 99th percentile of the times of lookups, in seconds, from the newest of the last 60 points (about
// five minutes) that has lookups. ok is false if none has.
func (h *hour) times() (p50, p99 float64, ok bool) {
	for i := len(h.p50) - 1; i >= max(0, len(h.p50)-60); i-- {
		if !math.IsNaN(h.p50[i]) && h.p50[i] > 0 {
			return h.p50[i], h.p99[i], true
		}
	}
	return 0, 0, false
}
