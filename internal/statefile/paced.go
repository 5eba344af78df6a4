// SPDX-License-Identifier: Apache-2.0

package statefile

import (
	"context"
	"sync"
	"time"
)

// restFactor is how many times as long as a write took nothing is written after it.
const restFactor = 10

// PacedWriter calls a function that writes what has changed: soon, not too often, and never twice at a time. Its
// methods are safe for concurrent use.
type PacedWriter struct {
	every time.Duration
	write func()
	wake  chan struct{}

	mu   sync.Mutex // orders the writes
	next time.Time  // not before
	due  bool       // something has changed since the last one
}

// NewPacedWriter returns a PacedWriter that calls write once in every at most, and after one that took
// long later.
func NewPacedWriter(every time.Duration, write func()) *PacedWriter {
	return &PacedWriter{every: every, write: write, wake: make(chan struct{}, 1)}
}

// Changed writes now, or has Run write soon when that was done just now.
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

// Flush writes what is still to be written.
func (w *PacedWriter) Flush() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.due {
		w.writeLocked()
	}
}

// Run writes, until ctx ends, what could not be written at once.
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
