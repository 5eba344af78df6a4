// SPDX-License-Identifier: Apache-2.0

package bootstrap

import (
	"net/url"
	"time"
)

// EngineState is what a Registry knows about a P engine. It knows nothing about transfers: D asks for an engine once, and then pulls
// from P directly.
type EngineState struct {
	ID      string  `json:"engine_id"`
	DPRank  int     `json:"dp_rank"`
	Host    string  `json:"host"` // host of one of its side channels
	Workers int     `json:"workers"`
	Shown   bool    `json:"shown"`   // the directory lists it for D
	Why     string  `json:"why"`     // why the directory does not list it
	Heard   float64 `json:"heard_s"` // seconds since a worker registered last; a worker of stock vLLM registers only once
	Lease   bool    `json:"lease"`   // its workers repeat their registration before a deadline
}

// maxStates bounds the result of Engines; further engines are left out.
const maxStates = 64

// Engines returns the first 64 registered engines, in the order in which their DP ranks registered.
func (r *Registry) Engines() []EngineState {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	out := make([]EngineState, 0, min(maxStates, len(r.mu.engines)))
	for _, e := range r.mu.engines[:min(maxStates, len(r.mu.engines))] {
		s := EngineState{ID: e.id, DPRank: e.dp, Workers: len(e.byRank), Heard: now.Sub(e.seen()).Seconds()}
		s.Shown, s.Why = e.shown(now, r.o.TP, r.o.PP)
		for _, row := range e.rows {
			for _, w := range row.workers {
				s.Lease = s.Lease || w.lease > 0
				if u, err := url.Parse(w.addr); err == nil && s.Host == "" {
					s.Host = u.Hostname()
				}
			}
		}
		out = append(out, s)
	}
	return out
}
