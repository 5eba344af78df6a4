// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"context"
	"fmt"
	"sync"
)

// Req is a REQ socket with one connection: each request waits for its reply before the next request. Its methods are safe for
// concurrent use; concurrent calls of Do run one after the other.
//
// On the wire a message begins with an empty frame, which callers do not see.
type Req struct {
	d      *Dealer
	turn   chan struct{} // one token: the call of Do that holds it may ask
	events chan reqEvent
	broken bool // a call ended before its reply, which may still come; guarded by turn

	mu struct {
		sync.Mutex
		asking bool // a call of Do waits for an event
	}
}

type reqEvent struct {
	m   [][]byte
	err error
}

// NewReq returns a Req that does not connect yet. It does not use o.Handler and o.OnState.
func NewReq(endpoint string, o DealerOptions) *Req {
	r := &Req{turn: make(chan struct{}, 1), events: make(chan reqEvent, 1)}
	o.Handler = func(m Message) {
		if len(m) == 0 || len(m[0]) != 0 {
			r.event(reqEvent{err: fmt.Errorf("%w: reply without an empty first frame", errProtocol)})
			return
		}
		var copied [][]byte
		for _, f := range m[1:] {
			copied = append(copied, append([]byte(nil), f...))
		}
		r.event(reqEvent{m: copied})
	}
	o.OnState = func(up bool, err error) {
		if !up {
			r.event(reqEvent{err: err})
		}
	}
	r.d = makeDealer(endpoint, typeReq, o)
	return r
}

// event gives e to the call of Do in progress, if there is one.
func (r *Req) event(e reqEvent) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.asking {
		r.mu.asking = false
		r.events <- e
	}
}

// Start begins to connect, as Dealer.Start does.
func (r *Req) Start() error { return r.d.Start() }

// Do sends a request and returns the frames of the reply. It fails when the connection cannot be made or is lost, or when ctx ends.
// After such an error the socket can only be closed, because the reply may still come; only a call that ended while it waited for its
// turn does no harm.
func (r *Req) Do(ctx context.Context, frames ...[]byte) ([][]byte, error) {
	select {
	case r.turn <- struct{}{}:
		defer func() { <-r.turn }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if r.broken {
		return nil, ErrClosed
	}
	r.mu.Lock()
	r.mu.asking = true
	r.mu.Unlock()
	if err := r.d.Send(append([][]byte{nil}, frames...)...); err != nil {
		r.broken = true
		return nil, err
	}
	select {
	case e := <-r.events:
		if e.err != nil {
			r.broken = true
		}
		return e.m, e.err
	case <-r.d.stop:
		return nil, ErrClosed
	case <-ctx.Done():
		r.broken = true
		return nil, ctx.Err()
	}
}

// Close drops the connection. Calls of Do return ErrClosed.
func (r *Req) Close() error { return r.d.Close() }
