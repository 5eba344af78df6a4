// SPDX-License-Identifier: Apache-2.0

package tiering

import (
	"sync"
	"time"
)

const (
	// rateFading is the factor by which the weight of earlier samples falls with each new one.
	rateFading = 0.95

	// minRateSamples is the number of samples from which on a rate is known.
	minRateSamples = 8

	// slowerTierRetry says that one lookup in 16 asks a tier that is slower than computing, to measure it again.
	slowerTierRetry = 16

	// maxComputing bounds the requests that are recorded as computing; beyond it the oldest is forgotten.
	maxComputing = 4096
)

// rate is an amount of bytes per time, in which older samples fade.
type rate struct {
	bytes, seconds float64
	samples        int
}

func (r *rate) add(bytes int64, took time.Duration) {
	r.bytes = r.bytes*rateFading + float64(bytes)
	r.seconds = r.seconds*rateFading + took.Seconds()
	r.samples++
}

// perSecond returns bytes per second; 0: not known yet.
func (r *rate) perSecond() float64 {
	if r.samples < minRateSamples || r.seconds <= 0 {
		return 0
	}
	return r.bytes / r.seconds
}

// Rates compares how fast chunks come from a tier with how fast engines compute them. Where computing is faster, a load delays a request. A
// request loads from its lookup to the result, and computes from the result to the commit of the chunks that it has stored. Time in an
// engine's queue counts as computing, so a tier is rather asked too often than left out too often. The zero value knows nothing. Its
// methods are safe for concurrent use; its mutex is a leaf.
type Rates struct {
	mu struct {
		sync.Mutex
		load, compute rate
		began         map[string]time.Time // by request: when it began to compute
		order         []string             // oldest first; has also requests that have ended
		skipped       uint64
	}
}

// Loaded records that the tier gave `bytes` bytes for one lookup, in the time took.
func (r *Rates) Loaded(bytes int64, took time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.load.add(bytes, took)
}

// Answered records that a request has its lookup's result, and begins to compute the rest.
func (r *Rates) Answered(request []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.began == nil {
		r.mu.began = make(map[string]time.Time)
	}
	name := string(request)
	if _, ok := r.mu.began[name]; !ok {
		if len(r.mu.order) >= maxComputing {
			delete(r.mu.began, r.mu.order[0])
			r.mu.order = r.mu.order[1:]
		}
		r.mu.order = append(r.mu.order, name)
	}
	r.mu.began[name] = time.Now()
}

// Stored records that a request stored `bytes` bytes that it had computed.
func (r *Rates) Stored(request []byte, bytes int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	began, ok := r.mu.began[string(request)]
	if !ok {
		return // its lookup found all chunks, or was long ago
	}
	now := time.Now()
	r.mu.compute.add(bytes, now.Sub(began))
	r.mu.began[string(request)] = now
}

// WorthLoading reports whether the next lookup should ask the tier. It is false only if both rates are known and computing is faster; one
// lookup in slowerTierRetry asks the tier even then.
func (r *Rates) WorthLoading() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	load, compute := r.mu.load.perSecond(), r.mu.compute.perSecond()
	if load == 0 || compute <= load {
		return true
	}
	r.mu.skipped++
	return r.mu.skipped%slowerTierRetry == 0
}

// RateStats are the rates that were measured.
type RateStats struct {
	LoadRate    float64 `json:"load_bytes_per_s"`    // 0: not known
	ComputeRate float64 `json:"compute_bytes_per_s"` // 0: not known
	Skipped     uint64  `json:"skipped_lookups"`     // lookups that did not ask the tier, because it is slower
}

// Stats returns the rates that were measured.
func (r *Rates) Stats() RateStats {
	r.mu.Lock()
	defer r.mu.Unlock()
	return RateStats{r.mu.load.perSecond(), r.mu.compute.perSecond(), r.mu.skipped}
}
