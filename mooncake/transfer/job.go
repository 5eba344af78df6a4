// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"syscall"
)

// job is one batch in progress, on one or more lanes. The client reuses jobs.
type job struct {
	ctx     context.Context
	write   bool
	entries []Entry
	sent    *Progress // counts the bytes that the peer has confirmed
	plan    plan
	wg      sync.WaitGroup // of all lanes but the first

	mu struct {
		sync.Mutex
		errs []error // nil while nothing failed
	}
}

// outcome says how far a lane came with a run of requests.
type outcome struct {
	done      int   // leading requests that the peer has answered
	started   int   // leading requests of which the peer may have seen bytes; >= done
	err       error // nil: all done
	unsettled bool  // the peer may still apply requests[done:started]
	refused   []int // indices of answered requests that the peer refused while the connection went on
}

// errRefused means that the peer refused request outcome.done and ended the connection.
var errRefused = errors.New("request refused")

func (c *Client) call(ctx context.Context, name string, entries []Entry, write bool, sent *Progress) error {
	p, err := c.enter(name)
	if err != nil {
		return err
	}
	defer c.leave(p)
	if err := ctx.Err(); err != nil {
		return err
	}
	j := c.jobs.Get().(*job)
	j.ctx, j.write, j.entries, j.sent = ctx, write, entries, sent
	defer func() {
		j.ctx, j.entries, j.sent, j.mu.errs = nil, nil, nil, nil
		c.jobs.Put(j)
	}()
	if err := j.plan.build(entries); err != nil || len(j.plan.order) == 0 {
		return err
	}
	l, err := c.lane(ctx, p)
	if err != nil {
		return err
	}
	desc, err := c.describe(ctx, p)
	if err != nil {
		p.put(l)
		return err
	}
	c.spread(j, p, l, desc)
	if j.mu.errs != nil {
		return &BatchError{Errs: j.mu.errs}
	}
	return nil
}

// engineLanes is the largest number of connections that a batch uses to a C++ engine. One thread of the engine serves all of them: with
// more connections, it finds less of each body when it looks, and reads in smaller pieces.
const engineLanes = 2

// spread runs the job on the lane l. If the batch is large, it also uses other lanes of p that are free.
func (c *Client) spread(j *job, p *peer, l *lane, desc *Descriptor) {
	want := 1 + j.plan.bytes/uint64(c.opt.SplitBytes)
	switch {
	case !desc.acked(): // each request waits until its own connection ends
		want = uint64(len(j.plan.order))
	case !desc.Keeps:
		want = min(want, engineLanes)
	}
	want = min(want, uint64(c.opt.Conns))
	var more []*lane
	for uint64(len(more)) < want-1 {
		m := p.try()
		if m == nil {
			break
		}
		more = append(more, m)
	}
	limit := uint64(maxRun)
	if n := uint64(len(more)) + 1; n > 1 {
		limit = max(j.plan.bytes/n+1, writeStep)
	}
	j.plan.cut(j.entries, limit)
	own := j.plan.reqs
	if len(more) > 0 {
		shares := share(j.plan.reqs, len(more)+1, j.plan.bytes)
		own = shares[0]
		for i, m := range more[:len(shares)-1] {
			j.wg.Go(func() { m.run(j, shares[i+1]) })
		}
	}
	l.run(j, own)
	j.wg.Wait()
	for _, m := range more {
		p.put(m)
	}
	p.put(l)
}

// count adds to Progress what the peer confirmed since the request `from`. It returns o.done.
func (j *job) count(reqs []request, from int, o outcome) int {
	if j.sent != nil {
		for i := from; i < o.done; i++ {
			if !slices.Contains(o.refused, i) {
				j.sent.confirmed(reqs[i].size)
			}
		}
	}
	return o.done
}

// fail records err as the result of all entries of reqs. An entry that already has an ErrUnsettled keeps it.
func (j *job) fail(reqs []request, err error) {
	if len(reqs) == 0 {
		return // the run was given up, but all of it is confirmed
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.mu.errs == nil {
		j.mu.errs = make([]error, len(j.entries))
	}
	for _, r := range reqs {
		for _, k := range j.plan.order[r.first:r.last] {
			// Parts of one entry may fail with different errors; ErrUnsettled stays.
			if old := j.mu.errs[k.index]; old == nil || !errors.Is(old, ErrUnsettled) {
				j.mu.errs[k.index] = err
			}
		}
	}
}

// failRest records errors for the requests of a run that cannot go on after o.done.
func (j *job) failRest(reqs []request, o outcome) {
	if o.unsettled && o.started > o.done {
		j.fail(reqs[o.done:o.started], fmt.Errorf("%w: %w", ErrUnsettled, o.err))
		j.fail(reqs[o.started:], o.err)
		return
	}
	j.fail(reqs[o.done:], o.err)
}

// broken reports whether err means that the peer has closed or reset the connection. A timeout does not count.
func broken(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) ||
		errors.Is(err, syscall.ENOTCONN) // from ending our direction of a connection that was reset
}

// public turns an error of a lane into the error that callers of the Client see.
func (c *Client) public(err error) error {
	switch {
	case c.base.Err() != nil || errors.Is(err, net.ErrClosed):
		return ErrClosed
	case broken(err):
		return fmt.Errorf("%w: %w", ErrLost, err)
	}
	return err
}
