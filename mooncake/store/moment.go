// SPDX-License-Identifier: Apache-2.0

package store

import "time"

// twoClocks is a time by two clocks. The monotonic clock stops while a machine sleeps, but a lease goes on; the wall clock may be
// set at any time.
type twoClocks struct{ steady, wall time.Time }

func now() twoClocks {
	t := time.Now()
	return twoClocks{t, t.Round(0)} // Round takes the steady clock's reading away
}

// since returns how long ago t was, by the clock that shows the longer time: a wall clock that is set forward makes leases seem
// to have ended, which costs a miss.
func (m twoClocks) since(t twoClocks) time.Duration {
	return max(m.steady.Sub(t.steady), m.wall.Sub(t.wall))
}
