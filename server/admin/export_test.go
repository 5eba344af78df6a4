// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"reflect"
	"time"
)

// HistoryBytes are what the points of a History take.
var HistoryBytes = historyPoints * reflect.TypeFor[point]().Size()

// FillHistory gives a History points of seconds seconds, one every five, up to now, as a server has them whose load rises and falls. A clock that
// says the time since its start begins as long ago.
func (h *History) FillHistory(seconds int, asked, hit func(i int) uint64) {
	h.began = h.began.Add(-time.Duration(seconds) * time.Second)
	h.last.at = 0
	_, used, bounds := h.look(0)
	for i := range seconds / 5 {
		now := h.last
		now.at += historyEvery
		now.lookups += asked(i) / 1000
		now.asked += asked(i)
		now.hit += hit(i)
		now.stored += asked(i) * 1000
		now.retrieved += hit(i) * 1500
		now.below += hit(i) * 200
		now.times[2] += 90
		now.times[3] += uint64(5 + i%9)
		h.add(now, used, bounds)
	}
	h.last, _, _ = h.look(h.now())
}

// AddPoint adds a point that ended so long after the start.
func (h *History) AddPoint(at time.Duration) {
	now, used, bounds := h.look(at)
	h.add(now, used, bounds)
}

// WithLiveTimeout gives listeners of /live less time to take an event.
func (o *Options) WithLiveTimeout(d time.Duration) { o.liveTimeout = d }
