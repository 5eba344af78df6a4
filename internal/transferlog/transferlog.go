// SPDX-License-Identifier: Apache-2.0

// Package transferlog remembers, in bounded memory, the last transfers of KV from P to D, to be shown to people: each transfer step by
// step, as a relay or a proxy saw it.
package transferlog

import (
	"cmp"
	"errors"
	"slices"
	"sync"
	"time"
)

// Limits of a Log. The texts in it take less than 64 KiB.
const (
	Max      = 64  // transfers; see Begin
	maxText  = 128 // bytes of each id, address and model; longer ones are cut
	maxWhy   = 256 // bytes of a reason; a longer one is cut
	maxSteps = 6   // steps of a transfer; further ones are not recorded
)

// State is the state of a transfer.
type State string

// The states of a transfer. It ends as Done, Failed or Expired.
const (
	Computing State = "computing" // P has sent nothing yet: it computes this request, or requests before it
	Waiting   State = "waiting"   // P is ready, but D has not taken the KV
	Sending   State = "sending"
	Done      State = "done"
	Failed    State = "failed"
	Expired   State = "expired" // it was not done in its time
)

// Running reports whether a transfer in that state has not ended.
func (s State) Running() bool { return s == Computing || s == Waiting || s == Sending }

// Step is a part of the time of a transfer.
type Step struct {
	State State   `json:"state"` // computing, waiting or sending
	What  string  `json:"what"`
	From  float64 `json:"from_ms"` // when the step began, since the transfer began
	MS    float64 `json:"ms"`      // duration; of the last step of a running transfer: so far
	Bytes int64   `json:"bytes"`   // bytes sent, so far
}

// Transfer is one transfer to one worker of D.
type Transfer struct {
	ID      string  `json:"transfer_id"`
	Request string  `json:"request_id"` // the client's request id, if a proxy knows it; else D's
	Model   string  `json:"model_name"` // empty: unknown
	From    string  `json:"from"`       // name of P
	To      string  `json:"to"`         // name of D
	Rank    string  `json:"rank"`       // rank of D's worker, if D has several
	Source  string  `json:"source"`     // where the KV came from: P, memory, prefix and P; empty: unknown
	State   State   `json:"state"`
	Why     string  `json:"why"` // why the transfer failed
	At      float64 `json:"at_ms"`
	MS      float64 `json:"ms"`       // duration, so far
	Blocks  int     `json:"blocks"`   // 0: unknown
	Bytes   int64   `json:"bytes"`    // bytes that D asked for; 0: unknown
	Rate    float64 `json:"gb_per_s"` // of the last step that sent bytes; 0: unknown
	Steps   []Step  `json:"steps"`
}

// Log remembers transfers. Its methods are safe for concurrent use. A nil *Log remembers nothing.
type Log struct {
	mu   sync.Mutex // a leaf: no other lock is taken under it
	list []*Entry   // oldest first
}

// Entry is one transfer in a Log. Its methods are safe for concurrent use. A nil *Entry accepts all calls and remembers nothing.
type Entry struct {
	log *Log

	// Guarded by log.mu.
	t     Transfer
	steps []step
	end   time.Time // zero while the transfer runs
}

type step struct {
	state    State
	what     string
	at       time.Time
	progress func() (first time.Time, bytes uint64) // nil: the progress is unknown
	bytes    int64                                  // set when the step has ended
}

// Begin adds a transfer that begins now with its first step, in the given state and with the name `what`. A full Log drops its oldest ended
// transfer; if all transfers are running, it drops the oldest.
func (l *Log) Begin(t Transfer, state State, what string) *Entry {
	if l == nil {
		return nil
	}
	for _, s := range []*string{&t.ID, &t.Request, &t.Model, &t.From, &t.To, &t.Rank} {
		*s = cut(*s, maxText)
	}
	e := &Entry{log: l, t: t, steps: []step{{state: state, what: what, at: time.Now()}}}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.list) >= Max {
		gone := max(0, slices.IndexFunc(l.list, func(e *Entry) bool { return !e.end.IsZero() }))
		l.list = slices.Delete(l.list, gone, gone+1)
	}
	l.list = append(l.list, e)
	return e
}

// cut returns a copy of the first n bytes of a text.
func cut(s string, n int) string { return string([]byte(s[:min(n, len(s))])) }

// From records where the KV came from.
func (e *Entry) From(source string) {
	if e == nil {
		return
	}
	e.log.mu.Lock()
	defer e.log.mu.Unlock()
	e.t.Source = source
}

