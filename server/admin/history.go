// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"context"
	"encoding/json"
	"math"
	"strconv"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/internal/histogram"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
)

// The history has historyPoints points, one every historyEvery: an hour.
const (
	historyEvery  = 5 * time.Second
	historyPoints = 720
	recentPoints  = 2 // points in each event of a stream after the first event, which has all points
)

// History is the last hour of a server, so that the page and kvasir top can show it at once. Its points take 68 KiB from the start, and
// never more. The hours of tenants take up to 61 KiB more. While pages are open, the JSON of both takes 90 KiB and 60 KiB. All its times
// are monotonic and count from its start, so setting the wall clock changes nothing. Methods are safe for concurrent use.
type History struct {
	server *server.Server
	began  time.Time

	mu   sync.Mutex
	last totals
	n    int // number of points since the start
	ring [historyPoints]point

	encoded  []byte // all points as JSON, once a client asked for them
	encodedN int    // n when encoded was made

	tenants        tenantHours
	encodedTenants []byte // the hours of tenants as JSON, once a client asked for them
	encodedHoursN  int
}

// totals has counters since the start of the server.
type totals struct {
	at                                time.Duration
	lookups, asked, hit               uint64 // asked and hit count tokens
	stored, retrieved, below, evicted uint64 // bytes
	times                             [maxTimes]uint64
}

// maxTimes bounds the buckets of the histogram of lookup times.
const maxTimes = 16

// point is what happened in one interval.
type point struct {
	at, took                          time.Duration // its end, and its length
	lookups, asked, hit               uint64
	stored, retrieved, below, evicted uint64
	used                              float64 // used share of the pool at its end
	p50, p99                          float64 // quantiles of the seconds that lookups took; 0: there was none
}

// NewHistory returns the history of a server, beginning now. Run fills it.
func NewHistory(s *server.Server) *History {
	h := &History{server: s, began: time.Now()}
	h.last, _, _ = h.look(0)
	h.tenants.last = totalsOf(s.ByModel())
	return h
}

// Run adds a point every five seconds, until ctx ends.
func (h *History) Run(ctx context.Context) {
	tick := time.NewTicker(historyEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			h.takeDue()
		}
	}
}

// now returns the time since the start of the history.
func (h *History) now() time.Duration { return time.Since(h.began) }

// takeDue adds a point, unless the last one is younger than nine tenths of an interval: a tick may come early.
func (h *History) takeDue() {
	at := h.now()
	h.mu.Lock()
	due, hours := at-h.last.at >= historyEvery*9/10, h.tenants.due(at)
	h.mu.Unlock()
	if due {
		now, used, bounds := h.look(at)
		h.add(now, used, bounds)
	}
	if hours {
		h.addHours(at, totalsOf(h.server.ByModel()))
	}
}

// addHours adds the tenants' point between the last counters and the counters `now`.
func (h *History) addHours(at time.Duration, now map[string]tokens) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.tenants.due(at) { // else another goroutine has added a newer point
		h.tenants.add(at, now)
	}
}

// look returns the server's counters, the used share of its pool, and the histogram of its lookup times.
func (h *History) look(at time.Duration) (now totals, used float64, times histogram.Counts) {
	st := h.server.Stats()
	now = totals{at: at, stored: st.StoredBytes, retrieved: st.RetrievedBytes, below: st.BelowBytes, evicted: st.EvictedBytes}
	now.lookups, now.asked, now.hit = h.server.LookedUp()
	times = st.Durations[lmcache.OpLookup.String()]
	copy(now.times[:], times.Buckets)
	return now, st.UsageRatio, times
}

// add adds the point between the last counters and the counters `now`.
func (h *History) add(now totals, used float64, times histogram.Counts) {
	h.mu.Lock()
	defer h.mu.Unlock()
	was := h.last
	if now.at <= was.at {
		return // another goroutine has added a newer point
	}
	var buckets [maxTimes]uint64
	for i := range buckets {
		buckets[i] = now.times[i] - min(was.times[i], now.times[i])
	}
	grown := func(now, was uint64) uint64 { return now - min(now, was) }
	asked := grown(now.asked, was.asked)
	h.ring[h.n%historyPoints] = point{
		at: now.at, took: now.at - was.at, lookups: grown(now.lookups, was.lookups), asked: asked, hit: min(grown(now.hit, was.hit), asked),
		stored: grown(now.stored, was.stored), retrieved: grown(now.retrieved, was.retrieved), below: grown(now.below, was.below), evicted: grown(now.evicted, was.evicted),
		used: used, p50: quantile(buckets[:], times.Bounds, 0.5), p99: quantile(buckets[:], times.Bounds, 0.99),
	}
	h.last = now
	h.n++
}

