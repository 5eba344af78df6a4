// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"time"
)

const (
	// freshFor is how long a descriptor counts as current. The client does not dial by an older descriptor but fetches another one
	// first: the peer may have restarted, and another process may have its old data port.
	freshFor = time.Second

	// failureFor is how long calls to a peer share the failure of one handshake, so that not each call waits for a handshake of its
	// own.
	failureFor = time.Second
)

// fetch is one handshake, on which all calls that want the peer's descriptor wait.
type fetch struct {
	done  chan struct{} // closed at the end
	desc  *Descriptor   // valid when done is closed, like the fields below
	err   error
	ended time.Time
}

// describe returns the cached descriptor of p. Without one, it fetches the descriptor.
func (c *Client) describe(ctx context.Context, p *peer) (*Descriptor, error) {
	if d := p.desc.Load(); d != nil {
		return d, nil
	}
	return c.refresh(ctx, p, nil)
}

// describeNow returns a descriptor of p that is at most freshFor old.
func (c *Client) describeNow(ctx context.Context, p *peer) (*Descriptor, error) {
	d := p.desc.Load()
	if d != nil && time.Since(d.fetched) < freshFor {
		return d, nil
	}
	return c.refresh(ctx, p, d)
}

// refresh fetches the descriptor of p, unless another call has replaced the descriptor `old` meanwhile: then it returns the newer one.
// Concurrent calls share one handshake. Calls in the failureFor after a failed handshake share its failure.
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

// fetch returns the handshake in progress, or the one that has just failed. If there is neither, it begins a handshake. The caller must
// have entered p.
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
