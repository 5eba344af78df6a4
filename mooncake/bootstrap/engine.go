// SPDX-License-Identifier: Apache-2.0

package bootstrap

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/kvasir-kv/kvasir/internal/peercred"
)

// ranks is the place of a worker in its engine.
type ranks struct{ tp, pp int }

// worker is one registered worker.
type worker struct {
	ranks
	charge
	addr    string
	seen    time.Time     // when it registered last
	lease   time.Duration // 0: it has no lease
	expires time.Time     // set only with a lease
}

// charge is the weight that a worker adds to the sums that the Registry bounds, and the origin under which it counts.
type charge struct {
	from   peercred.Origin
	weight int // bytes
}

// vacant is a place in an engine whose worker must register again before the directory shows the engine.
type vacant struct {
	charge
	own bool // a worker of this engine had the place; false: only a worker of the engine that this one replaced
}

// row is one TP rank: its workers, in the order in which they registered.
type row struct {
	tp      int
	workers []*worker
}

// engine is one incarnation of a P engine: processes that start and end together. Registry.mu guards all fields.
type engine struct {
	id             string
	dp             int
	founder        peercred.Origin // of its first worker
	rows           []*row          // in the order in which TP ranks registered, as in Python's dict
	byRank         map[ranks]*worker
	tpSize, ppSize int    // as its workers stated them; 0 if unknown
	changes        int    // how often workers were added or removed
	json           []byte // its part of the answer to GET /query; nil after a change

	// missing lists the places whose absence keeps the engine out of the directory. A place of its own (lease ended, or unregistered)
	// counts until it registers again. A place of the engine that it replaced counts only until `settled`.
	missing map[ranks]vacant
	settled time.Time
}

func newEngine(id string, dp int, founder peercred.Origin) *engine {
	return &engine{id: id, dp: dp, founder: founder, byRank: map[ranks]*worker{}, missing: map[ranks]vacant{}}
}

// row returns the row of a TP rank, or nil.
func (e *engine) row(tp int) *row {
	if i := slices.IndexFunc(e.rows, func(r *row) bool { return r.tp == tp }); i >= 0 {
		return e.rows[i]
	}
	return nil
}

func (e *engine) add(w *worker) {
	e.changes++
	e.json = nil
	r := e.row(w.tp)
	if r == nil {
		r = &row{tp: w.tp}
		e.rows = append(e.rows, r)
	}
	r.workers = append(r.workers, w)
	e.byRank[w.ranks] = w
	delete(e.missing, w.ranks)
}

// remove removes the worker with the ranks `at`. Unless `forget` is true, its place becomes vacant: the directory hides the engine until
// a worker registers there again.
func (e *engine) remove(at ranks, forget bool) {
	e.changes++
	e.json = nil
	if !forget {
		e.missing[at] = vacant{e.byRank[at].charge, true}
	}
	delete(e.byRank, at)
	in := e.row(at.tp)
	in.workers = slices.DeleteFunc(in.workers, func(w *worker) bool { return w.ranks == at })
	e.rows = slices.DeleteFunc(e.rows, func(r *row) bool { return len(r.workers) == 0 })
}

// anyWorkers returns copies of up to n workers of e, in any order.
func (e *engine) anyWorkers(n int) (list []worker) {
	for _, w := range e.byRank {
		if len(list) < n {
			list = append(list, *w)
		}
	}
	return list
}

// seen returns the time of the last registration of any worker of e.
func (e *engine) seen() (last time.Time) {
	for _, w := range e.byRank {
		if w.seen.After(last) {
			last = w.seen
		}
	}
	return last
}

// successor returns a new engine that replaces e. Until the time `settled`, the directory shows it only if it has a worker at every
// place of e.
func (e *engine) successor(id string, founder peercred.Origin, settled time.Time) *engine {
	next := newEngine(id, e.dp, founder)
	for at, w := range e.byRank {
		next.missing[at] = vacant{w.charge, false}
	}
	for at, v := range e.missing {
		next.missing[at] = vacant{v.charge, false}
	}
	next.settled = settled
	return next
}

// shown reports whether the directory may show e; if not, the text says why. tpMin and ppMin are the sizes that the operator set for
// engines that do not state theirs.
func (e *engine) shown(now time.Time, tpMin, ppMin int) (bool, string) {
	for at, v := range e.missing {
		if v.own || (e.tpSize == 0 && now.Before(e.settled)) {
			return false, fmt.Sprintf("tp_rank %d pp_rank %d is missing", at.tp, at.pp)
		}
	}
	tp, pp := max(cmp.Or(e.tpSize, tpMin), 1), max(cmp.Or(e.ppSize, ppMin), 1)
	if len(e.rows) < tp {
		return false, fmt.Sprintf("%d of %d TP ranks are registered", len(e.rows), tp)
	}
	for _, r := range e.rows {
		if len(r.workers) < pp {
			return false, fmt.Sprintf("tp_rank %d has %d of %d PP ranks", r.tp, len(r.workers), pp)
		}
	}
	return true, ""
}

// appendJSON appends e's part of the answer to GET /query: "0":{"engine_id":…}.
func (e *engine) appendJSON(b []byte) []byte {
	if e.json != nil {
		return append(b, e.json...)
	}
	begin := len(b)
	b = append(appendKey(b, e.dp), `{"engine_id":`...)
	b = append(appendPythonString(b, e.id), `,"worker_addr":{`...)
	for i, r := range e.rows {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(appendKey(b, r.tp), '{')
		for j, w := range r.workers {
			if j > 0 {
				b = append(b, ',')
			}
			b = appendPythonString(appendKey(b, w.pp), w.addr)
		}
		b = append(b, '}')
	}
	b = append(b, "}}"...)
	e.json = slices.Clone(b[begin:])
	return b
}

func appendKey(b []byte, rank int) []byte {
	return append(strconv.AppendInt(append(b, '"'), int64(rank), 10), `":`...)
}
