// SPDX-License-Identifier: Apache-2.0

package keeper

import "time"

// reserve is the room below the limit for what engines write before the keeper has unlinked as much. It begins with a
// quarter of the limit and shrinks by halves towards reserveTimes the largest excess over the aim that was seen. The excess
// of a burst counts for burstTime. While the files are below the aim, nothing is known of bursts, and it stays.
type reserve struct {
	limit, bytes int64
	file         int64    // the longest file
	worst        [2]int64 // the largest excess of this burstTime and of the one before
	burstAt      time.Time
	shrankAt     time.Time
	reached      bool // the aim, since shrankAt
}

const (
	burstTime    = 10 * time.Minute
	shrinkTime   = 20 * time.Second
	reserveTimes = 3
	leastReserve = 200 // of the limit: 0.5 %
	mostReserve  = 4   // of the limit: a quarter
	reserveFiles = 32  // at least this many files: vLLM writes with 16 threads
)

func newReserve(limit int64, now time.Time) reserve {
	return reserve{limit: limit, bytes: limit / mostReserve, burstAt: now, shrankAt: now}
}

// aim is how many bytes of files the keeper leaves.
func (r *reserve) aim() int64 { return r.limit - r.bytes }

// note takes in how far above the aim the files are.
func (r *reserve) note(excess int64, now time.Time) {
	r.worst[0] = max(r.worst[0], excess)
	r.reached = r.reached || excess > 0
	if now.Sub(r.burstAt) > burstTime {
		r.worst, r.burstAt = [2]int64{0, r.worst[0]}, now
	}
	want := max(reserveTimes*max(r.worst[0], r.worst[1]), r.limit/leastReserve, reserveFiles*r.file)
	switch {
	case want > r.bytes:
		r.bytes = want
	case now.Sub(r.shrankAt) > shrinkTime:
		if r.reached {
			r.bytes = max(r.bytes/2, want)
		}
		r.shrankAt, r.reached = now, false
	}
	r.bytes = min(r.bytes, r.limit/mostReserve)
}
