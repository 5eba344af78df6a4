// SPDX-License-Identifier: Apache-2.0

package sched

import "cmp"

// Status says how far a request has come.
type Status uint8

// The states of a request.
const (
	Waiting   Status = iota
	Loading          // its KV is being loaded from elsewhere
	Running          // computed in steps
	Preempted        // waits to be computed again
	Ended
)

// Reason says why a request ended.
type Reason uint8

// The reasons for the end of a request, under vLLM's names.
const (
	Length Reason = iota // it reached max_tokens, or the longest sequence of the model
	Abort
	Error // its KV could not be loaded
	Stop  // a stop token
)

func (r Reason) String() string { return [...]string{"length", "abort", "error", "stop"}[r] }

// Request is one request. The caller sets the exported fields; they must not change afterwards.
type Request struct {
	ID        string
	Prompt    int // number of prompt tokens, at least 1
	MaxTokens int // most tokens to generate, at least 1
	Priority  int // the smallest comes first, under Config.Priority
	// SkipCache means that it does not read the prefix cache; its blocks are still put there.
	SkipCache bool
	// Stops reports whether the token that has just come ends the request; nil: no token does.
	Stops func() bool
	// Hash returns the hash of block i of prompt and outputs. It is called for a block of outputs only when its tokens are known.
	Hash func(i int) Hash
	// Data belongs to the caller.
	Data any

	arrival int64
	status  Status
	tokens  int         // prompt and outputs
	done    int         // tokens whose KV exists or is being computed
	tables  [][]BlockID // by group; 0 where no block is kept
	cached  []int       // by group: leading blocks that are findable in the cache

	preemptions int

	// About steps in flight:
	placeholders int // tokens that are being sampled
	inFlight     int // scheduled tokens whose step is not processed yet
	stale        int // those of inFlight that were scheduled before a preemption
	dropStale    bool
	lastStep     int64

	prefill    bool // it counts as a prefill in flight
	arrived    bool // its load has ended
	broken     bool // its load has failed, at least in part
	lost       bool // a failed load made this step's token invalid
	written    bool // it has ended, but a load may still write to its blocks
	held       bool // it has ended, but the connector still reads its blocks
	queued     *queue
	prev, next *Request
}

// Status returns how far the request has come.
func (r *Request) Status() Status { return r.status }

// Tokens returns how many tokens the request has, outputs included.
func (r *Request) Tokens() int { return r.tokens }

// Computed returns how many tokens have KV, or will get it in steps in flight.
func (r *Request) Computed() int { return r.done }

// Tables returns the request's block table of each group; 0 stands where no block is kept. The caller must not keep the result.
func (r *Request) Tables() [][]BlockID { return r.tables }

// Preemptions returns how often the request was preempted.
func (r *Request) Preemptions() int { return r.preemptions }

// before reports whether r comes before o in the order of priorities.
func (r *Request) before(o *Request) bool {
	return cmp.Or(cmp.Compare(r.Priority, o.Priority), cmp.Compare(r.arrival, o.arrival), cmp.Compare(r.ID, o.ID)) < 0
}

// queue is a list of requests in the order of arrival, or by priority.
type queue struct {
	priority    bool
	first, last *Request
	n           int
}

func (q *queue) insert(r, behind *Request) {
	r.queued, r.prev = q, behind
	if behind == nil {
		r.next, q.first = q.first, r
	} else {
		r.next, behind.next = behind.next, r
	}
	if r.next == nil {
		q.last = r
	} else {
		r.next.prev = r
	}
	q.n++
}

// pushBack puts r at the end of the queue, or at the place for its priority.
func (q *queue) pushBack(r *Request) {
	at := q.last
	for q.priority && at != nil && r.before(at) {
		at = at.prev
	}
	q.insert(r, at)
}

// pushFront puts r at the front of the queue, or at the place for its priority.
func (q *queue) pushFront(r *Request) {
	if q.priority {
		q.pushBack(r)
		return
	}
	q.insert(r, nil)
}

func (q *queue) remove(r *Request) {
	if r.prev == nil {
		q.first = r.next
	} else {
		r.prev.next = r.next
	}
	if r.next == nil {
		q.last = r.prev
	} else {
		r.next.prev = r.prev
	}
	r.queued, r.prev, r.next = nil, nil, nil
	q.n--
}
