// SPDX-License-Identifier: Apache-2.0

package container

// pageLen is how many elements are allocated at a time.
const pageLen = 4096

// PagedSlice is a slice whose elements never move when it grows. The zero PagedSlice is empty.
type PagedSlice[T any] struct{ pages []*[pageLen]T }

// Len returns the number of elements, including those that Grow allocated beyond its n.
func (s *PagedSlice[T]) Len() int { return len(s.pages) * pageLen }

// Grow makes sure that there are at least n elements. New elements are zero.
func (s *PagedSlice[T]) Grow(n int) {
	for len(s.pages)*pageLen < n {
		s.pages = append(s.pages, new([pageLen]T))
	}
}

// At returns element i, which must exist.
func (s *PagedSlice[T]) At(i int) *T { return &s.pages[uint(i)/pageLen][uint(i)%pageLen] }

// PagedQueue holds elements first in, first out. The zero PagedQueue is empty.
type PagedQueue[T any] struct {
	pages       []*[pageLen]T
	first, next int // positions, counted from the beginning of pages[0]
}

// Len returns how many elements wait.
func (q *PagedQueue[T]) Len() int { return q.next - q.first }

// Push adds an element at the end of the queue.
func (q *PagedQueue[T]) Push(v T) {
	if q.next == len(q.pages)*pageLen {
		q.pages = append(q.pages, new([pageLen]T))
	}
	q.pages[q.next/pageLen][q.next%pageLen] = v
	q.next++
}

// Front returns the oldest element; the queue must not be empty.
func (q *PagedQueue[T]) Front() *T { return &q.pages[0][q.first] }

// Pop removes the oldest element; the queue must not be empty.
func (q *PagedQueue[T]) Pop() {
	var zero T
	*q.Front() = zero
	if q.first++; q.first == q.next && q.next < pageLen {
		q.first, q.next = 0, 0 // the queue is empty, so its page is used again from the start
		return
	}
	if q.first == pageLen {
		q.pages[0] = nil
		q.pages = q.pages[1:]
		q.first, q.next = 0, q.next-pageLen
	}
}
