// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"fmt"
)

// WithResolver returns o with names that are looked up by f.
func WithResolver(o Options, f func(ctx context.Context, host string) ([]string, error)) Options {
	o.resolve = f
	return o
}

// StoreID is under what the cache server stands in the index now.
func (p *Proxy) StoreID() uint32 { return p.fleet.store.ids()[0] }

// Taken names what engines have of requests, places and bytes to compute; "": nothing.
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
