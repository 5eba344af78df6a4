// SPDX-License-Identifier: Apache-2.0

package tiering

import (
	"sync"
	"time"
)

const (
	// rateFading is the weight of an earlier sample beside the next one.
	rateFading = 0.95

	// minRateSamples is how many samples make a rate known.
	minRateSamples = 8

	// slowerTierRetry is how many lookups skip a slower tier before one tries it again.
	slowerTierRetry = 16

	// maxComputing bounds the requests that compute; the oldest is forgotten first.
	maxComputing = 4096
)

// rate is an amount over time, of which older samples fade.
type rate struct {
	bytes, seconds float64
	samples        int
}

func (r *rate) add(bytes int64, took time.Duration) {
	r.bytes = r.bytes*rateFading + float64(bytes)
	r.seconds = r.seconds*rateFading + took.Seconds()
	r.samples++
}

// perSecond returns bytes per second, 0 while it is not known.
func (r *rate) perSecond() float64 {
	if r.samples < minRateSamples || r.seconds <= 0 {
		return 0
	}
	return r.bytes / r.seconds
}

// Rates compares how fast chunks come from a tier with how fast engines compute them: where computing is faster, a load
// delays a request. A request loads from its lookup to the answer, and computes from the answer to the commit of what it
// has stored. Time in an engine's queue counts as computing, so a tier is left out too seldom rather than too often. The
// zero value knows nothing. Its methods are safe for concurrent use; its mutex is a leaf.
type Rates struct {
	mu struct {
		sync.Mutex
		load, compute rate
		began         map[string]time.Time // by request: since when it computes
		order         []string             // oldest first; of ended ones, too
		skipped       uint64
	}
}

// Loaded records that the tier gave bytes bytes for one lookup.
func (r *Rates) Loaded(bytes int64, took time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.load.add(bytes, took)
}

// Answered notes that a request has its lookup's result, and computes the rest.
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

// Stored records that a request stored bytes bytes that it had computed.
func (r *Rates) Stored(request []byte, bytes int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	began, ok := r.mu.began[string(request)]
	if !ok {
		return // its lookup found all, or is long ago
	}
	now := time.Now()
	r.mu.compute.add(bytes, now.Sub(began))
	r.mu.began[string(request)] = now
}

// WorthLoading reports whether the next lookup is to ask the tier: it does unless both
// rates are known and computing is faster, and now and then also then.
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

// RateStats is what was learned.
type RateStats struct {
	LoadRate    float64 `json:"load_bytes_per_s"`    // 0: not known
	ComputeRate float64 `json:"compute_bytes_per_s"` // the same
	Skipped     uint64  `json:"skipped_lookups"`     // that found the tier to be slower
}

// Stats returns what was learned.
func (r *Rates) Stats() RateStats {
	r.mu.Lock()
	defer r.mu.Unlock()
	return RateStats{r.mu.load.perSecond(), r.mu.compute.perSecond(), r.mu.skipped}
}
