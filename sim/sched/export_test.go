// SPDX-License-Identifier: Apache-2.0

package sched

// Waiting returns the requests that wait without blocks, in order.
func (s *Scheduler) Waiting() []*Request { return s.waiting.list() }

// Holding returns the requests that wait with blocks.
func (s *Scheduler) Holding() []*Request { return s.holding.list() }

func (q *queue) list() (out []*Request) {
	for r := q.first; r != nil; r = r.next {
		out = append(out, r)
	}
	return out
}

// Pool returns the free queue, and the blocks that the prefix cache can find.
func (s *Scheduler) Pool() (free, cached []BlockID) {
	cached = []BlockID{}
	for i := range s.pool.blocks {
		if s.pool.blocks[i].hashed {
			cached = append(cached, BlockID(i))
		}
	}
	return s.pool.queue(), cached
}
