// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/internal/http1"
)

// engineAnswer is the answer of an engine that failed, or has no room. Another engine may succeed.
type engineAnswer struct {
	engine *backend
	status int
	fields []http1.Field
	text   []byte
}

func (a *engineAnswer) Error() string {
	return fmt.Sprintf("%s: status %d: %.200s", a.engine.url, a.status, a.text)
}

// Unwrap returns errNoRoom for an engine without room, which has not failed; otherwise errFailed.
func (a *engineAnswer) Unwrap() error {
	if a.noRoom() {
		return errNoRoom
	}
	return errFailed
}

// noRoom reports whether the answer says only that the engine has no room (status 429 or 503): then the engine does not count as failed.
func (a *engineAnswer) noRoom() bool {
	return a.status == http.StatusTooManyRequests || a.status == http.StatusServiceUnavailable
}

// errNoRoom means that an engine has no room for the request and has computed nothing for it.
var errNoRoom = errors.New("the engine has no room")

// isEngineAnswer reports whether a status means that the engine, and not the request, is at fault: 5xx or 429.
func isEngineAnswer(status int) bool {
	return status >= 500 || status == http.StatusTooManyRequests
}

// attempts holds the answers of engines to failed attempts of one request.
type attempts struct {
	full   *engineAnswer // the first one without room
	failed *engineAnswer // the last failure
}

// mayRetry decides whether there is another attempt after one that failed with err. If there is none, answer is the engine's answer
// that the client gets; nil: the client gets err.
func (e *exchange) mayRetry(err error) (again bool, answer *engineAnswer) {
	a, _ := errors.AsType[*engineAnswer](err)
	switch {
	case a == nil:
	case a.noRoom():
		if e.answered.full == nil {
			e.answered.full = a
		}
		if !e.p.fleet.hasUntried(a.engine.role, &e.want) {
			return false, e.answered.full
		}
	case e.answered.failed != nil && e.answered.failed.engine != a.engine && e.answered.failed.status == a.status:
		// Two engines fail in the same way: the request is at fault, not the engines.
		e.p.fleet.succeeded(a.engine)
		e.p.fleet.succeeded(e.answered.failed.engine)
		return false, a
	default:
		e.answered.failed = a
	}
	switch {
	case e.attempts >= e.p.o.Attempts, errors.Is(err, errLate): // after errLate another engine would start from the beginning, and take as long
	case errors.Is(err, errNotSent), errors.Is(err, errNoRoom): // nothing was computed, so the retry is free
		return true, nil
	default:
		if e.p.budget.take(time.Now()) {
			return true, nil
		}
		e.p.o.Log.Debug("no further attempt: too many requests were tried again in the last minute", "request", e.id)
	}
	if a != nil && a.noRoom() {
		return false, e.answered.full
	}
	return false, nil
}

// sayAnswer sends the client the answer of an engine to a failed attempt.
func (e *exchange) sayAnswer(a *engineAnswer) (outcome string) {
	outcome = "failed"
	if a.noRoom() {
		outcome = "refused"
	}
	if e.front.seal() {
		_ = e.endEarlyAs(a.status, a.text) // the outcome is that of the engine's answer
		return outcome
	}
	e.head(a.fields, a.status, len(a.text))
	_, _ = e.w.Write(a.text) // the client has gone
	return outcome
}

// Among the requests of the last minute, at most one in retryShare may be a retry; minRetries are always allowed.
const (
	retryShare = 10 // one in so many
	minRetries = 10 // of the last minute
	budgetTime = 60 // how long a request counts, in seconds
)

// budget counts requests, and those retries that compute again what another engine had begun. It bounds these retries, so that the
// failure of many engines does not multiply the load of the others.
type budget struct {
	mu struct {
		sync.Mutex
		slots [budgetTime]struct{ requests, retries int } // one slot per second
		last  int64                                       // second of the newest slot
	}
}

// slotLocked returns the slot of the second of now, and clears the slots that are older than a minute.
func (b *budget) slotLocked(now time.Time) *struct{ requests, retries int } {
	second := now.Unix()
	for s := max(b.mu.last, second-budgetTime); s < second; s++ {
		b.mu.slots[(s+1)%budgetTime] = struct{ requests, retries int }{}
	}
	b.mu.last = max(b.mu.last, second)
	return &b.mu.slots[b.mu.last%budgetTime]
}

// request counts a client's request, which may allow more retries.
func (b *budget) request(now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.slotLocked(now).requests++
}

// take counts a retry and returns true. It returns false, and counts nothing, if there were too many.
func (b *budget) take(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	slot := b.slotLocked(now)
	requests, retries := 0, 0
	for _, s := range b.mu.slots {
		requests, retries = requests+s.requests, retries+s.retries
	}
	if retries >= max(minRetries, requests/retryShare) {
		return false
	}
	slot.retries++
	return true
}

// circuit stops requests to an engine that fails several in a row, for a pause that grows. After the pause, one request tests the
// engine. It is guarded by fleet.mu.
type circuit struct {
	failures int           // failures in a row
	pause    time.Duration // length of the present pause; 0: the engine gets requests
	until    time.Time     // end of the pause
	probe    bool          // a request tests the engine now
}

const (
	maxFailures = 5           // failures in a row that begin a pause
	firstPause  = time.Second // each further pause is twice as long
	maxPause    = time.Minute // the longest pause
)

// open reports whether the engine must get no request now.
func (c *circuit) open(now time.Time) bool { return c.pause > 0 && (c.probe || now.Before(c.until)) }

func (c *circuit) failed(now time.Time) {
	c.failures++
	switch {
	case c.pause > 0 && (c.probe || !now.Before(c.until)):
		c.pause = min(2*c.pause, maxPause)
	case c.pause == 0 && c.failures >= maxFailures:
		c.pause = firstPause
	default:
		return
	}
	c.probe, c.until = false, now.Add(c.pause)
}

// failed records that an engine failed a request.
func (f *fleet) failed(b *backend) {
	f.mu.Lock()
	was := b.circuit.pause
	b.circuit.failed(time.Now())
	pause := b.circuit.pause
	f.mu.Unlock()
	if pause != was {
		f.o.Log.Warn("an engine fails requests one after the other: it gets none for a while, unless it is the only one", "engine", b.url, "pause", pause)
	}
}

// paused reports whether an engine gets no requests now because it failed earlier ones.
func (f *fleet) paused(b *backend) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return b.circuit.open(time.Now())
}

// succeeded records that an engine has answered a request, or that the request was at fault for its failure. The engine's failures are
// forgotten.
func (f *fleet) succeeded(b *backend) {
	f.mu.Lock()
	defer f.mu.Unlock()
	b.circuit = circuit{}
}

// judge records, by the error of a call, whether an engine succeeded or failed.
func (e *exchange) judge(b *backend, err error) {
	switch {
	case err == nil, errors.Is(err, errNoRoom):
		e.p.fleet.succeeded(b)
	case e.r.Context().Err() != nil, errors.Is(err, errLate):
	case errors.Is(err, errFailed), errors.Is(err, errLost), errors.Is(err, errNotSent), errors.Is(err, errEmptyAnswer):
		e.p.fleet.failed(b)
	}
}

// hasUntried reports whether an engine of role r that has not been tried could take the request.
func (f *fleet) hasUntried(r role, w *needs) bool {
	return slices.ContainsFunc(f.engines(), func(b *backend) bool {
		return w.of(b, r) && b.well.Load() && !b.draining.Load() && !slices.Contains(w.tried, b)
	})
}
