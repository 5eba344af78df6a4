package disk

import (
	"hash/maphash"
	"sync"
	"sync/atomic"

	"github.com/kvasir-kv/kvasir/kv"
)

// Which objects are kept. What is used once wears a disk and takes the room of others, so an object is kept when it is
// offered for the second time; but where the disk is so large that most objects outlive their first use on it, that
// costs the first hit of each. So objects are kept at once while the disk has room, and then while that would give
// more hits: a chooser plays both rules on the keys that are offered and read, as if each rule had the disk alone.

// admission says which objects are kept.
type admission struct {
	touched touched
	chooser chooser
	refused atomic.Int64 // objects offered for the first time
}

// admits reports whether an object of n bytes is kept. It remembers that it was offered.
func (d *Disk) admits(k *kv.Key, n int64) bool {
	if d.opts.FirstTouch {
		return true
	}
	h := maphash.Comparable(d.admission.touched.seed, *k)
	if !d.opts.SecondTouch {
		d.admission.chooser.touch(h, recordBytes(n), d.capacity())
	}
	return d.admission.touched.again(h) || d.keepsFirst()
}

// wasRead tells the chooser of a hit.
func (d *Disk) wasRead(k *kv.Key, n int64) {
	if !d.opts.FirstTouch && !d.opts.SecondTouch {
		d.admission.chooser.touch(maphash.Comparable(d.admission.touched.seed, *k), recordBytes(n), d.capacity())
	}
}

// keepsFirst reports whether objects are kept when they are offered for the first time.
func (d *Disk) keepsFirst() bool {
	if d.opts.FirstTouch || d.opts.SecondTouch {
		return d.opts.FirstTouch
	}
	for _, v := range d.volumes {
		if v.hasRoom() {
			return true
		}
	}
	return d.admission.chooser.prefersFirst()
}

// hasRoom reports whether a segment can be made without removing another.
func (v *volume) hasRoom() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.isOpen() && v.mu.used+2*v.segment <= v.holdsLocked()
}

// holdsLocked is how many bytes the volume has before it evicts: what it had when it last did, else its limit.
func (v *volume) holdsLocked() int64 {
	if v.mu.full == 0 {
		return v.dir.Bytes
	}
	return min(v.dir.Bytes, max(v.mu.full, v.mu.used))
}

// capacity is how many bytes all volumes have before they evict.
func (d *Disk) capacity() (n int64) {
	for _, v := range d.volumes {
		v.mu.Lock()
		n += v.holdsLocked()
		v.mu.Unlock()
	}
	return n
}

// mostPlayed bounds the keys of a chooser: 4 MiB.
const mostPlayed = 1 << 16

// chooser compares two rules by the hits that they would have lately, in bytes: to keep what is offered first, and to keep
// what is offered for the second time. Of each rule it knows how many bytes it would have written: an object that a rule
// keeps is there until so many more were written as the disk holds. It looks at one of 2^shift keys.
type chooser struct {
	mu struct {
		sync.Mutex
		keys          map[uint64]played
		shift         uint
		first, second rule
		asked         int64 // bytes, since hits were halved
	}
}

// rule is what one rule would have done.
type rule struct{ written, hits int64 }

// played is a key that was touched: how much each rule had written when it kept it last; 0: it did not.
type played struct{ first, second int64 }

// has reports whether an object that was kept at a time is still there.
func (r *rule) has(at, capacity int64) bool { return at > 0 && r.written-at < capacity }

// touch notes that an object, by the hash of its key, is offered or read.
func (c *chooser) touch(h uint64, n, capacity int64) {
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
		c.mu.keys = make(map[uint64]played)
	}
	if c.mu.keys[h] = p; len(c.mu.keys) > mostPlayed {
		c.forgetLocked(capacity)
	}
	if c.mu.asked += n; c.mu.asked >= capacity { // what was long ago counts less
		c.mu.asked = 0
		c.mu.first.hits /= 2
		c.mu.second.hits /= 2
	}
}

// forgetLocked drops what neither rule has had for long. Where that does not do, fewer keys are looked at.
func (c *chooser) forgetLocked(capacity int64) {
	const long = 8
	for h, p := range c.mu.keys {
		if c.mu.first.written-p.first > long*capacity && !c.mu.second.has(p.second, capacity) {
			delete(c.mu.keys, h)
		}
	}
	for len(c.mu.keys) > mostPlayed*3/4 {
		c.mu.shift++
		for h := range c.mu.keys {
			if h&(1<<c.mu.shift-1) != 0 {
				delete(c.mu.keys, h)
			}
		}
	}
}

// prefersFirst reports whether to keep what is offered first gives more hits: a sixteenth more, since it writes more.
func (c *chooser) prefersFirst() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.first.hits > c.mu.second.hits+c.mu.second.hits/16
}

// touched remembers keys that were offered once, the last of them: two tables take turns.
type touched struct {
	seed maphash.Seed
	most int // in one table
	mu   struct {
		sync.Mutex
		now, before map[uint64]struct{}
	}
}

const mostTouched = 1 << 19

// again reports whether a key, by its hash, was offered before, and remembers it.
func (t *touched) again(h uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, now := t.mu.now[h]
	_, before := t.mu.before[h]
	if now || before {
		return true
	}
	if len(t.mu.now) >= t.most || t.mu.now == nil {
		t.mu.now, t.mu.before = make(map[uint64]struct{}), t.mu.now
	}
	t.mu.now[h] = struct{}{}
	return false
}
