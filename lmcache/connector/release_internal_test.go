// SPDX-License-Identifier: Apache-2.0

package connector

import "testing"

// Every rule is in the table once, with a release that has it and with both texts. Every release
// has rules of its own, and the zero Release has none.
func TestDeparturesTable(t *testing.T) {
	var all rule
	has := map[Release]int{}
	for i, d := range departures {
		if d.rule == 0 || d.rule&(d.rule-1) != 0 || all&d.rule != 0 {
			t.Errorf("rule %d is %b, known are %b", i, d.rule, all)
		}
		all |= d.rule
		if len(d.in) == 0 || d.does == "" || d.ours == "" {
			t.Errorf("rule %d: %+v", i, d)
		}
		for _, r := range d.in {
			has[r]++
			if r.String() == "unknown" {
				t.Errorf("rule %d is of release %d", i, r)
			}
		}
	}
	if all+1 != oneGroup<<1 {
		t.Errorf("rules without a row: %b", all)
	}
	if has[0] != 0 || has[VLLM018] < 5 || has[VLLM033] < 5 || rulesOf(0) != 0 || rulesOf(VLLM018) == rulesOf(VLLM033) {
		t.Errorf("rules by release: %v", has)
	}
}
