// SPDX-License-Identifier: Apache-2.0

package hitcurve

import "time"

// counts are what lookups of one stretch of time asked for and found. All but lookups, bytes and tokens are chunks.
type counts struct {
	lookups uint64
	asked   uint64
	bytes   uint64 // of those asked for
	tokens  uint64 // of those asked for
	pool    uint64 // found in the pool
	below   uint64 // came from tiers
	named   uint64 // asked for, with a name that is known
	answers uint64 // stored and not asked for
	hot     uint64 // named, of hotChunks

	sampled uint64 // named and in the sample
	again   uint64 // of them, not for the first time
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

// stretch is a stretch of time: its counts, the names of its chunks and those of answers.
type stretch struct {
	counts
	names    sketch
	answered smallSketch // of the answers
}

// Lengths of stretches. A window is the current stretch and the ended ones before it: of 15 minutes up to 20, of an hour
// up to 75 minutes, of 24 hours up to 28 hours.
const (
	shortLength  = 5 * time.Minute
	shortsPerMid = 3  // make 15 minutes
	midsPerLong  = 16 // make 4 hours

	shorts, mids, longs = 3, 4, 6 // that are remembered of those that ended
)

// windows are the stretches of the last 28 hours: 15 of them at most, 64 KiB each. A stretch joins those of its level; three short
// ones are a middle one, and 16 of these a long one. Stretches are allocated when they are needed.
type windows struct {
	began bool
	epoch time.Duration // when the current stretch began
	count int           // short stretches that ended

	current *stretch
	short   [shorts]*stretch // the latest first
	mid     [mids]*stretch
	growing *stretch // of the middle ones that make the next long one; nil: none yet
	long    [longs]*stretch
}

// at returns the counts of now. Callers may come a little out of order.
func (w *windows) at(now time.Duration) *counts {
	switch passed := now - w.epoch; {
	case !w.began || passed < -shortLength || passed > (longs+2)*midsPerLong*shortsPerMid*shortLength:
		*w = windows{began: true, epoch: now} // all is older than the longest window, or the clock is another one
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

// names returns the sketch of now; at was called.
func (w *windows) names() *sketch { return &w.current.names }

// end ends the current stretch.
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

// push puts a stretch before the others. The last one goes.
func push(of []*stretch, s *stretch) {
	copy(of[1:], of)
	of[0] = s
}

// union returns a new stretch of all of them; nil for none.
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

// unfinished are the short stretches that are part of no middle one yet, the current one among them.
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
