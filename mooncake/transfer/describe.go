// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"time"
)

const (
	// freshFor is how long a descriptor counts as current. Before the client dials by
	// an older one, it fetches another: the peer may have restarted, and its old data
	// port may be another process's.
	freshFor = time.Second

	// failureFor is how long calls to a peer share the failure of a handshake,
	// instead of each waiting for its own.
	failureFor = time.Second
)

// fetch is one handshake, for all calls that want the peer's descriptor.
type fetch struct {
	done  chan struct{} // closed at the end
	desc  *Descriptor   // valid when done, as are the others
	err   error
	ended time.Time
}

// describe returns the cached descriptor of p, or fetches it.
func (c *Client) describe(ctx context.Context, p *peer) (*Descriptor, error) {
	if d := p.desc.Load(); d != nil {
		return d, nil
	}
	return c.refresh(ctx, p, nil)
}

// describeNow returns a descriptor of p that is fresh.
func (c *Client) describeNow(ctx context.Context, p *peer) (*Descriptor, error) {
	d := p.desc.Load()
	if d != nil && time.Since(d.fetched) < freshFor {
		return d, nil
	}
	return c.refresh(ctx, p, d)
}

// refresh fetches the descriptor unless another call replaced old meanwhile. Calls that
// come together share one handshake, and its failure, for failureFor.
func (c *Client) refresh(ctx context.Context, p *peer, old *Descriptor) (*Descriptor, error) {
	if d := p.desc.Load(); d != nil && d != old {
		return d, nil
	}
	f := c.fetch(p)
	select {
	case <-f.done:
		return f.desc, f.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// fetch returns the handshake under way, or the one that failed just now, or begins
// one. The caller has entered p.
func (c *Client) fetch(p *peer) *fetch {
	p.mu.Lock()
	defer p.mu.Unlock()
	if f := p.mu.fetch; f != nil {
		select {
		case <-f.done:
			if f.err != nil && time.Since(f.ended) < failureFor {
				return f
			}
		default:
			return f
		}
	}
	f := &fetch{done: make(chan struct{})}
	p.mu.fetch = f
	c.wg.Go(func() {
		ctx, cancel := c.handshakeContext(c.base)
		defer cancel()
		c.stats.handshakes.Add(1)
		f.desc, f.err = fetchDescriptor(ctx, p.name, c.opt.Secrets)
		f.ended = time.Now()
		if f.err != nil && c.base.Err() != nil {
			f.err = ErrClosed
		}
		if f.err == nil {
			f.desc.fetched = f.ended
			p.desc.Store(f.desc)
		}
		close(f.done)
	})
	return f
}
