// Package growing has a slice and a queue that grow by pages: what they hold never moves, so no
// growth takes long, however much there is.
package growing

// page is how many elements are allocated together.
const page = 4096

// Slice is a slice that keeps its elements where they are. The zero Slice is empty.
type Slice[T any] struct{ pages []*[page]T }

// Len returns how many elements there are, those that Grow allocated ahead among them.
func (s *Slice[T]) Len() int { return len(s.pages) * page }

// Grow makes sure that there are n elements at least; new ones are zero.
func (s *Slice[T]) Grow(n int) {
	for len(s.pages)*page < n {
		s.pages = append(s.pages, new([page]T))
	}
}

// At returns element i, which must be there.
func (s *Slice[T]) At(i int) *T { return &s.pages[uint(i)/page][uint(i)%page] }

// Queue holds elements first in, first out. The zero Queue is empty.
type Queue[T any] struct {
	pages       []*[page]T
	first, next int // counted from the beginning of pages[0]
}

// Len returns how many elements wait.
func (q *Queue[T]) Len() int { return q.next - q.first }

// Push adds an element behind all others.
func (q *Queue[T]) Push(v T) {
	if q.next == len(q.pages)*page {
		q.pages = append(q.pages, new([page]T))
	}
	q.pages[q.next/page][q.next%page] = v
	q.next++
}

// Front returns the oldest element; the queue must not be empty.
func (q *Queue[T]) Front() *T { return &q.pages[0][q.first] }

// Pop removes the oldest element; the queue must not be empty.
func (q *Queue[T]) Pop() {
	var zero T
	*q.Front() = zero
	if q.first++; q.first == q.next && q.next < page {
		q.first, q.next = 0, 0 // empty: the page is used again
		return
	}
	if q.first == page {
		q.pages[0] = nil
		q.pages = q.pages[1:]
		q.first, q.next = 0, q.next-page
	}
}
