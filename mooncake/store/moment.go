// SPDX-License-Identifier: Apache-2.0

package store

import "time"

// twoClocks is one time, read from two clocks. The monotonic clock stops while a machine sleeps, although a lease goes on. The wall
// clock may be set at any time.
type twoClocks struct{ steady, wall time.Time }

func now() twoClocks {
	t := time.Now()
	return twoClocks{t, t.Round(0)} // Round takes the steady clock's reading away
}

// since returns how much time has passed since t, by the clock that shows more. If the wall clock was set forward, leases seem to have
// ended, which costs only a miss.
func (m twoClocks) since(t twoClocks) time.Duration {
	return max(m.steady.Sub(t.steady), m.wall.Sub(t.wall))
}
