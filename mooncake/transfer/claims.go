// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"slices"
	"sync"
)

// claims are the ranges that one connection touches now: at most one that it writes,
// and those of read replies that the kernel does not have yet.
type claims struct {
	table *Table // immutable
	cut   func() // immutable: breaks the connection, so that it releases its claims

	mu struct { // a leaf
		sync.Mutex
		write Range // Len 0: none
		reads []Range
		free  chan struct{} // closed at the next release; nil without waiters
	}
}

// refusal is why the table refused a claim.
type refusal int

const (
	granted refusal = iota
	refusedAddress
	refusedFence
)

func (t *Table) newClaims(cut func()) *claims {
	c := &claims{table: t, cut: cut}
	t.mu.Lock()
	t.mu.users[c] = struct{}{}
	t.mu.Unlock()
	return c
}

// drop forgets the claims. The connection touches no region afterwards.
func (c *claims) drop() {
	c.release()
	c.table.mu.Lock()
	delete(c.table.mu.users, c)
	c.table.mu.Unlock()
}

// claimWrite allows the write of at until releaseWrite.
func (c *claims) claimWrite(at Range) (*Region, refusal) {
	c.mu.Lock()
	c.mu.write = at
	c.mu.Unlock()
	c.table.order.Load()
	r := c.table.view.Load().find(at) // after the claim: see Table
	switch {
	case r == nil || r.mem == nil && r.dst == nil:
		c.releaseWrite()
		return nil, refusedAddress
	case r.isClosed(at):
		c.releaseWrite()
		return nil, refusedFence
	}
	return r, granted
}

// claimRead allows reads of at until releaseReads.
func (c *claims) claimRead(at Range) (*Region, refusal) {
	c.mu.Lock()
	c.mu.reads = append(c.mu.reads, at)
	c.mu.Unlock()
	c.table.order.Load()
	r := c.table.view.Load().find(at)
	if r == nil || r.mem == nil && r.src == nil {
		return nil, refusedAddress // the claim falls with the connection
	}
	return r, granted
}

func (c *claims) releaseWrite() {
	c.table.order.Add(1)
	c.mu.Lock()
	c.mu.write = Range{}
	c.wakeLocked()
	c.mu.Unlock()
}

func (c *claims) releaseReads() {
	c.mu.Lock()
	c.mu.reads = c.mu.reads[:0]
	c.wakeLocked()
	c.mu.Unlock()
}

func (c *claims) release() {
	c.releaseWrite()
	c.releaseReads()
}

func (c *claims) wakeLocked() {
	if c.mu.free != nil {
		close(c.mu.free)
		c.mu.free = nil
	}
}

// touches returns nil when no claim overlaps the ranges, which are sorted and
// disjoint, else a channel that is closed when a claim ends.
func (c *claims) touches(ranges []Range, reads bool) <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	hit := func(at Range) bool {
		// A refused claim may be impossible for an instant; it overlaps nothing.
		return at.valid() && meets(ranges, at)
	}
	if !hit(c.mu.write) && (!reads || !slices.ContainsFunc(c.mu.reads, hit)) {
		return nil
	}
	if c.mu.free == nil {
		c.mu.free = make(chan struct{})
	}
	return c.mu.free
}

// drain returns when none of users touches the ranges. Once ctx is done it cuts the
// connections of those that still do and waits for their release.
func drain(ctx context.Context, users []*claims, ranges []Range, reads bool) (cut int) {
	for _, c := range users {
		done := ctx.Done()
		for {
			free := c.touches(ranges, reads)
			if free == nil {
				break
			}
			select {
			case <-free:
			case <-done:
				c.cut()
				cut++
				done = nil // once is enough
			}
		}
	}
	return cut
}