// quantile returns the q quantile of a histogram of times, in seconds, as Prometheus computes it: within a bucket, times are assumed to be
// evenly spread, and a time above the last bound counts as that bound. It returns 0 if nothing was counted.
func quantile(buckets []uint64, bounds []int64, q float64) float64 {
	total := uint64(0)
	for _, n := range buckets {
		total += n
	}
	if total == 0 || len(bounds) == 0 {
		return 0
	}
	rank, below, from := q*float64(total), 0.0, 0.0
	for i, bound := range bounds {
		n := 0.0
		if i < len(buckets) {
			n = float64(buckets[i])
		}
		if below+n >= rank {
			return (from + (float64(bound)-from)*(rank-below)/n) / 1e9
		}
		below, from = below+n, float64(bound)
	}
	return from / 1e9
}

// Points are points of a History, in columns. Every column has one value for each point; an unknown value is NaN, null in JSON.
type Points struct {
	Last int `json:"last"` // number of the newest point, from 1; 0: there is none yet

	At        Column `json:"at_s"`   // end of the point, on the clock of the event's now_s
	Took      Column `json:"took_s"` // length of the point
	HitRate   Column `json:"hit_rate"`
	Asked     Column `json:"asked_tokens"` // per second, as the columns after it
	Hit       Column `json:"hit_tokens"`
	Lookups   Column `json:"lookups"`
	Stored    Column `json:"stored_bytes"`
	Retrieved Column `json:"retrieved_bytes"`
	Below     Column `json:"below_bytes"` // loaded from the tiers below the pool
	Evicted   Column `json:"evicted_bytes"`
	Used      Column `json:"used"`         // used share of the pool
	P50       Column `json:"lookup_p50_s"` // of lookups
	P99       Column `json:"lookup_p99_s"`
}

// Column is a list of numbers. In JSON each has four digits.
type Column []float64

// MarshalJSON implements json.Marshaler.
func (c Column) MarshalJSON() ([]byte, error) {
	b := append(make([]byte, 0, 2+6*len(c)), '[')
	for i, v := range c {
		if i > 0 {
			b = append(b, ',')
		}
		switch {
		case math.IsNaN(v) || math.IsInf(v, 0):
			b = append(b, "null"...)
		case v >= 1000:
			b = strconv.AppendFloat(b, v, 'f', 0, 64)
		default:
			b = strconv.AppendFloat(b, v, 'g', 4, 64)
		}
	}
	return append(b, ']'), nil
}

// UnmarshalJSON implements json.Unmarshaler.
func (c *Column) UnmarshalJSON(text []byte) error {
	var list []*float64
	if err := json.Unmarshal(text, &list); err != nil {
		return err
	}
	*c = make(Column, len(list))
	for i, v := range list {
		if (*c)[i] = math.NaN(); v != nil {
			(*c)[i] = *v
		}
	}
	return nil
}

// points returns the newest `most` points, the oldest of them first.
func (h *History) points(most int) Points {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.pointsLocked(most)
}

func (h *History) pointsLocked(most int) Points {
	out := Points{Last: h.n}
	share := func(part, of uint64) float64 {
		if of == 0 {
			return math.NaN()
		}
		return float64(part) / float64(of)
	}
	for i := h.n - min(h.n, historyPoints, most); i < h.n; i++ {
		p := &h.ring[i%historyPoints]
		each := func(n uint64) float64 { return float64(n) / p.took.Seconds() }
		for _, c := range []struct {
			of *Column
			v  float64
		}{
			{&out.At, math.Round(p.at.Seconds()*10) / 10},
			{&out.Took, math.Round(p.took.Seconds()*10) / 10},
			{&out.HitRate, share(p.hit, p.asked)},
			{&out.Asked, each(p.asked)},
			{&out.Hit, each(p.hit)},
			{&out.Lookups, each(p.lookups)},
			{&out.Stored, each(p.stored)},
			{&out.Retrieved, each(p.retrieved)},
			{&out.Below, each(p.below)},
			{&out.Evicted, each(p.evicted)},
			{&out.Used, p.used},
			{&out.P50, notZero(p.p50)},
			{&out.P99, notZero(p.p99)},
		} {
			*c.of = append(*c.of, c.v)
		}
	}
	return out
}

func notZero(v float64) float64 {
	if v == 0 {
		return math.NaN()
	}
	return v
}

// json returns all points as JSON. The caller must not change the result.
func (h *History) json() []byte {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.encoded == nil || h.encodedN != h.n {
		h.encoded, h.encodedN = mustJSON(h.pointsLocked(historyPoints)), h.n
	}
	return h.encoded
}

// tenantsJSON returns the hours of tenants as JSON, and the number of their newest point. The caller must not change the result.
func (h *History) tenantsJSON() (hours []byte, number int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.encodedTenants == nil || h.encodedHoursN != h.tenants.n {
		h.encodedTenants, h.encodedHoursN = mustJSON(h.tenants.shown(h.now())), h.tenants.n
	}
	return h.encodedTenants, h.tenants.n
}

// forget frees the JSON that json and tenantsJSON keep.
func (h *History) forget() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.encoded, h.encodedTenants = nil, nil
}
