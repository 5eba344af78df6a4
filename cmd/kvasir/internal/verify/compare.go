// SPDX-License-Identifier: Apache-2.0

package verify

import (
	"fmt"
	"math"
	"strings"
)

// Difference is one difference between an answer from restored KV and the computed answer.
type Difference struct {
	Prompt int    `json:"prompt"` // number of the prompt
	Token  int    `json:"token"`  // number of the answer's token, from 0 on; -1: the answer as a whole
	What   string `json:"what"`
	Want   string `json:"computed,omitempty"`
	Got    string `json:"restored,omitempty"`
}

// spread returns the largest difference between the log-probabilities of two answers, up to the first token that differs.
func spread(a, b *Answer) (worst float64) {
	for i := range min(len(a.Tokens), len(b.Tokens)) {
		if a.Tokens[i] != b.Tokens[i] {
			break
		}
		worst = max(worst, math.Abs(a.Logprobs[i]-b.Logprobs[i]))
	}
	return worst
}

// compare returns how the answer from restored KV differs from the computed answer by more than a tolerance of log-probabilities, and
// the largest difference of log-probabilities.
//
// Two greedy answers may go apart where two tokens are equally likely. Nothing is compared beyond such a place.
func compare(prompt int, needle string, computed, restored *Answer, tolerance float64) (out []Difference, worst float64) {
	worst = spread(computed, restored)
	for i, want := range computed.Tokens {
		if i >= len(restored.Tokens) {
			return append(out, Difference{prompt, i, "the answer is shorter", computed.Text, restored.Text}), worst
		}
		got := restored.Tokens[i]
		if want != got {
			if tie(computed, i, got, tolerance) {
				return out, worst
			}
			out = append(out, Difference{prompt, i, "another token", fmt.Sprintf("%q %.4f", want, computed.Logprobs[i]), fmt.Sprintf("%q %.4f", got, restored.Logprobs[i])})
			break
		}
		if d := math.Abs(computed.Logprobs[i] - restored.Logprobs[i]); d > tolerance || math.IsNaN(d) {
			out = append(out, Difference{prompt, i, fmt.Sprintf("log-probabilities differ by %.4f", d), fmt.Sprintf("%q %.4f", want, computed.Logprobs[i]), fmt.Sprintf("%.4f", restored.Logprobs[i])})
			break
		}
	}
	if needle != "" && strings.Contains(computed.Text, needle) && !strings.Contains(restored.Text, needle) {
		out = append(out, Difference{prompt, -1, "the planted fact is not found", computed.Text, restored.Text})
	}
	return out, worst
}

// tie reports whether, at the token number `at` of the computed answer, the token `other` was as likely as the chosen one: their
// log-probabilities differ by at most tolerance.
func tie(computed *Answer, at int, other string, tolerance float64) bool {
	if at >= len(computed.Top) {
		return false
	}
	p, ok := computed.Top[at][other]
	return ok && math.Abs(p-computed.Logprobs[at]) <= tolerance
}
