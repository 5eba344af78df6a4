// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"fmt"
	"time"
)

// WithResolver returns o with names that are looked up by f.
func WithResolver(o Options, f func(ctx context.Context, host string) ([]string, error)) Options {
	o.resolve = f
	return o
}

// WithModelLooks returns o with d as the least time between two searches for models that no engine lists.
func WithModelLooks(o Options, d time.Duration) Options {
	o.modelLooks = d
	return o
}

// WithPatience returns o with more time for each look, and for requests that wait for one.
func WithPatience(o Options, d time.Duration) Options {
	o.patience = d
	return o
}

// WithPrefillGrace returns o with d for P's leg to end after D's.
func WithPrefillGrace(o Options, d time.Duration) Options {
	o.prefillGrace = d
	return o
}

// StoreID returns the id under which the prefix index has the cache server now.
func (p *Proxy) StoreID() uint32 { return p.fleet.store.ids()[0] }

// Taken lists the engines that have requests in flight or prompt bytes to compute. It is "" when none has.
func (p *Proxy) Taken() (out string) {
	p.fleet.mu.Lock()
	defer p.fleet.mu.Unlock()
	for _, b := range p.fleet.mu.all {
		if b.inFlight != 0 || b.pending != 0 {
			out += fmt.Sprintf("%s %s: %d requests, %d bytes; ", b.role, b.url, b.inFlight, b.pending)
		}
	}
	return out
}

// Problem returns why an engine of SGLang gets no requests.
func (p *Proxy) Problem(url string) string {
	for _, b := range p.fleet.engines() {
		if b.url == url {
			b.looking.Lock()
			defer b.looking.Unlock()
			return b.problem()
		}
	}
	return ""
}
