// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"maps"
	"reflect"
	"time"
)

// HistoryBytes are what the points of a History take.
var HistoryBytes = historyPoints * reflect.TypeFor[point]().Size()

// HoursBytes are what the points of all tenants take.
var HoursBytes = (maxTenantHours + 1) * reflect.TypeFor[hour]().Size()

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

// FillTenants gives a History the points of tenants, one a minute up to now: in its minute i, a tenant asks for asked(i, salt) tokens and finds hit(i, salt) of
// them.
func (h *History) FillTenants(minutes int, salts []string, asked, hit func(i int, salt string) uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	last := maps.Clone(h.tenants.last)
	h.tenants.at = h.now() - time.Duration(minutes)*time.Minute
	for i := range minutes {
		now := maps.Clone(h.tenants.last)
		for _, salt := range salts {
			n := now[salt]
			n.asked += asked(i, salt)
			n.hit += hit(i, salt)
			now[salt] = n
		}
		h.tenants.add(h.tenants.at+time.Minute, now)
	}
	h.tenants.last = last
}

// AddHours takes the points of tenants that ended so long after the start, if they are due.
func (h *History) AddHours(at time.Duration) { h.addHours(at, totalsOf(h.server.ByModel())) }

// Hours are the hours of tenants as they are so long after the start.
func (h *History) Hours(now time.Duration) TenantHours {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.tenants.shown(now)
}

// AddPoint adds a point that ended so long after the start.
func (h *History) AddPoint(at time.Duration) {
	now, used, bounds := h.look(at)
	h.add(now, used, bounds)
}

// WithLiveTimeout gives listeners of /live less time to take an event.
func (o *Options) WithLiveTimeout(d time.Duration) { o.liveTimeout = d }
