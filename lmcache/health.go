// SPDX-License-Identifier: Apache-2.0

package lmcache

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// HealthOptions configures a Health. A zero field means its default.
type HealthOptions struct {
	Interval time.Duration // time between pings, and the longest time of each; default 10 s

	// Ping asks the server whether it is well. False, without an error, means
	// that it does not know the caller.
	Ping func(context.Context) (bool, error)
	// Recover, if set, prepares for a server that may have forgotten everything, for example by registering a worker again. It runs when an
	// unhealthy server answers true, and at once when a server answers false.
	Recover func(context.Context) error
	// Changed, if set, is called at each change of the state, on the goroutine that runs Run. why is the error that made the server
	// unhealthy.
	Changed func(healthy bool, why error)
}

// Health is a heartbeat. The server is healthy until a ping fails, and becomes healthy again when a ping and Recover succeed.
//
// After an answer of false LMCache's client waits for the next true; Health recovers at once.
type Health struct {
	o       HealthOptions
	healthy atomic.Bool
	poke    chan struct{}

	mu struct {
		sync.Mutex
		up     context.Context // ends when the server turns unhealthy
		cancel context.CancelCauseFunc
	}
}

// ErrUnhealthy is the cause of the end of Health.Context after a failed ping.
var ErrUnhealthy = errors.New("lmcache: server is unhealthy")

// NewHealth returns a Health that counts as healthy and has not pinged yet.
func NewHealth(o HealthOptions) *Health {
	if o.Interval == 0 {
		o.Interval = 10 * time.Second
	}
	h := &Health{o: o, poke: make(chan struct{}, 1)}
	h.mu.up, h.mu.cancel = context.WithCancelCause(context.Background())
	h.healthy.Store(true)
	return h
}

// Healthy reports whether the server is healthy.
func (h *Health) Healthy() bool { return h.healthy.Load() }

// Context returns a context that ends when the server becomes unhealthy. Calls that must not outlive a broken server derive their context
// from it.
func (h *Health) Context() context.Context {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.mu.up
}

// Poke makes Run ping now instead of at the next tick.
func (h *Health) Poke() {
	select {
	case h.poke <- struct{}{}:
	default:
	}
}

// Run pings at each tick until ctx ends. The end of ctx also ends Context.
func (h *Health) Run(ctx context.Context) {
	tick := time.NewTicker(h.o.Interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			h.mu.Lock()
			h.mu.cancel(context.Cause(ctx))
			h.mu.Unlock()
			return
		case <-tick.C:
		case <-h.poke:
		}
		h.Beat(ctx)
	}
}

// Beat pings once and updates the state. Only one goroutine may call it: the one that runs Run, or calls Beat in place of Run.
func (h *Health) Beat(ctx context.Context) {
	err := h.beat(ctx)
	if ctx.Err() != nil {
		return // a late answer must not register a worker that is closing
	}
	was := h.healthy.Load()
	switch {
	case err != nil && was:
		h.healthy.Store(false)
		h.mu.Lock()
		h.mu.cancel(fmt.Errorf("%w: %w", ErrUnhealthy, err))
		h.mu.Unlock()
	case err == nil && !was:
		h.mu.Lock()
		h.mu.up, h.mu.cancel = context.WithCancelCause(context.Background())
		h.mu.Unlock()
		h.healthy.Store(true)
	}
	if healthy := err == nil; healthy != was && h.o.Changed != nil {
		h.o.Changed(healthy, err)
	}
}

func (h *Health) beat(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, h.o.Interval)
	defer cancel()
	known, err := h.o.Ping(ctx)
	if err != nil {
		return err
	}
	switch {
	case known && h.healthy.Load():
		return nil
	case h.o.Recover != nil:
		return h.o.Recover(ctx)
	case !known:
		return errUnknown
	}
	return nil
}

var errUnknown = errors.New("lmcache: the server does not know this worker")
