// Package slowlog remembers the slowest requests of the last minutes, in bounded memory.
package slowlog

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Request is a request that took long to be answered.
type Request struct {
	Operation string  `json:"operation"`
	Request   string  `json:"request_id,omitempty"` // of the engine, where the operation has one
	Seconds   float64 `json:"seconds"`
	At        string  `json:"at"` // of the answer, RFC 3339
}

// Limits of a Log: MaxRequests of them, with MaxID bytes of each id, take less than 8 KiB.
const (
	MaxRequests = 32
	MaxID       = 128
	keptFor     = 10 * time.Minute
)

type entry struct {
	operation fmt.Stringer
	id        string
	took      time.Duration
	at        time.Time
}

// Log remembers the slowest requests of ten minutes. Methods are safe for concurrent use.
type Log struct {
	from  atomic.Int64 // ns: what took less is not slow
	floor atomic.Int64 // ns: what took less has no place
	mu    sync.Mutex
	list  []entry // the slowest first
}

// New returns a Log of requests that took at least from.
func New(from time.Duration) *Log {
	l := new(Log)
	l.SetFrom(from)
	return l
}

// SetFrom sets what counts as slow.
func (l *Log) SetFrom(from time.Duration) { l.from.Store(int64(from)) }

// Note takes a request that began then and was answered at a time. What is not slow costs two atomic
// loads. The id is copied.
func (l *Log) Note(operation fmt.Stringer, id []byte, began, at time.Time) {
	took := at.Sub(began)
	if int64(took) < l.from.Load() || int64(took) < l.floor.Load() {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(l.list, entry{operation, string(id[:min(len(id), MaxID)]), took, at})
	l.pruneLocked(at)
}

// pruneLocked forgets what is old, and the fastest of too many.
func (l *Log) pruneLocked(now time.Time) {
	l.list = slices.DeleteFunc(l.list, func(e entry) bool { return now.Sub(e.at) > keptFor })
	slices.SortStableFunc(l.list, func(a, b entry) int { return cmp.Compare(b.took, a.took) })
	l.list = l.list[:min(len(l.list), MaxRequests)]
	floor := int64(0)
	if len(l.list) == MaxRequests {
		floor = int64(l.list[MaxRequests-1].took)
	}
	l.floor.Store(floor)
}

// Latest returns what is remembered, the slowest first. It also makes room that old
// requests took: who never asks keeps what was slowest.
func (l *Log) Latest(now time.Time) []Request {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pruneLocked(now)
	out := make([]Request, len(l.list))
	for i, e := range l.list {
		out[i] = Request{Operation: e.operation.String(), Request: e.id, Seconds: e.took.Seconds(), At: e.at.UTC().Format(time.RFC3339)}
	}
	return out
}
