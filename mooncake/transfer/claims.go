// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"slices"
	"sync"
)

// claims are the ranges that one data connection touches now: at most one range that it writes, and the ranges of read replies that it
// has not yet given to the kernel.
type claims struct {
	table *Table // immutable
	cut   func() // breaks the connection, so that it releases its claims; immutable

	mu struct { // a leaf: no other lock is taken under it
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

// drop removes the connection's claims from the table. The connection must touch no region afterwards.
func (c *claims) drop() {
	c.release()
	c.table.mu.Lock()
	delete(c.table.mu.users, c)
	c.table.mu.Unlock()
}

// claimWrite asks for the right to write the range `at`, which ends with releaseWrite. It returns the region that has the range and granted,
// or nil and the reason of the refusal.
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

// claimRead asks for the right to read the range `at`, which ends with releaseReads. It returns the region that has the range and granted,
// or nil and the reason of the refusal.
func (c *claims) claimRead(at Range) (*Region, refusal) {
	c.mu.Lock()
	c.mu.reads = append(c.mu.reads, at)
	c.mu.Unlock()
	c.table.order.Load()
	r := c.table.view.Load().find(at)
	if r == nil || r.mem == nil && r.src == nil {
		return nil, refusedAddress // the claim ends when the connection ends
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

// touches returns nil when none of c's claims overlaps the ranges, which are sorted and disjoint. Otherwise it returns a channel that
// closes when one of c's claims ends. If `reads` is true, claims of reads count, too.
func (c *claims) touches(ranges []Range, reads bool) <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	hit := func(at Range) bool {
		// A refused claim may have an impossible range for a moment; it overlaps nothing.
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

// drain waits until no connection of users writes to the ranges or, if `reads` is true, reads from them. When ctx ends first, it cuts the
// connections that still do and waits until they release their claims. cut is how many it cut.
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
