// SPDX-License-Identifier: Apache-2.0

package coordinator

// Scan makes a Presence of any set that answers for one hash unit of one group
// at a time, such as a map of keys. It costs one call per block looked at.
type Scan func(group, unit int) bool

func (f Scan) has(s *Series, i int) bool {
	for _, g := range s.Groups {
		if !f(g, (i+1)*s.Units-1) {
			return false
		}
	}
	return true
}

// Prefix implements Presence.
func (f Scan) Prefix(s Series, lo, hi int) int {
	for ; lo < hi; lo++ {
		if !f.has(&s, lo) {
			return lo
		}
	}
	return max(lo, hi)
}

// Window implements Presence. It looks at no block twice.
func (f Scan) Window(s Series, hi int, w Window) int {
	known := hi // blocks of [known, e) are present
	for e := w.down(hi); e > 0; {
		known = min(known, e)
		lo := max(0, e-w.Need)
		for known > lo && f.has(&s, known-1) {
			known--
		}
		if known <= lo {
			return e
		}
		known-- // absent
		e = w.down(known)
	}
	return 0
}

// Last implements Presence.
func (f Scan) Last(s Series, lo, hi, align int) int {
	for i := hi/align*align - 1; i >= lo; i -= align {
		if f.has(&s, i) {
			return i
		}
	}
	return lo - 1
}
