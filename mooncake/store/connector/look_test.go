// SPDX-License-Identifier: Apache-2.0

package connector_test

import (
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/kv/coordinator"
	"github.com/kvasir-kv/kvasir/mooncake/store/connector"
)

// An explanation says how far each group and all together could continue, from what every rank has.
func TestExplain(t *testing.T) {
	s := scheduler(t, connector.Options{Layout: layout(t, "full,bs=16 swa,bs=16,win=40"), Model: "org/m", Ranks: 2, Batch: 16})
	p, d := prompt(40), &directory{has: map[string]uint64{}}
	p.Tokens = 645
	add := func(group, from, to int) {
		for i := from; i < to; i++ {
			for rank := range 2 {
				k, _ := s.Key(p, connector.Block{Group: group, Index: i}, rank)
				d.has[k] = 7
			}
		}
	}
	add(0, 0, 37)
	add(1, 10, 13)
	add(1, 36, 40)
	k, _ := s.Key(p, connector.Block{Group: 0, Index: 35}, 1)
	delete(d.has, k) // one rank alone has it

	stored, err := s.Present(t.Context(), d, p)
	if err != nil || len(stored[0]) != 2 || stored[0][0] != (coordinator.Run{End: 35}) || len(stored[1]) != 2 || stored[1][0] != (coordinator.Run{Start: 10, End: 13}) {
		t.Fatal(stored, err)
	}
	var out strings.Builder
	if err := s.Explain(t.Context(), &out, d, p, true); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"hit: 208 of 645 tokens", "group 0 alone could continue from 560 tokens; its keys are m@tp_rank:0@", "group 1 alone could continue from 640 tokens", "and finds 208 tokens"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q lacks %q", out.String(), want)
		}
	}
	d.fails = d.calls + 2
	if err := s.Explain(t.Context(), &out, d, p, true); err == nil {
		t.Error("a store that fails is explained")
	}
}

func TestParseDigests(t *testing.T) {
	p, err := connector.ParseDigests([]string{"00ff", "0102"})
	if err != nil || p.Units() != 2 || p.Size != 2 || p.Digests[1] != 0xff {
		t.Errorf("%+v, %v", p, err)
	}
	for _, words := range [][]string{{"0"}, {"zz"}, {"00", "0000"}, {strings.Repeat("00", 65)}} {
		if _, err := connector.ParseDigests(words); err == nil {
			t.Error(words)
		}
	}
}
