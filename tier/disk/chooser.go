// SPDX-License-Identifier: Apache-2.0

package disk

import "sync"

// maxChooserKeys bounds the keys of a ruleChooser: 4 MiB. Beyond it forgetLocked makes room.
const maxChooserKeys = 1 << 16

// ruleChooser compares two rules by the hits that they would have had lately, in bytes: to keep an object at its first offer, and to
// keep it at its second. It simulates each rule by the bytes that the rule would have written: an object that a rule
// keeps stays until the rule has written as many bytes more as the disk can hold. It looks at one of 2^shift keys.
// The zero ruleChooser knows nothing. Its methods are safe for concurrent use.
type ruleChooser struct {
	mu struct {
		sync.Mutex
		keys          map[uint64]playedKey
		shift         uint
		first, second admissionRule
		asked         int64 // bytes offered or read since the hits were last halved
	}
}

// admissionRule is what one rule would have done, in bytes.
type admissionRule struct{ written, hits int64 }

// playedKey is a key that was offered or read: for each rule, how many bytes the rule had written when it last kept the object; 0: it did
// not keep it.
type playedKey struct{ first, second int64 }

// has reports whether the rule still has an object that it kept when r.written was `at`.
func (r *admissionRule) has(at, capacity int64) bool { return at > 0 && r.written-at < capacity }

// Observe records that an object of n bytes was offered or read. h is the hash of its key, capacity how many bytes the disk can hold.
func (c *ruleChooser) Observe(h uint64, n, capacity int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if h&(1<<c.mu.shift-1) != 0 {
		return
	}
	n <<= c.mu.shift
	p, known := c.mu.keys[h]
	if c.mu.first.has(p.first, capacity) {
		c.mu.first.hits += n
	} else {
		c.mu.first.written += n
		p.first = c.mu.first.written
	}
	switch {
	case c.mu.second.has(p.second, capacity):
		c.mu.second.hits += n
	case known:
		c.mu.second.written += n
		p.second = c.mu.second.written
	}
	if c.mu.keys == nil {
		c.mu.keys = make(map[uint64]playedKey)
	}
	if c.mu.keys[h] = p; len(c.mu.keys) > maxChooserKeys {
		c.forgetLocked(capacity)
	}
	if c.mu.asked += n; c.mu.asked >= capacity { // old hits count less
		c.mu.asked = 0
		c.mu.first.hits /= 2
		c.mu.second.hits /= 2
	}
}

// forgetLocked drops keys that neither rule has kept for long. If too many remain, it raises shift, so that fewer keys are looked at.
func (c *ruleChooser) forgetLocked(capacity int64) {
	const long = 8
	for h, p := range c.mu.keys {
		if c.mu.first.written-p.first > long*capacity && !c.mu.second.has(p.second, capacity) {
			delete(c.mu.keys, h)
		}
	}
	for len(c.mu.keys) > maxChooserKeys*3/4 {
		c.mu.shift++
		for h := range c.mu.keys {
			if h&(1<<c.mu.shift-1) != 0 {
				delete(c.mu.keys, h)
			}
		}
	}
}

// PrefersFirst reports whether keeping objects at the first offer gives more hits: over a sixteenth more, because it also writes more.
func (c *ruleChooser) PrefersFirst() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.first.hits > c.mu.second.hits+c.mu.second.hits/16
}
