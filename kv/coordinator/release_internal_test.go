// SPDX-License-Identifier: Apache-2.0

package coordinator

import "testing"

// Every rule is in the table once, with a release that has it, what that release does and what this
// package does. Release 0 (this package) has no rules, and the two releases have different ones.
func TestDeparturesTable(t *testing.T) {
	var all rule
	for i, d := range releaseRules {
		if d.rule == 0 || d.rule&(d.rule-1) != 0 || all.has(d.rule) || len(d.in) == 0 || d.does == "" || d.ours == "" {
			t.Errorf("rule %d: %+v", i, d)
		}
		all |= d.rule
		for _, r := range d.in {
			if r == 0 || r.String() == "unknown" {
				t.Errorf("rule %d is of release %d", i, r)
			}
		}
	}
	if all+1 != emptyLayoutHits<<1 {
		t.Errorf("rules without a row: %b", all)
	}
	if rulesOf(0) != 0 || rulesOf(VLLM023) == rulesOf(VLLM033) {
		t.Error("ours has rules, or the releases are alike")
	}
}
