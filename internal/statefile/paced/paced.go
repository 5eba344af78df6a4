// Package paced writes something soon after it has changed, and not too often.
package paced

import (
	"context"
	"sync"
	"time"
)

// rest is how many times as long as a write took nothing is written after it.
const rest = 10

// Writer calls a function that writes what has changed, never twice at a time. Its
// methods are safe for concurrent use.
type Writer struct {
	every time.Duration
	write func()
	wake  chan struct{}

	mu   sync.Mutex // orders the writes
	next time.Time  // not before
	due  bool       // something has changed since the last one
}

// New returns a Writer that calls write once in every at most, and after one that took
// long later.
func New(every time.Duration, write func()) *Writer {
	return &Writer{every: every, write: write, wake: make(chan struct{}, 1)}
}

// Changed writes now, or has Run write soon when that was done just now.
func (w *Writer) Changed() {
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
func (w *Writer) Flush() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.due {
		w.writeLocked()
	}
}

// Run writes, until ctx ends, what could not be written at once.
func (w *Writer) Run(ctx context.Context) {
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

func (w *Writer) wait() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return time.Until(w.next)
}

func (w *Writer) writeLocked() {
	began := time.Now()
	w.due = false
	w.write()
	now := time.Now()
	w.next = now.Add(max(w.every, rest*now.Sub(began)))
}