// To records the name of the D that should get the KV.
func (e *Entry) To(d string) {
	if e == nil {
		return
	}
	e.log.mu.Lock()
	defer e.log.mu.Unlock()
	e.t.To = cut(d, maxText)
}

// Receiving adds a step of sending with the name `what`, which begins with P's first byte. progress returns the time of that byte and the
// number of bytes so far; it must not take locks.
func (e *Entry) Receiving(what string, progress func() (first time.Time, bytes uint64)) {
	if e == nil {
		return
	}
	e.log.mu.Lock()
	defer e.log.mu.Unlock()
	if e.end.IsZero() && len(e.steps) < maxSteps {
		e.steps = append(e.steps, step{state: Sending, what: what, progress: progress})
	}
}

// Next ends the current step and begins the next one, in the given state and with the name `what`. progress returns when that step's first
// byte came and the number of bytes so far; nil means that this is unknown. It must not take locks.
func (e *Entry) Next(state State, what string, progress func() (first time.Time, bytes uint64)) {
	if e == nil {
		return
	}
	e.log.mu.Lock()
	defer e.log.mu.Unlock()
	if !e.end.IsZero() || len(e.steps) >= maxSteps {
		return
	}
	e.settleLocked()
	e.steps = append(e.steps, step{state: state, what: what, at: time.Now(), progress: progress})
}

// End records how the transfer ended. Only the first call has an effect.
func (e *Entry) End(state State, why string) {
	if e == nil {
		return
	}
	e.log.mu.Lock()
	defer e.log.mu.Unlock()
	if !e.end.IsZero() {
		return
	}
	e.settleLocked()
	e.t.State, e.t.Why, e.end = state, cut(why, maxWhy), time.Now()
}

// Finish ends the transfer by the error err: nil gives Done, an error of `late` gives Expired, any other gives Failed.
func (e *Entry) Finish(err error, late ...error) {
	switch {
	case err == nil:
		e.End(Done, "")
	case slices.ContainsFunc(late, func(l error) bool { return errors.Is(err, l) }):
		e.End(Expired, err.Error())
	default:
		e.End(Failed, err.Error())
	}
}

// settleLocked stores the progress of all steps. Their progress functions are not called any more after that.
func (e *Entry) settleLocked() { e.steps = begun(e.steps) }

// begun returns those steps that have begun, with the bytes that they have sent.
func begun(steps []step) []step {
	out := make([]step, 0, len(steps)+1)
	for _, s := range steps {
		if s.progress != nil {
			first, n := s.progress()
			if s.at.IsZero() { // a step of Receiving begins with P's first byte
				if first.IsZero() {
					continue
				}
				s.at = first
				if len(out) > 0 && s.at.Before(out[len(out)-1].at) {
					s.at = out[len(out)-1].at // another request had begun the transfer of these bytes before
				}
			}
			s.progress = nil
			if s.state == Sending {
				s.bytes = int64(n)
			}
		}
		out = append(out, s)
	}
	return out
}

// Last returns the transfers, beginning with the one that began last.
func (l *Log) Last() []Transfer {
	if l == nil {
		return nil
	}
	now := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]Transfer, 0, len(l.list))
	for _, e := range slices.Backward(l.list) {
		out = append(out, e.shown(now))
	}
	return out
}

// shown returns the entry as it is at the time `now`. The caller must hold Log.mu.
func (e *Entry) shown(now time.Time) Transfer {
	t, steps, end := e.t, begun(e.steps), cmp.Or(e.end, now)
	t.At = millis(steps[0].at.Sub(time.Unix(0, 0)))
	t.MS = millis(end.Sub(steps[0].at))
	for i, s := range steps {
		until := end
		if i+1 < len(steps) {
			until = steps[i+1].at
		}
		sent := s.bytes
		if t.Bytes > 0 {
			sent = min(sent, t.Bytes) // bytes that were sent twice count only once
		}
		t.Steps = append(t.Steps, Step{s.state, s.what, millis(s.at.Sub(steps[0].at)), max(0, millis(until.Sub(s.at))), sent})
	}
	if last := t.Steps[len(t.Steps)-1]; e.end.IsZero() {
		t.State = last.State
	}
	t.rate()
	return t
}

func millis(d time.Duration) float64 { return float64(d.Round(time.Microsecond)) / 1e6 }

func (t *Transfer) rate() {
	for _, s := range t.Steps {
		if s.State == Sending && s.MS > 0 && s.Bytes > 0 {
			t.Rate = float64(s.Bytes) / s.MS / 1e6
		}
	}
}
