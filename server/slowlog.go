// SPDX-License-Identifier: Apache-2.0

package server

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// SlowRequest is a request whose answer took long.
type SlowRequest struct {
	Operation string  `json:"operation"`
	Request   string  `json:"request_id,omitempty"` // id of the engine's request, if the operation has one
	Seconds   float64 `json:"seconds"`
	At        string  `json:"at"` // time of the answer, RFC 3339
}

// Limits of a slowLog: the slowest maxSlowRequests requests of the last slowFor stay. With maxSlowID bytes of each id, at which a longer one
// is cut, they take less than 8 KiB.
const (
	maxSlowRequests = 32
	maxSlowID       = 128
	slowFor         = 10 * time.Minute
)

type slowEntry struct {
	operation fmt.Stringer
	id        string
	took      time.Duration
	at        time.Time
}

// slowLog remembers the slowest requests of ten minutes, in bounded memory. Methods are safe for concurrent use.
type slowLog struct {
	from  atomic.Int64 // ns: a request that took less is not slow
	floor atomic.Int64 // ns: a request that took less is not among the slowest
	mu    sync.Mutex
	list  []slowEntry // the slowest first
}

// newSlowLog returns a slowLog of requests that took at least `from`.
func newSlowLog(from time.Duration) *slowLog {
	l := new(slowLog)
	l.SetFrom(from)
	return l
}

// SetFrom sets the time from which on a request counts as slow.
func (l *slowLog) SetFrom(from time.Duration) { l.from.Store(int64(from)) }

// Note records a request that was received at began and answered at `at`. A request that is not slow costs two atomic loads. The id is
// copied.
func (l *slowLog) Note(operation fmt.Stringer, id []byte, began, at time.Time) {
	took := at.Sub(began)
	if int64(took) < l.from.Load() || int64(took) < l.floor.Load() {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(l.list, slowEntry{operation, string(id[:min(len(id), maxSlowID)]), took, at})
	l.pruneLocked(at)
}

// pruneLocked removes requests that are too old, and the fastest beyond maxSlowRequests.
func (l *slowLog) pruneLocked(now time.Time) {
	l.list = slices.DeleteFunc(l.list, func(e slowEntry) bool { return now.Sub(e.at) > slowFor })
	slices.SortStableFunc(l.list, func(a, b slowEntry) int { return cmp.Compare(b.took, a.took) })
	l.list = l.list[:min(len(l.list), maxSlowRequests)]
	floor := int64(0)
	if len(l.list) == maxSlowRequests {
		floor = int64(l.list[maxSlowRequests-1].took)
	}
	l.floor.Store(floor)
}

// Latest returns the remembered requests, the slowest first. It first removes those that are too old, which would keep faster ones out.
func (l *slowLog) Latest(now time.Time) []SlowRequest {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pruneLocked(now)
	out := make([]SlowRequest, len(l.list))
	for i, e := range l.list {
		out[i] = SlowRequest{Operation: e.operation.String(), Request: e.id, Seconds: e.took.Seconds(), At: e.at.UTC().Format(time.RFC3339)}
	}
	return out
}
