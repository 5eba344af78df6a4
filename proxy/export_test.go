package proxy

import "context"

// WithResolver returns o with names that are looked up by f.
func WithResolver(o Options, f func(ctx context.Context, host string) ([]string, error)) Options {
	o.resolve = f
	return o
}

// StoreID is under what the cache server stands in the index now.
func (p *Proxy) StoreID() uint32 { return p.fleet.store.ids()[0] }
