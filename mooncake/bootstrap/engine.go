package bootstrap

import (
	"strconv"
	"time"
)

// ranks place a worker in its engine.
type ranks struct{ tp, pp int }

// worker is one registered worker.
type worker struct {
	ranks
	addr    string
	remote  bool          // it registered from another host: a loopback addr means nothing here
	lease   time.Duration // 0: none
	expires time.Time     // with a lease
}

// row is one TP rank, its workers in the order in which they came.
type row struct {
	tp      int
	workers []*worker
}

// engine is one incarnation of a P engine: processes that live and die together.
// All fields are under Registry.mu.
type engine struct {
	id             string
	dp             int
	rows           []*row // in the order in which TP ranks came, as Python's dict
	byRank         map[ranks]*worker
	tpSize, ppSize int    // as its workers stated; 0: they did not
	changes        int    // workers added and removed
	json           []byte // as GET /query shows it; nil after a change

	// missing holds ranks without which the engine is not shown. true: this very
	// engine had them (lease ended, unregistered), so it waits for ever. false: the
	// engine that it replaced had them, so it waits until settled.
	missing map[ranks]bool
	settled time.Time
}

func newEngine(id string, dp int) *engine {
	return &engine{id: id, dp: dp, byRank: map[ranks]*worker{}, missing: map[ranks]bool{}}
}

func (e *engine) row(tp int) *row {
	for _, r := range e.rows {
		if r.tp == tp {
			return r
		}
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

// remove takes a worker out; its place stays missing.
func (e *engine) remove(at ranks) {
	e.changes++
	e.json = nil
	delete(e.byRank, at)
	e.missing[at] = true
	rows := e.rows[:0]
	for _, r := range e.rows {
		if r.tp == at.tp {
			kept := r.workers[:0]
			for _, w := range r.workers {
				if w.ranks != at {
					kept = append(kept, w)
				}
			}
			r.workers = kept
		}
		if len(r.workers) > 0 {
			rows = append(rows, r)
		}
	}
	e.rows = rows
}

// successor returns the engine that takes e's place: as wide as e until settled.
func (e *engine) successor(id string, settled time.Time) *engine {
	next := newEngine(id, e.dp)
	for at := range e.byRank {
		next.missing[at] = false
	}
	for at := range e.missing {
		next.missing[at] = false
	}
	next.settled = settled
	return next
}

// shown reports whether the directory may show e, and when not, why. tpMin and
// ppMin are the operator's word for engines that do not state their sizes.
func (e *engine) shown(now time.Time, tpMin, ppMin int) (bool, string) {
	exact := e.tpSize > 0
	for at, own := range e.missing {
		if own || (!exact && now.Before(e.settled)) {
			return false, "tp_rank " + strconv.Itoa(at.tp) + " pp_rank " + strconv.Itoa(at.pp) + " is missing"
		}
	}
	tp, pp := max(e.tpSize, 1), max(e.ppSize, 1)
	if e.tpSize == 0 {
		tp = max(tpMin, 1)
	}
	if e.ppSize == 0 {
		pp = max(ppMin, 1)
	}
	if len(e.rows) < tp {
		return false, strconv.Itoa(len(e.rows)) + " of " + strconv.Itoa(tp) + " TP ranks are registered"
	}
	for _, r := range e.rows {
		if len(r.workers) < pp {
			return false, "tp_rank " + strconv.Itoa(r.tp) + " has " + strconv.Itoa(len(r.workers)) + " of " + strconv.Itoa(pp) + " PP ranks"
		}
	}
	return true, ""
}

// appendJSON appends the engine as GET /query shows it: "0":{"engine_id":…}.
func (e *engine) appendJSON(b []byte) []byte {
	if e.json == nil {
		e.json = e.encode(make([]byte, 0, 64+len(e.id)+48*len(e.byRank)))
	}
	return append(b, e.json...)
}

func (e *engine) encode(b []byte) []byte {
	b = append(appendKey(b, e.dp), `{"engine_id":`...)
	b = append(appendString(b, e.id), `,"worker_addr":{`...)
	for i, r := range e.rows {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(appendKey(b, r.tp), '{')
		for j, w := range r.workers {
			if j > 0 {
				b = append(b, ',')
			}
			b = appendString(appendKey(b, w.pp), w.addr)
		}
		b = append(b, '}')
	}
	return append(b, "}}"...)
}

func appendKey(b []byte, rank int) []byte {
	return append(strconv.AppendInt(append(b, '"'), int64(rank), 10), `":`...)
}
