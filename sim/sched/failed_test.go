// SPDX-License-Identifier: Apache-2.0

package sched_test

import (
	"testing"

	"github.com/kvasir-kv/kvasir/sim/sched"
)

// elsewhere is a connector that loads all tokens of each prompt.
type elsewhere struct{}

func (elsewhere) Match(r *sched.Request, local int) (external int, async, ok bool) {
	return r.Prompt - local, true, true
}
func (elsewhere) Allocated(*sched.Request, int)            {}
func (elsewhere) Finish(*sched.Request, sched.Reason) bool { return false }

// A request whose load failed wholly begins to load again, although it needs more than half of the cache, and the request behind it
// gets its turn. vLLM 0.32 counts the request's own reservation against it, so no request runs any more.
func TestRequestBeginsAgainAfterAFailedLoad(t *testing.T) {
	for _, groups := range [][]sched.Group{nil, {{}, {Window: 64}}} {
		s, err := sched.New(sched.Config{Blocks: 40, MaxModel: 512, Connector: elsewhere{}, Receives: true, Recompute: true, Groups: groups})
		if err != nil {
			t.Fatal(err)
		}
		for i, id := range []string{"a", "b"} {
			r := &sched.Request{ID: id, Prompt: 400, MaxTokens: 4, Hash: func(block int) sched.Hash { return sched.Hash{byte(i), byte(block)} }}
			if err := s.Add(r); err != nil {
				t.Fatal(err)
			}
		}
		begun := map[string]int{}
		var loads []string
		fails := 2
		for step := 0; s.Busy() && step < 200; step++ {
			for _, h := range s.Schedule().Hits {
				loads = append(loads, h.Request.ID)
				begun[h.Request.ID]++
			}
			out := sched.Output{Arrived: loads}
			if fails > 0 {
				out.Failed, fails = loads, fails-len(loads)
			}
			loads = nil
			s.Process(out)
		}
		if s.Busy() {
			t.Errorf("groups %v: the requests never end: %v began", groups, begun)
		}
		if begun["a"] < 2 || begun["b"] < 1 {
			t.Errorf("groups %v: began %v", groups, begun)
		}
	}
}
