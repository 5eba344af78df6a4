package bootstrap

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"strconv"
	"time"
)

// directory is one encoded answer of GET /query. It does not change, so requests
// read it without a lock.
type directory struct {
	version uint64   // of the registry when it was encoded
	stale   bool     // encoded from nothing
	gen     uint64   // grows when body changes
	body    []byte   // the end of room
	room    []byte   // headRoom bytes, then body: for the head of a whole answer
	length  []string // header values, ready for http.Header
	genText []string
	engines []shown
	hidden  []string      // why engines are not shown
	changed chan struct{} // closed when a later directory differs
}

// shown is what waiting requests compare with.
type shown struct {
	id           string
	dp, tp       int
	ppMin, ppMax int
}

// current returns the directory of this moment. Only the first call after a
// change encodes.
func (r *Registry) current() *directory {
	d := r.body.Load()
	if d.version == r.version.Load() && !d.stale {
		return d
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.encodeLocked()
}

func (r *Registry) encodeLocked() *directory {
	old := r.body.Load()
	if old.version == r.mu.version && !old.stale {
		return old
	}
	d := &directory{version: r.mu.version, gen: old.gen, changed: old.changed, room: make([]byte, headRoom, headRoom+len(old.body)+256)}
	now := time.Now()
	d.room = append(d.room, '{')
	for _, e := range r.mu.engines {
		ok, why := e.shown(now, r.o.TP, r.o.PP)
		if !ok {
			d.hidden = append(d.hidden, fmt.Sprintf("engine %q of dp_rank %d: %s", e.id, e.dp, why))
			continue
		}
		if len(d.engines) > 0 {
			d.room = append(d.room, ',')
		}
		d.room = e.appendJSON(d.room)
		s := shown{id: e.id, dp: e.dp, tp: len(e.rows), ppMin: len(e.rows[0].workers)}
		for _, row := range e.rows {
			s.ppMin, s.ppMax = min(s.ppMin, len(row.workers)), max(s.ppMax, len(row.workers))
		}
		d.engines = append(d.engines, s)
	}
	d.room = append(d.room, '}')
	d.body = d.room[headRoom:]
	if old.stale || !bytes.Equal(d.body, old.body) || len(d.hidden) != len(old.hidden) {
		d.gen++
		d.changed = make(chan struct{})
		defer close(old.changed)
	}
	d.length = []string{strconv.Itoa(len(d.body))}
	d.genText = []string{strconv.FormatUint(d.gen, 10)}
	r.ready.Store(&response{d, now.Unix(), d.answer(d.room, now)})
	r.body.Store(d)
	return d
}

// tell wakes waiting requests after changes, at most once in a few milliseconds:
// a thousand workers that register at once shall not wake a thousand waiters each.
func (r *Registry) tell() {
	const pause = 2 * time.Millisecond
	timer := time.NewTimer(pause)
	defer timer.Stop()
	for {
		select {
		case <-r.closing:
			return
		case <-r.changed:
		}
		if r.waiters.Load() > 0 {
			r.current()
		}
		timer.Reset(pause)
		select {
		case <-r.closing:
			return
		case <-timer.C:
		}
	}
}

// missing says what d lacks of x, naming both sides' values, or "".
func (d *directory) missing(x Expect) string {
	reason := func(format string, args ...any) string {
		s := fmt.Sprintf(format, args...)
		for i, h := range d.hidden {
			if s += "; not shown: " + h; i == 3 {
				break
			}
		}
		return s
	}
	if x.DP > 0 && len(d.engines) != x.DP {
		return reason("%d engines are shown, expected dp=%d", len(d.engines), x.DP)
	}
	if len(d.engines) == 0 {
		return reason("no engine is shown")
	}
	found := false
	for _, e := range d.engines {
		if x.EngineID != "" && e.id != x.EngineID {
			continue
		}
		found = true
		switch {
		case x.TP > 0 && e.tp != x.TP:
			return reason("engine %q of dp_rank %d has %d TP ranks, expected tp=%d", e.id, e.dp, e.tp, x.TP)
		case x.PP > 0 && (e.ppMin != x.PP || e.ppMax != x.PP):
			return reason("engine %q of dp_rank %d has from %d to %d PP ranks, expected pp=%d", e.id, e.dp, e.ppMin, e.ppMax, x.PP)
		}
	}
	if !found {
		return reason("engine %q is not shown", x.EngineID)
	}
	return ""
}

// wait returns the first directory that has what x expects, or after the given
// time the last one and what it lacks.
func (r *Registry) wait(ctx context.Context, x Expect, atMost time.Duration) (*directory, string) {
	r.waiters.Add(1)
	defer r.waiters.Add(-1)
	timer := time.NewTimer(atMost)
	defer timer.Stop()
	for {
		d := r.current()
		missing := d.missing(x)
		if missing == "" && d.gen > x.After {
			return d, ""
		}
		select {
		case <-d.changed:
		case <-timer.C:
			return d, missing
		case <-ctx.Done():
			return d, cmp.Or(missing, "the request ended")
		case <-r.draining:
			return d, cmp.Or(missing, "the server is stopping")
		case <-r.closing:
			return d, cmp.Or(missing, "the server is stopping")
		}
	}
}
