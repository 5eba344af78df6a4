// SPDX-License-Identifier: Apache-2.0

// Package histogram counts amounts (times, bytes, items) by size, without locks and allocations.
package histogram

import (
	"math"
	"sync/atomic"
	"time"
)

// times are the upper bounds for durations, in ns.
var times = []int64{
	10e3, 30e3, 100e3, 300e3, 1e6, 3e6, 10e6, 30e6, 100e6, 300e6, 1e9, 3e9, 10e9,
}

// Histogram counts amounts. Its methods are safe for concurrent use.
type Histogram struct {
	bounds []int64
	unit   float64
	counts []atomic.Uint64 // one more than bounds: the last one is for larger amounts
	sum    atomic.Int64
}

// New returns an empty Histogram whose buckets have these upper bounds; bounds must rise. unit converts an amount into the unit of the
// metric: 1e-9 if amounts are in ns and the metric is in seconds.
func New(unit float64, bounds ...int64) *Histogram {
	return &Histogram{bounds: bounds, unit: unit, counts: make([]atomic.Uint64, len(bounds)+1)}
}

// Times returns a Histogram of durations from 10 µs to 10 s, in seconds.
func Times() *Histogram { return New(1e-9, times...) }

// rates are the upper bounds for speeds, in kB/s.
var rates = []int64{1e4, 3e4, 1e5, 3e5, 1e6, 2e6, 5e6, 1e7, 2e7, 5e7, 1e8, 3e8}

// Rates returns a Histogram of speeds from 10 MB/s to 300 GB/s, in GB/s.
func Rates() *Histogram { return New(1e-6, rates...) }

// Moved counts the speed of a move of `bytes` bytes that took that long, in a Histogram made by Rates. It counts nothing if bytes or
// took is 0.
func (h *Histogram) Moved(bytes int64, took time.Duration) {
	if bytes > 0 && took > 0 {
		h.Observe(int64(float64(bytes) / took.Seconds() / 1e3))
	}
}

// Observe counts one amount.
func (h *Histogram) Observe(n int64) {
	i := 0
	for i < len(h.bounds) && n > h.bounds[i] {
		i++
	}
	h.counts[i].Add(1)
	h.sum.Add(n)
}

// Took counts one duration, in a Histogram made by Times.
func (h *Histogram) Took(d time.Duration) { h.Observe(int64(d)) }

// Counts is a snapshot of a Histogram; the zero Counts has no buckets.
type Counts struct {
	Bounds  []int64 // of all buckets but the last, in the unit of amounts
	Unit    float64
	Buckets []uint64 // count of each bucket alone, without those of lower buckets
	Sum     int64
}

// Counts returns a snapshot.
func (h *Histogram) Counts() Counts {
	c := Counts{Bounds: h.bounds, Unit: h.unit, Buckets: make([]uint64, len(h.counts)), Sum: h.sum.Load()}
	for i := range h.counts {
		c.Buckets[i] = h.counts[i].Load()
	}
	return c
}

// Total returns how many amounts were counted.
func (c *Counts) Total() (n uint64) {
	for _, b := range c.Buckets {
		n += b
	}
	return n
}

// Below returns bound i in the unit of the metric, and how many amounts are not above it.
func (c *Counts) Below(i int) (bound float64, n uint64) {
	for _, b := range c.Buckets[:i+1] {
		n += b
	}
	if c.Unit < 1 { // dividing whole numbers gives the shortest decimal form
		return float64(c.Bounds[i]) / math.Round(1/c.Unit), n
	}
	return float64(c.Bounds[i]) * c.Unit, n
}
