// SPDX-License-Identifier: Apache-2.0

package hitcurve

import "time"

// counts has what the lookups in one stretch of time asked for and found. All fields but lookups, bytes and tokens count chunks.
type counts struct {
	lookups uint64
	asked   uint64
	bytes   uint64 // bytes of the chunks asked for
	tokens  uint64 // tokens of the chunks asked for
	pool    uint64 // found in the pool
	below   uint64 // found in tiers
	named   uint64 // asked for, with a known name
	answers uint64 // stored and not asked for
	hot     uint64 // named, and one of hotChunks

	sampled uint64 // named and in the sample
	again   uint64 // of those, not for the first time
	own     [len(Factors)]uint64
	lru     [len(Factors) + MaxTiers]uint64
}

func (c *counts) add(o *counts) {
	c.lookups += o.lookups
	c.asked += o.asked
	c.bytes += o.bytes
	c.tokens += o.tokens
	c.pool += o.pool
	c.below += o.below
	c.named += o.named
	c.answers += o.answers
	c.hot += o.hot
	c.sampled += o.sampled
	c.again += o.again
	for i := range o.own {
		c.own[i] += o.own[i]
	}
	for i := range o.lru {
		c.lru[i] += o.lru[i]
	}
}

// stretch has the figures of one period: its counts, a sketch of the names of its chunks, and one of the names of answers' chunks.
type stretch struct {
	counts
	names    sketch
	answered smallSketch // of the answers
}

// Lengths of stretches. A window is the current stretch and the ended ones before it: the window of 15 minutes has up to 20 minutes, that
// of an hour up to 75, that of 24 hours up to 28 hours.
const (
	shortLength  = 5 * time.Minute
	shortsPerMid = 3  // make 15 minutes
	midsPerLong  = 16 // make 4 hours

	shorts, mids, longs = 3, 4, 6 // numbers of ended stretches that are remembered
)

// windows has the stretches of the last 28 hours: at most 15, of 64 KiB each. Three short stretches are joined to a middle one, and 16 of
// these to a long one. A stretch is allocated when it is needed.
type windows struct {
	began bool
	epoch time.Duration // when the current stretch began
	count int           // number of short stretches that ended

	current *stretch
	short   [shorts]*stretch // the latest first
	mid     [mids]*stretch
	growing *stretch // the middle ones so far of the next long stretch; nil: none yet
	long    [longs]*stretch
}

// at returns the counts for the time `now`. Calls may come a little out of order.
func (w *windows) at(now time.Duration) *counts {
	switch passed := now - w.epoch; {
	case !w.began || passed < -shortLength || passed > (longs+2)*midsPerLong*shortsPerMid*shortLength:
		*w = windows{began: true, epoch: now} // all stretches are older than the longest window, or the clock is another one
	default:
		for ; passed >= shortLength; passed -= shortLength {
			w.end()
		}
	}
	if w.current == nil {
		w.current = new(stretch)
	}
	return &w.current.counts
}

// names returns the sketch of the current stretch. at must have been called.
func (w *windows) names() *sketch { return &w.current.names }

// end ends the current stretch. If that completes a longer stretch, it makes that one of the shorter ones.
func (w *windows) end() {
	w.epoch += shortLength
	push(w.short[:], w.current)
	w.current = nil
	if w.count++; w.count%shortsPerMid != 0 {
		return
	}
	ended := union(w.short[:]...)
	push(w.mid[:], ended)
	w.growing = union(w.growing, ended)
	if w.count%(shortsPerMid*midsPerLong) == 0 {
		push(w.long[:], w.growing)
		w.growing = nil
	}
}

// push puts the stretch s before the others of `of`, and drops the last of them.
func push(of []*stretch, s *stretch) {
	copy(of[1:], of)
	of[0] = s
}

// union returns a new stretch that joins those of `of`; nil if there are none.
func union(of ...*stretch) (u *stretch) {
	for _, s := range of {
		if s == nil {
			continue
		}
		if u == nil {
			u = new(stretch)
		}
		u.add(&s.counts)
		u.names.merge(&s.names)
		u.answered.merge(&s.answered)
	}
	return u
}

// unfinished returns the short stretches that no middle one has yet, the current one among them.
func (w *windows) unfinished() []*stretch {
	return append([]*stretch{w.current}, w.short[:w.count%shortsPerMid]...)
}

// last15Minutes, lastHour and last24Hours return the windows; nil without a lookup.
func (w *windows) last15Minutes() *stretch {
	return union(append([]*stretch{w.current}, w.short[:]...)...)
}

func (w *windows) lastHour() *stretch { return union(append(w.unfinished(), w.mid[:]...)...) }

func (w *windows) last24Hours() *stretch {
	return union(append(append(w.unfinished(), w.growing), w.long[:]...)...)
}
