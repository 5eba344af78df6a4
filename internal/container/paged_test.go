// SPDX-License-Identifier: Apache-2.0

package container

import (
	"math/rand/v2"
	"testing"
)

func TestSlice(t *testing.T) {
	var s PagedSlice[int]
	s.Grow(0)
	if s.Len() != 0 {
		t.Fatal(s.Len())
	}
	s.Grow(1)
	first := s.At(0)
	*first = 7
	s.Grow(5 * pageLen)
	for i := 1; i < s.Len(); i++ {
		if *s.At(i) != 0 {
			t.Fatal(i, *s.At(i))
		}
		*s.At(i) = i
	}
	s.Grow(3)
	if s.Len() != 5*pageLen || *first != 7 || s.At(0) != first || *s.At(5*pageLen - 1) != 5*pageLen-1 {
		t.Fatal(s.Len(), *first)
	}
}

// A queue answers like a plain slice, over many pages, and keeps no page that it has passed.
func TestQueue(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var q PagedQueue[int]
	var want []int
	for i := range 200_000 {
		grow := 0.6
		if i/30_000%2 == 1 {
			grow = 0.3
		}
		if r.Float64() < grow {
			q.Push(i)
			want = append(want, i)
		} else if len(want) > 0 {
			if *q.Front() != want[0] {
				t.Fatal(i, *q.Front(), want[0])
			}
			q.Pop()
			want = want[1:]
		}
		if q.Len() != len(want) || len(q.pages) > len(want)/pageLen+2 {
			t.Fatal(i, q.Len(), len(want), len(q.pages))
		}
	}
}
