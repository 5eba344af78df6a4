// SPDX-License-Identifier: Apache-2.0

package hitcurve

import "time"

// Point is the estimate for one size of the pool.
type Point struct {
	Bytes int64   `json:"bytes"` // size of the pool
	Rate  float64 `json:"hit_rate"`
	LRU   float64 `json:"lru_hit_rate"` // with lru instead of the store's policy
}

// TierPoint is the estimate for the pool and all tiers up to this one.
type TierPoint struct {
	Name  string  `json:"tier"`
	Bytes int64   `json:"bytes"` // size of the tier; 0: unlimited
	Rate  float64 `json:"hit_rate"`
}

// Window is what lookups asked for and found in a window of time, and what more memory would have found. Rates are relative to the chunks
// that lookups asked for.
type Window struct {
	Seconds  float64     `json:"seconds"` // length of the window, or less if the server has not run as long
	Lookups  uint64      `json:"lookups"`
	Asked    uint64      `json:"asked_chunks"`
	Bytes    uint64      `json:"asked_bytes"`
	Tokens   uint64      `json:"asked_tokens"`    // tokens of these chunks; models may have chunks of different sizes
	Distinct float64     `json:"distinct_chunks"` // estimated
	Pool     float64     `json:"pool_hit_rate"`   // measured
	Hit      float64     `json:"hit_rate"`        // measured, with tiers
	Ceiling  float64     `json:"ceiling"`         // with unlimited memory
	Curve    []Point     `json:"curve"`
	Tiers    []TierPoint `json:"tiers"`
}

// Estimate returns the windows of 15 minutes, one hour and 24 hours. A window without a lookup is all 0.
func (c *Curves) Estimate(now time.Duration) []Window {
	c.Play()
	short, mid, long := c.last(now)
	out := []Window{c.window(short), c.window(mid), c.window(long)}
	for i, length := range []time.Duration{15 * time.Minute, time.Hour, 24 * time.Hour} {
		out[i].Seconds = length.Seconds()
	}
	return out
}

// last returns the stretches of the three windows; nil for a window without a lookup.
func (c *Curves) last(now time.Duration) (short, mid, long *stretch) {
	c.mu.Lock()
	defer c.mu.Unlock()
	w := &c.mu.windows
	w.at(now)
	return w.last15Minutes(), w.lastHour(), w.last24Hours()
}

func (c *Curves) window(s *stretch) Window {
	w := Window{Curve: []Point{}, Tiers: []TierPoint{}}
	if s == nil || s.asked == 0 {
		return w
	}
	asked := float64(s.asked)
	w.Lookups, w.Asked, w.Bytes, w.Tokens, w.Distinct = s.lookups, s.asked, s.bytes, s.tokens, s.names.count()
	w.Pool, w.Hit = float64(s.pool)/asked, float64(s.pool+s.below)/asked
	fresh := min(max(w.Distinct-s.distinctAnswers(), 0), float64(s.named))
	// Chunks that were stored before the window, or by an earlier server, are found even the first time that they are asked for.
	repeated := max(float64(s.named)-fresh, float64(s.pool+s.below))
	w.Ceiling = max(repeated/asked, w.Hit)
	hot := min(float64(s.hot), float64(s.pool)) // no more hot chunks than the pool had hits
	rate := func(missed float64) float64 { return min((hot+(repeated-hot)*(1-missed))/asked, w.Ceiling) }
	own := s.own[:]
	if c.opts.Policy == "lru" || c.opts.Policy == "leaf-lru" {
		own = s.lru[:len(Factors)]
	}
	correction := correct(missed(own[poolFactor], s.again), w.Pool*asked-hot, repeated-hot)
	for i, f := range Factors {
		w.Curve = append(w.Curve, Point{
			int64(f * float64(c.opts.Bytes)), rate(correction(missed(own[i], s.again))), rate(correction(missed(s.lru[i], s.again))),
		})
	}
	_, tiers := c.opts.sizes()
	for i, t := range c.opts.Tiers {
		p := TierPoint{t.Name, t.Bytes, w.Ceiling}
		if tiers[i] >= 0 {
			p.Rate = max(rate(missed(s.lru[tiers[i]], s.again)), w.Curve[poolFactor].Rate)
		}
		if i == len(c.opts.Tiers)-1 {
			p.Rate = max(p.Rate, w.Hit) // the hit rate that pool and all tiers had
		}
		w.Tiers = append(w.Tiers, p)
	}
	return w
}

// distinctAnswers returns how many distinct chunks were stored and not asked for. A chunk that is stored again, because it was evicted,
// counts once: the sketch tells how many there are if the counts differ.
func (s *stretch) distinctAnswers() float64 {
	if distinct := s.answered.count(); distinct < 0.95*float64(s.answers) {
		return distinct
	}
	return float64(s.answers)
}

// missed returns which part of the repeated chunks of the sample a cache missed: it found `hits` of `again` chunks. It is 1 if the sample
// has no repeated chunks; the cache then shows no gain.
func missed(hits, again uint64) float64 {
	if again == 0 {
		return 1
	}
	return 1 - float64(hits)/float64(again)
}

// correct returns a function that makes the curve go through the pool's measured `hits` among `repeated` chunks. The function maps missed
// parts: `sample`, the part that the sampled cache of the pool's size missed, becomes the part that the pool missed; 0 stays 0, and 1 stays
// 1.
func correct(sample, hits, repeated float64) func(float64) float64 {
	if repeated <= 0 {
		return func(m float64) float64 { return m }
	}
	measured := min(max(1-hits/repeated, 0), 1)
	return func(m float64) float64 {
		switch {
		case m == sample:
			return measured
		case m < sample:
			return measured * m / sample
		}
		return 1 - (1-m)*(1-measured)/(1-sample)
	}
}
