// SPDX-License-Identifier: Apache-2.0

package s3

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/tier"
)

// kind is the kind of a request, as on a bill.
type kind uint8

const (
	kindGet kind = iota
	kindPut
	kindHead
	kindList
	kindDelete
	kindPost
	kinds
)

var kindNames = [kinds]string{"GET", "PUT", "HEAD", "LIST", "DELETE", "POST"}

// Reasons to send a request again.
const (
	whyBusy = iota
	whyFailed
	whyBroken
	whys
)

var whyNames = [whys]string{"busy", "failed", "connection"}

// bill counts requests and bytes.
type bill struct {
	requests                      [kinds]atomic.Uint64
	retries                       [whys]atomic.Uint64
	sent, received                atomic.Uint64
	noBudget, readOnly, noRetries atomic.Uint64
}

func (b *bill) read() tier.Requests {
	r := tier.Requests{
		Requests: make(map[string]uint64, kinds), Retries: make(map[string]uint64, whys), Sent: b.sent.Load(), Received: b.received.Load(),
		Unspent: map[string]uint64{"budget": b.noBudget.Load(), "read only": b.readOnly.Load(), "retries": b.noRetries.Load()},
	}
	for i, name := range kindNames {
		r.Requests[name] = b.requests[i].Load()
	}
	for i, name := range whyNames {
		r.Retries[name] = b.retries[i].Load()
	}
	return r
}

// budget allows no more than `most` events in any period of budgetPieces steps, at once or spread over the period.
type budget struct {
	most int
	step time.Duration // length of a piece of time
	mu   struct {
		sync.Mutex
		began time.Time
		last  int64                 // number of the last piece, counted from began
		spent [budgetPieces + 1]int // events in the last pieces, by number modulo the length
	}
}

const budgetPieces = 60

func newBudget(n int, per time.Duration) *budget {
	b := &budget{most: n, step: per / budgetPieces}
	b.mu.began = time.Now()
	return b
}

// take spends n events and reports true, or reports false if fewer are left. If no event was spent in the
// period, it allows any n, even more than `most`.
func (b *budget) take(n int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	size := int64(len(b.mu.spent))
	now := int64(time.Since(b.mu.began) / b.step)
	for i := range min(now-b.mu.last, size) {
		b.mu.spent[(now-i)%size] = 0
	}
	b.mu.last = now
	sum := 0
	for _, s := range b.mu.spent {
		sum += s
	}
	if sum > 0 && sum+n > b.most {
		return false
	}
	b.mu.spent[now%size] += n
	return true
}

const (
	earn      = 0.1 // part of a repetition that each successful request earns
	allowance = 64  // largest number of repetitions that can be saved up
)

// retries bounds the requests that are sent again, so that a store in trouble does not get several times as many requests. The zero value
// allows 64 repetitions (allowance).
type retries struct {
	mu struct {
		sync.Mutex
		spent float64
	}
}

// worked records a successful request, which earns a part of a repetition.
func (r *retries) worked() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.spent = max(0, r.mu.spent-earn)
}

// take spends one repetition. It reports false if none is left: the request must then fail.
func (r *retries) take() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.spent+1 > allowance {
		return false
	}
	r.mu.spent++
	return true
}

const (
	firstWait = 50 * time.Millisecond
	longWait  = 2 * time.Second
)

// backoff returns how long to wait before a request is sent again for which `try` tries, counted from 0, have failed. It is a random time up
// to a bound that doubles with each try, so that clients that failed together do not try again together.
func backoff(try int) time.Duration {
	most := min(firstWait<<min(try, 10), longWait)
	return rand.N(most) + time.Millisecond
}

// pause is a period in which one kind of request is not tried.
type pause struct{ until atomic.Int64 } // UnixNano

func (p *pause) begin(d time.Duration) { p.until.Store(time.Now().Add(d).UnixNano()) }

func (p *pause) on() bool { return time.Now().UnixNano() < p.until.Load() }

// sayEvery is how often a warning is logged again while its cause lasts.
const sayEvery = time.Hour

// maxSaid is the largest number of warnings that are remembered. Beyond it all are forgotten, so a warning may be logged again earlier.
const maxSaid = 256

// warnings remembers which warnings were logged, and when.
type warnings struct {
	mu sync.Mutex
	at map[string]time.Time
}

// now reports whether to log the warning `what` now, and records that it was logged.
func (s *warnings) now(what string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if last, ok := s.at[what]; ok && now.Sub(last) < sayEvery {
		return false
	}
	if s.at == nil || len(s.at) >= maxSaid {
		s.at = make(map[string]time.Time)
	}
	s.at[what] = now
	return true
}
