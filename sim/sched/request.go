// SPDX-License-Identifier: Apache-2.0

package sched

import "cmp"

// Status is where a request stands.
type Status uint8

// The states of a request.
const (
	Waiting   Status = iota
	Loading          // its KV comes from elsewhere
	Running          // computed in steps
	Preempted        // waits to be computed again
	Ended
)

// Reason is why a request ended.
type Reason uint8

// The ends of a request, as vLLM names them.
const (
	Length Reason = iota // max_tokens, or the longest that the model takes
	Abort
	Error // its KV could not be loaded
	Stop  // a stop token
)

func (r Reason) String() string { return [...]string{"length", "abort", "error", "stop"}[r] }

// Request is one request. The caller sets the first fields; they stay as they are.
type Request struct {
	ID        string
	Prompt    int // tokens, at least 1
	MaxTokens int // to generate, at least 1
	Priority  int // smaller is first, under Config.Priority
	// SkipCache keeps it from reading the prefix cache; it is written all the same.
	SkipCache bool
	// Stops reports whether the token that has just come ends the request; nil: none does.
	Stops func() bool
	// Hash names block i of prompt and outputs. Outputs are asked for once they are known.
	Hash func(i int) Hash
	// Data is the caller's.
	Data any

	arrival int64
	status  Status
	tokens  int         // prompt and outputs
	done    int         // tokens whose KV exists or is being made
	tables  [][]BlockID // by group; 0 where nothing is kept
	cached  []int       // blocks of each table that can be found

	preemptions int

	// Of steps in flight.
	placeholders int // tokens being sampled
	inFlight     int // scheduled tokens whose step is not processed
	stale        int // of them, those scheduled before a preemption
	dropStale    bool
	lastStep     int64

	prefill    bool // among the prefills in flight
	arrived    bool // its load has ended
	broken     bool // its load has failed, in part at least
	lost       bool // this step's token, to a failed load
	written    bool // ended, a load may still write to its blocks
	held       bool // ended, the connector reads its blocks
	queued     *queue
	prev, next *Request
}

// Status returns where the request stands.
func (r *Request) Status() Status { return r.status }

// Tokens returns how many tokens it has, outputs included.
func (r *Request) Tokens() int { return r.tokens }

// Computed returns how many tokens have KV, or get it in steps in flight.
func (r *Request) Computed() int { return r.done }

// Tables returns its block table of each group, 0 where nothing is kept. The caller does not
// keep them.
func (r *Request) Tables() [][]BlockID { return r.tables }

// Preemptions returns how often it was preempted.
func (r *Request) Preemptions() int { return r.preemptions }

// before is the order of priorities.
func (r *Request) before(o *Request) bool {
	return cmp.Or(cmp.Compare(r.Priority, o.Priority), cmp.Compare(r.arrival, o.arrival), cmp.Compare(r.ID, o.ID)) < 0
}

// queue is a list of requests: first come first served, or by priority.
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

// pushBack puts r at the end, or where its priority says.
func (q *queue) pushBack(r *Request) {
	at := q.last
	for q.priority && at != nil && r.before(at) {
		at = at.prev
	}
	q.insert(r, at)
}

// pushFront puts r at the front, or where its priority says.
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
