// SPDX-License-Identifier: Apache-2.0

// Package arena allocates ranges of a memory segment. It keeps only integers and never touches the segment itself. It always allocates
// the lowest free range that is large enough, so that a pool touches as few pages as possible and reuses those it has touched.
//
// An Arena is not safe for concurrent use: its owner must lock.
package arena

import (
	"fmt"
	"math/rand/v2"
)

// Arena manages the offsets [0, Size) in units of Align bytes.
type Arena struct {
	size, align int64
	limit       int64 // Alloc returns no range that ends above it
	free        int64 // bytes in free ranges
	high        int64 // end of the highest range that was ever allocated

	// The free ranges form a treap: ordered by offset, heap-ordered by priority. Each node knows the longest range in its subtree. All
	// nodes live in one slice.
	nodes []node
	spare []int32 // unused nodes
	root  int32   // index of the root node; 0: none
}

type node struct {
	off, n      int64
	longest     int64 // largest n in the subtree
	left, right int32
	priority    uint32
}

// New returns an Arena of size bytes, all free. Alloc returns ranges whose offset and length are multiples of align bytes. align must
// be positive. A size that is not a multiple of align is rounded down.
func New(size, align int64) *Arena {
	if size < 0 || align <= 0 {
		panic(fmt.Sprintf("BUG: arena: size %d, align %d", size, align))
	}
	a := &Arena{size: size / align * align, align: align, nodes: make([]node, 1)}
	a.limit = a.size
	if a.size > 0 {
		a.free = a.size
		a.insert(0, a.size)
	}
	return a
}

// Size returns how many bytes the Arena manages.
func (a *Arena) Size() int64 { return a.size }

// Free returns the bytes in free ranges.
func (a *Arena) Free() int64 { return a.free }

// High returns the end of the highest range that was ever allocated.
func (a *Arena) High() int64 { return a.high }

// Longest returns the length of the longest free range.
func (a *Arena) Longest() int64 { return a.nodes[a.root].longest }

// Round returns n rounded up to the alignment: the number of bytes that Alloc(n) takes.
func (a *Arena) Round(n int64) int64 { return (n + a.align - 1) / a.align * a.align }

// Limit sets the end of the ranges that Alloc may return; at first it is Size. Ranges above it that are allocated already stay. Take
// ignores the limit.
func (a *Arena) Limit(end int64) { a.limit = min(max(end, 0), a.size) }

// End returns the limit that Limit set.
func (a *Arena) End() int64 { return a.limit }

// Alloc allocates n bytes from the lowest free range that is large enough. It returns false if there is none below the limit, or if n
// is not in 1..Size.
func (a *Arena) Alloc(n int64) (off int64, ok bool) {
	if n <= 0 || n > a.size {
		return 0, false
	}
	n = a.Round(n)
	if a.Longest() < n {
		return 0, false
	}
	i := a.root
	for {
		d := &a.nodes[i]
		switch {
		case a.nodes[d.left].longest >= n:
			i = d.left
		case d.n >= n:
			off, left := d.off, d.n-n
			if off+n > a.limit {
				return 0, false // all other ranges begin above the limit
			}
			a.remove(off)
			if left > 0 {
				a.insert(off+n, left)
			}
			a.free -= n
			a.high = max(a.high, off+n)
			return off, true
		default:
			i = d.right
		}
	}
}

// Take allocates the range of n bytes at off, which must be free. A pool that is restored from its index takes the ranges of its
// records. Take returns false, and changes nothing, if any part is not free or off is not aligned.
func (a *Arena) Take(off, n int64) bool {
	n = a.Round(n)
	if off < 0 || n <= 0 || off%a.align != 0 || off > a.size || n > a.size-off {
		return false
	}
	at, length, ok := a.floor(off)
	if !ok || off+n > at+length {
		return false
	}
	a.remove(at)
	if off > at {
		a.insert(at, off-at)
	}
	if end := at + length; end > off+n {
		a.insert(off+n, end-off-n)
	}
	a.free -= n
	a.high = max(a.high, off+n)
	return true
}

// Release frees the range of n bytes at off, which Alloc or Take allocated. To free a range that is free, or outside the arena, is a
// bug and panics.
func (a *Arena) Release(off, n int64) {
	n = a.Round(n)
	if off < 0 || n <= 0 || off%a.align != 0 || off > a.size || n > a.size-off {
		panic(fmt.Sprintf("BUG: arena: release of %d bytes at %d of %d", n, off, a.size))
	}
	start, end := off, off+n
	if at, length, ok := a.floor(end - 1); ok && at+length > off {
		panic(fmt.Sprintf("BUG: arena: release of %d bytes at %d: %d bytes at %d are free", n, off, length, at))
	}
	if at, length, ok := a.floor(end); ok && at == end {
		a.remove(at)
		end += length
	}
	if at, length, ok := a.floor(off); ok && at+length == off {
		a.remove(at)
		start = at
	}
	a.insert(start, end-start)
	a.free += n
}

// FreeBefore returns how many bytes directly before off are free.
func (a *Arena) FreeBefore(off int64) int64 {
	if at, n, ok := a.floor(off - 1); ok && at+n >= off {
		return off - at
	}
	return 0
}

// floor returns the free range, n bytes at the offset `at`, with the highest offset that is not above off. ok is false if there is none.
func (a *Arena) floor(off int64) (at, n int64, ok bool) {
	for i := a.root; i != 0; {
		d := &a.nodes[i]
		if d.off <= off {
			at, n, ok = d.off, d.n, true
			i = d.right
		} else {
			i = d.left
		}
	}
	return at, n, ok
}

func (a *Arena) insert(off, n int64) {
	var i int32
	if last := len(a.spare) - 1; last >= 0 {
		i, a.spare = a.spare[last], a.spare[:last]
	} else {
		a.nodes = append(a.nodes, node{})
		i = int32(len(a.nodes) - 1)
	}
	a.nodes[i] = node{off: off, n: n, longest: n, priority: rand.Uint32()}
	left, right := a.split(a.root, off)
	a.root = a.merge(a.merge(left, i), right)
}

// remove removes from the tree the free range that begins at off.
func (a *Arena) remove(off int64) {
	left, rest := a.split(a.root, off)
	gone, right := a.split(rest, off+1)
	if gone == 0 || a.nodes[gone].left != 0 || a.nodes[gone].right != 0 {
		panic(fmt.Sprintf("BUG: arena: no single free range at %d", off))
	}
	a.spare = append(a.spare, gone)
	a.root = a.merge(left, right)
}

// split splits the tree i into a tree of the ranges below off and a tree of the others.
func (a *Arena) split(i int32, off int64) (left, right int32) {
	if i == 0 {
		return 0, 0
	}
	d := &a.nodes[i]
	if d.off < off {
		d.right, right = a.split(d.right, off)
		left = i
	} else {
		left, d.left = a.split(d.left, off)
		right = i
	}
	a.update(i)
	return left, right
}

// merge joins two trees. Every range of left must lie below every range of right.
func (a *Arena) merge(left, right int32) int32 {
	switch {
	case left == 0:
		return right
	case right == 0:
		return left
	case a.nodes[left].priority > a.nodes[right].priority:
		a.nodes[left].right = a.merge(a.nodes[left].right, right)
		a.update(left)
		return left
	default:
		a.nodes[right].left = a.merge(left, a.nodes[right].left)
		a.update(right)
		return right
	}
}

func (a *Arena) update(i int32) {
	d := &a.nodes[i]
	d.longest = max(d.n, a.nodes[d.left].longest, a.nodes[d.right].longest)
}
