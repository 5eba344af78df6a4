// SPDX-License-Identifier: Apache-2.0

package bootstrap

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"time"
)

// directory is the encoded answer to GET /query at one version of the registry. It is immutable, so requests read it without a lock.
type directory struct {
	version uint64 // of the registry when this directory was encoded
	stale   bool   // the first directory of a process, which was not encoded from the registry
	gen     uint64 // grows when body changes
	body    []byte
	engines []shown
	hidden  []string      // for each engine that is not shown, the reason
	changed chan struct{} // closed when a later directory has another body
}

// shown describes one engine that a directory shows; waiting requests are compared with it.
type shown struct {
	id           string
	dp, tp       int
	ppMin, ppMax int
}

// current returns the current directory. Only the first call after a change of the registry encodes it anew.
func (r *Registry) current() *directory {
	d := r.last.Load()
	if d.version == r.version.Load() && !d.stale {
		return d
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.encodeLocked()
}

func (r *Registry) encodeLocked() *directory {
	old := r.last.Load()
	if old.version == r.version.Load() && !old.stale {
		return old
	}
	d := &directory{version: r.version.Load(), gen: old.gen, changed: old.changed, body: make([]byte, 0, len(old.body)+256)}
	now := time.Now()
	d.body = append(d.body, '{')
	for _, e := range r.mu.engines {
		ok, why := e.shown(now, r.o.TP, r.o.PP)
		if !ok {
			d.hidden = append(d.hidden, fmt.Sprintf("engine %q of dp_rank %d: %s", e.id, e.dp, why))
			continue
		}
		if len(d.engines) > 0 {
			d.body = append(d.body, ',')
		}
		d.body = e.appendJSON(d.body)
		s := shown{id: e.id, dp: e.dp, tp: len(e.rows), ppMin: len(e.rows[0].workers)}
		for _, row := range e.rows {
			s.ppMin, s.ppMax = min(s.ppMin, len(row.workers)), max(s.ppMax, len(row.workers))
		}
		d.engines = append(d.engines, s)
	}
	d.body = append(d.body, '}')
	if old.stale || !bytes.Equal(d.body, old.body) || len(d.hidden) != len(old.hidden) {
		d.gen++
		d.changed = make(chan struct{})
		defer close(old.changed)
	}
	r.last.Store(d)
	return d
}

// notifyWaiters runs until the registry closes. After changes it wakes the requests that wait for another directory.
func (r *Registry) notifyWaiters() {
	for {
		select {
		case <-r.closing:
			return
		case <-r.changed:
		}
		if r.waiters.Taken() > 0 {
			r.current()
		}
	}
}

// expectation is what a request demands of the directory before it is answered. Zero fields demand nothing.
type expectation struct {
	engineID string // this engine is shown
	tp, pp   int    // number of TP ranks of that engine, or of every engine, and of PP ranks of each
	dp       int    // number of engines
	after    uint64 // the directory's generation is greater
}

// missing returns a text that says which demand of x the directory d does not meet, with the actual and the expected value; "" if d
// meets all but x.after.
func (d *directory) missing(x expectation) string {
	reason := func(format string, args ...any) string {
		s := fmt.Sprintf(format, args...)
		for i, h := range d.hidden {
			if s += "; not shown: " + h; i == 3 {
				break
			}
		}
		return s
	}
	if x.dp > 0 && len(d.engines) != x.dp {
		return reason("%d engines are shown, expected dp=%d", len(d.engines), x.dp)
	}
	if len(d.engines) == 0 {
		return reason("no engine is shown")
	}
	found := false
	for _, e := range d.engines {
		if x.engineID != "" && e.id != x.engineID {
			continue
		}
		found = true
		switch {
		case x.tp > 0 && e.tp != x.tp:
			return reason("engine %q of dp_rank %d has %d TP ranks, expected tp=%d", e.id, e.dp, e.tp, x.tp)
		case x.pp > 0 && (e.ppMin != x.pp || e.ppMax != x.pp):
			return reason("engine %q of dp_rank %d has from %d to %d PP ranks, expected pp=%d", e.id, e.dp, e.ppMin, e.ppMax, x.pp)
		}
	}
	if !found {
		return reason("engine %q is not shown", x.engineID)
	}
	return ""
}

// wait returns the first directory that meets x, and "". If none has come after the time atMost, or the request or the server ends first,
// wait returns the current directory and a text that says which demand of x is not met. That text is "" if only x.after is not met after
// atMost.
func (r *Registry) wait(ctx context.Context, x expectation, atMost time.Duration) (*directory, string) {
	timer := time.NewTimer(atMost)
	defer timer.Stop()
	for {
		d := r.current()
		missing := d.missing(x)
		if missing == "" && d.gen > x.after {
			return d, ""
		}
		select {
		case <-d.changed:
		case <-timer.C:
			return d, missing
		case <-ctx.Done():
			return d, cmp.Or(missing, "the request ended: "+context.Cause(ctx).Error())
		case <-r.draining:
			return d, cmp.Or(missing, "the server is stopping")
		}
	}
}
