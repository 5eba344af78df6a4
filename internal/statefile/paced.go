// SPDX-License-Identifier: Apache-2.0

package statefile

import (
	"context"
	"sync"
	"time"
)

// restFactor is the shortest pause after a write, in multiples of the write's duration.
const restFactor = 10

// PacedWriter calls a function that writes changes: soon after a change, but not too often, and never twice at the same time. Its
// methods are safe for concurrent use.
type PacedWriter struct {
	every time.Duration
	write func()
	wake  chan struct{}

	mu   sync.Mutex // held during a write
	next time.Time  // the next write must not begin before that time
	due  bool       // there are changes since the last write
}

// NewPacedWriter returns a PacedWriter that calls write at most once per interval `every`, and less often if a write takes long.
func NewPacedWriter(every time.Duration, write func()) *PacedWriter {
	return &PacedWriter{every: every, write: write, wake: make(chan struct{}, 1)}
}

// Changed writes at once, or, if the last write was too recent, makes Run write soon.
func (w *PacedWriter) Changed() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !time.Now().Before(w.next) {
		w.writeLocked()
		return
	}
	w.due = true
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// Flush writes now if there are unwritten changes.
func (w *PacedWriter) Flush() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.due {
		w.writeLocked()
	}
}

// Run writes the changes that Changed could not write at once, until ctx ends.
func (w *PacedWriter) Run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.wake:
		}
		wait := time.NewTimer(w.wait())
		select {
		case <-ctx.Done():
			wait.Stop()
			return
		case <-wait.C:
			w.Flush()
		}
	}
}

func (w *PacedWriter) wait() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return time.Until(w.next)
}

func (w *PacedWriter) writeLocked() {
	began := time.Now()
	w.due = false
	w.write()
	now := time.Now()
	w.next = now.Add(max(w.every, restFactor*now.Sub(began)))
}
