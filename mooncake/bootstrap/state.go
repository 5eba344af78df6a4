// SPDX-License-Identifier: Apache-2.0

package bootstrap

import (
	"bytes"
	"encoding/json"
	"fmt"
	"time"

	"github.com/kvasir-kv/kvasir/internal/peercred"
)

const (
	stateMagic    = "kvasir-bootstrap 1"  // followed by savedState as JSON
	maxStateBytes = 64 << 20              // largest state file: a larger one is neither read nor written
	saveEvery     = 50 * time.Millisecond // delay before a write, so that one write covers all changes in that time
	saveRetry     = 5 * time.Second       // delay after a failed write
)

type savedState struct {
	Generation uint64        `json:"generation"`
	Engines    []savedEngine `json:"engines"`
}

type savedEngine struct {
	ID      string           `json:"engine_id"`
	DP      int              `json:"dp_rank"`
	Founder *peercred.Origin `json:"founder,omitempty"`
	TPSize  int              `json:"tp_size,omitempty"`
	PPSize  int              `json:"pp_size,omitempty"`
	Workers []savedWorker    `json:"workers"`
	Missing []savedRank      `json:"missing,omitempty"`
}

type savedWorker struct {
	TP     int              `json:"tp_rank"`
	PP     int              `json:"pp_rank"`
	Addr   string           `json:"addr"`
	From   *peercred.Origin `json:"from,omitempty"`
	Remote bool             `json:"remote,omitempty"` // files of earlier releases have this field instead of From
	Lease  time.Duration    `json:"lease_ns,omitempty"`
}

type savedRank struct {
	TP   int              `json:"tp_rank"`
	PP   int              `json:"pp_rank"`
	From *peercred.Origin `json:"from,omitempty"`
	Own  bool             `json:"own,omitempty"`
}

// decode decodes a document of the state file. It refuses a document that no registry could have written. A nil document means that
// there are no engines.
func (st *savedState) decode(doc []byte) error {
	if doc == nil {
		return nil
	}
	if err := json.Unmarshal(doc, st); err != nil {
		return err
	}
	dps := map[int]bool{}
	for _, e := range st.Engines {
		seen := map[ranks]bool{}
		for _, w := range e.Workers {
			at, why := ranks{w.TP, w.PP}, ""
			switch {
			case seen[at]:
				why = "is there twice"
			case len(w.Addr) > maxAddrBytes:
				why = fmt.Sprintf("has an address longer than %d bytes", maxAddrBytes)
			case w.Lease < 0 || w.Lease > maxLease:
				why = fmt.Sprintf("has a lease of %v, outside 0 to %v", w.Lease, maxLease)
			}
			if why != "" {
				return fmt.Errorf("worker tp_rank %d pp_rank %d of engine %q %s", w.TP, w.PP, e.ID, why)
			}
			seen[at] = true
		}
		switch {
		case dps[e.DP]:
			return fmt.Errorf("engine %q: another engine has its dp_rank %d", e.ID, e.DP)
		case len(e.Workers) == 0:
			return fmt.Errorf("engine %q of dp_rank %d has no workers", e.ID, e.DP)
		case len(e.ID) > maxEngineIDBytes:
			return fmt.Errorf("engine %.64q... of dp_rank %d: its id is longer than %d bytes", e.ID, e.DP, maxEngineIDBytes)
		}
		dps[e.DP] = true
	}
	return nil
}

func (st *savedState) encode() []byte {
	var b bytes.Buffer
	out := json.NewEncoder(&b)
	out.SetEscapeHTML(false) // it would write some characters as six bytes
	if err := out.Encode(st); err != nil {
		panic("BUG: bootstrap: encode the state: " + err.Error()) // only numbers and valid texts
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

// restore fills the registry with saved engines before it starts. Leases start anew.
func (r *Registry) restore(engines []savedEngine) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	by := func(o *peercred.Origin, here bool) peercred.Origin {
		if o == nil {
			return peercred.Origin{User: "unknown", Addr: "unknown", Here: here}
		}
		return *o
	}
	hold := func(from peercred.Origin, id, addr string) charge {
		p := charge{from, r.weight(id, addr)}
		r.mu.held[from] += p.weight
		r.mu.weight += p.weight
		return p
	}
	for _, s := range engines {
		e := newEngine(s.ID, s.DP, by(s.Founder, false))
		e.tpSize, e.ppSize = s.TPSize, s.PPSize
		for _, m := range s.Missing {
			e.missing[ranks{m.TP, m.PP}] = vacant{hold(by(m.From, false), s.ID, ""), m.Own}
			e.settled = now.Add(r.o.Settle)
		}
		for _, w := range s.Workers {
			in := &worker{ranks: ranks{w.TP, w.PP}, charge: hold(by(w.From, !w.Remote), s.ID, w.Addr), addr: w.Addr, seen: now, lease: w.Lease}
			e.add(in)
			r.leaseLocked(in)
		}
		if !e.settled.IsZero() {
			r.scheduleLocked(e.settled)
		}
		r.mu.engines = append(r.mu.engines, e)
		r.mu.byDP[e.dp] = e
		r.mu.workers += len(e.byRank)
	}
	if len(engines) > 0 {
		r.log.Info("state file read", "file", r.o.StateFile, "engines", len(engines), "workers", r.mu.workers)
	}
}

// saved returns the registry as a document for the state file.
func (r *Registry) saved() []byte {
	gen := r.current().gen
	r.mu.Lock()
	defer r.mu.Unlock()
	st := savedState{Generation: gen, Engines: []savedEngine{}}
	for _, e := range r.mu.engines {
		s := savedEngine{ID: e.id, DP: e.dp, Founder: &e.founder, TPSize: e.tpSize, PPSize: e.ppSize}
		for _, row := range e.rows {
			for _, w := range row.workers {
				s.Workers = append(s.Workers, savedWorker{TP: w.tp, PP: w.pp, Addr: w.addr, From: &w.from, Lease: w.lease})
			}
		}
		for at, v := range e.missing {
			s.Missing = append(s.Missing, savedRank{at.tp, at.pp, &v.from, v.own})
		}
		st.Engines = append(st.Engines, s)
	}
	return st.encode()
}

// saveLoop writes the state file after changes; one write covers changes that follow each other quickly. It writes a last time when the
// registry closes. It holds no lock while it writes.
func (r *Registry) saveLoop() {
	for {
		select {
		case <-r.closing:
			if len(r.save) > 0 {
				r.write()
			}
			return
		case <-r.save:
		}
		for saved := false; !saved; {
			pause := saveEvery
			if saved = r.write(); !saved {
				pause = saveRetry
			}
			select {
			case <-time.After(pause):
			case <-r.closing:
				if !saved || len(r.save) > 0 {
					r.write()
				}
				return
			}
		}
	}
}

// write writes the state file anew. If that fails, it counts the failure, logs the first one in a row, and returns false.
func (r *Registry) write() bool {
	err := r.file.Write(r.saved())
	if err == nil {
		if r.n.unsaved.Swap(false) {
			r.log.Info("state file is up to date again", "file", r.file.Path())
		}
		return true
	}
	r.n.saveErrors.Add(1)
	if !r.n.unsaved.Swap(true) {
		r.log.Warn("state file is out of date, the registry goes on", "file", r.file.Path(), "err", err)
	}
	return false
}
