// SPDX-License-Identifier: Apache-2.0

package keeper

import "time"

// reserve is the room below the limit for bytes that engines write before the keeper has unlinked as many. It begins with a
// quarter of the limit and is halved step by step towards reserveTimes the largest seen excess over the aim. The excess
// of a burst counts for burstTime to 2 x burstTime. While the files stay below the aim, bursts cannot be seen, and the reserve stays. It
// shrinks after shrinkTime, or earlier when half of the limit was unlinked: engines that write fast show their bursts sooner.
type reserve struct {
	limit, bytes int64
	file         int64    // the longest file
	worst        [2]int64 // the largest excess of this burstTime and of the one before
	burstAt      time.Time
	shrankAt     time.Time
	reached      bool  // the files were above the aim since shrankAt
	unlinked     int64 // bytes since shrankAt
	lowered      int64 // bytes above the aim because the reserve grew, and not because of a burst
}

const (
	burstTime    = 10 * time.Minute
	shrinkTime   = 20 * time.Second
	shrinkLeast  = time.Second
	shrinkShare  = 2 // of the limit: a half
	reserveTimes = 3
	leastReserve = 200 // of the limit: 0.5 %
	mostReserve  = 4   // of the limit: a quarter
	reserveFiles = 32  // at least this many files: vLLM writes with 16 threads
)

func newReserve(limit int64, now time.Time) reserve {
	return reserve{limit: limit, bytes: limit / mostReserve, burstAt: now, shrankAt: now}
}

// aim is how many bytes of files the keeper does not unlink.
func (r *reserve) aim() int64 { return r.limit - r.bytes }

// took counts bytes of unlinked files.
func (r *reserve) took(bytes int64) { r.unlinked += bytes }

// note records by how many bytes the files are above the aim, and adapts the reserve.
func (r *reserve) note(excess int64, now time.Time) {
	r.lowered = max(0, min(r.lowered, excess))
	r.worst[0] = max(r.worst[0], excess-r.lowered)
	r.reached = r.reached || excess > 0
	if now.Sub(r.burstAt) > burstTime {
		r.worst, r.burstAt = [2]int64{0, r.worst[0]}, now
	}
	want := max(reserveTimes*max(r.worst[0], r.worst[1]), r.limit/leastReserve, reserveFiles*r.file)
	want = min(want, r.limit/mostReserve)
	since := now.Sub(r.shrankAt)
	switch {
	case want > r.bytes:
		r.lowered += want - r.bytes
		r.bytes = want
	case since > shrinkTime, since > shrinkLeast && r.reached && r.unlinked > r.limit/shrinkShare:
		if r.reached {
			r.bytes = max(r.bytes/2, want)
		}
		r.shrankAt, r.reached, r.unlinked = now, false, 0
	}
}
