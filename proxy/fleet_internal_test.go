// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"fmt"
	"testing"
)

// fleetOf returns a fleet of engines that are well.
func fleetOf(engines ...*backend) *fleet {
	o := Options{}.withDefaults()
	f := &fleet{o: &o}
	f.mu.queues = make(map[string]*queue)
	for i, b := range engines {
		b.url, b.turns = fmt.Sprint("http://127.0.0.1:", i), make(map[string]uint64)
		b.well.Store(true)
		b.bearLocked()
		f.mu.all = append(f.mu.all, b)
	}
	return f
}

// BenchmarkTake is what choosing P and D of vLLM costs a request, among eight of each.
func BenchmarkTake(b *testing.B) {
	var all []*backend
	for range 8 {
		all = append(all, &backend{role: prefill}, &backend{role: decode})
	}
	f := fleetOf(all...)
	f.o.Dialect = NIXL
	w := &needs{model: "m"}
	b.ReportAllocs()
	for b.Loop() {
		c, err := f.take(b.Context(), w)
		if err != nil {
			b.Fatal(err)
		}
		f.give(c)
	}
}

// Beside P and D of vLLM and of SGLang under one model name, a request goes to the pair that has room, and waits where one is full and the
// other is down.
func TestPairsOfTwoKinds(t *testing.T) {
	f := func(what string, change func(p, d, sp, sd *backend), expect availability, of int) {
		t.Helper()
		p, d, sp, sd := &backend{role: prefill}, &backend{role: decode}, &backend{role: prefill}, &backend{role: decode}
		sp.sglang.Store(&sglang{page: 16})
		sd.sglang.Store(&sglang{page: 16})
		all := []*backend{p, d, sp, sd}
		fleet := fleetOf(all...)
		fleet.o.Dialect = NIXL
		fleet.rooms.Store(true)
		change(p, d, sp, sd)
		for turn := range 2 { // whichever D comes first
			d.turn, sd.turn = uint64(turn), uint64(1-turn)
			d.turns[""], sd.turns[""] = d.turn, sd.turn
			c, how, _ := fleet.chooseLocked(&needs{model: "m"})
			if how != expect || how == ready && (c.engine != all[of] || c.prefill != all[of-1]) {
				t.Errorf("%s, turn %d: %d, want %d; %+v", what, turn, how, expect, c)
			}
		}
	}
	fill := func(b *backend) { b.inFlight = 1 << 20 }
	down := func(b *backend) { b.well.Store(false) }
	f("P of vLLM is full", func(p, _, _, _ *backend) { fill(p) }, ready, 3)
	f("P of SGLang is full", func(_, _, sp, _ *backend) { fill(sp) }, ready, 1)
	f("D of vLLM is full and P of SGLang is down", func(_, d, sp, _ *backend) { fill(d); down(sp) }, full, 0)
	f("D of SGLang is full and P of vLLM is down", func(p, _, _, sd *backend) { fill(sd); down(p) }, full, 0)
	f("both P are down", func(p, _, sp, _ *backend) { down(p); down(sp) }, unwell, 0)
}
