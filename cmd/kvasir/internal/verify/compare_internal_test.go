// SPDX-License-Identifier: Apache-2.0

package verify

import "testing"

// Two answers differ in a token, in a log-probability by more than the tolerance, in their lengths, or in the planted fact. Differences behind
// two equally likely tokens do not count.
func TestCompare(t *testing.T) {
	answer := func(text string, probs ...float64) *Answer {
		a := &Answer{Text: text, Logprobs: probs}
		for i := range probs {
			a.Tokens = append(a.Tokens, text[i:i+1])
		}
		return a
	}
	f := func(computed, restored *Answer, needle string, want int) {
		t.Helper()
		if got, _ := compare(0, needle, computed, restored, 0.1); len(got) != want {
			t.Errorf("%+v and %+v: %+v, want %d differences", computed, restored, got, want)
		}
	}
	f(answer("abc", -1, -2, -3), answer("abc", -1.05, -1.95, -3), "abc", 0)
	f(answer("abc", -1, -2, -3), answer("abc", -1, -2.2, -3), "", 1)
	f(answer("abc", -1, -2, -3), answer("axc", -1, -2, -3), "", 1)
	f(answer("abc", -1, -2, -3), answer("axc", -1, -2, -3), "abc", 2)
	f(answer("abc", -1, -2, -3), answer("axc", -1, -2, -3), "zzz", 1) // the model did not find it when it computed
	f(answer("abc", -1, -2, -3), answer("ab", -1, -2), "", 1)
	tied := answer("abc", -1, -2, -3)
	tied.Top = []map[string]float64{{"a": -1}, {"b": -2, "x": -2.05}, {"c": -3}}
	f(tied, answer("axq", -1, -2, -9), "", 0)
	tied.Top[1]["x"] = -2.5
	f(tied, answer("axq", -1, -2, -9), "", 1)
}
