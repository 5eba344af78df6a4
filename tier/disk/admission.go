// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"hash/maphash"
	"sync/atomic"

	"github.com/kvasir-kv/kvasir/kv"
)

// Admission decides which objects are written. An object that is used once wears the disk and takes the space of
// others. Admission on the second offer avoids that, but costs the first hit of each object where the disk is large
// enough to hold most of them. So the disk admits on the first offer while it has free space, and then while that
// gives more hits: a ruleChooser simulates both rules on the keys that are offered and read.

// admission is the state from which a Disk decides which objects to keep.
type admission struct {
	seed    maphash.Seed // of the hashes of keys
	touched seenKeys     // keys of objects that were offered
	chooser ruleChooser
	refused atomic.Int64 // objects that were not kept because it was their first offer
}

// admits reports whether to keep an object of n bytes. It remembers that the object was offered.
func (d *Disk) admits(k *kv.Key, n int64) bool {
	if d.opts.FirstTouch {
		return true
	}
	h := maphash.Comparable(d.admission.seed, *k)
	if !d.opts.SecondTouch {
		d.admission.chooser.Observe(h, recordBytes(n), d.capacity())
	}
	return d.admission.touched.SeenBefore(h) || d.keepsFirst()
}

// wasRead reports a hit to the chooser.
func (d *Disk) wasRead(k *kv.Key, n int64) {
	if !d.opts.FirstTouch && !d.opts.SecondTouch {
		d.admission.chooser.Observe(maphash.Comparable(d.admission.seed, *k), recordBytes(n), d.capacity())
	}
}

// keepsFirst reports whether to keep objects that are offered for the first time.
func (d *Disk) keepsFirst() bool {
	if d.opts.FirstTouch || d.opts.SecondTouch {
		return d.opts.FirstTouch
	}
	for _, v := range d.volumes {
		if v.hasRoom() {
			return true
		}
	}
	return d.admission.chooser.PrefersFirst()
}

// hasRoom reports whether a segment can be made without removing another.
func (v *volume) hasRoom() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.isOpen() && v.mu.used+2*v.segment <= v.holdsLocked()
}

// holdsLocked is how many bytes the volume can hold before it evicts. Before the first eviction that is its limit. Afterwards it is what
// the volume held at the last eviction, or what it holds now if that is more, but at most its limit.
func (v *volume) holdsLocked() int64 {
	if v.mu.full == 0 {
		return v.dir.Bytes
	}
	return min(v.dir.Bytes, max(v.mu.full, v.mu.used))
}

// capacity is how many bytes all volumes can hold before they evict.
func (d *Disk) capacity() (n int64) {
	for _, v := range d.volumes {
		v.mu.Lock()
		n += v.holdsLocked()
		v.mu.Unlock()
	}
	return n
}

// mostTouched is the number of offered objects in each of the two tables of admission.touched. When a table is full, the older one is
// forgotten: its objects then count as never offered.
const mostTouched = 1 << 19
