// SPDX-License-Identifier: Apache-2.0

package openai

import "slices"

// OneSequence reports whether an engine makes a single sequence of the request: one prompt, one answer.
//
// vLLM makes several of a prompt that is a list of texts or of lists of token ids (a list of numbers is one prompt), of n and
// best_of above 1, and of a beam search. Each of them has a prefill of its own, while kv_transfer_params name one transfer.
// A value that is not understood here counts as several: the engine refuses it, or knows what it means.
func (r *Request) OneSequence() bool {
	is := func(at Range, values ...string) bool {
		return !at.Has() || slices.Contains(values, string(at.Of(r.Body)))
	}
	return is(r.N, "1", "null") && is(r.BestOf, "1", "null") && is(r.Beam, "false", "null") && r.onePrompt()
}

func (r *Request) onePrompt() bool {
	prompt := r.Prompt
	if prompt.Has() && string(prompt.Of(r.Body)) == "null" {
		prompt = Range{}
	}
	if r.Embeds.Has() && string(r.Embeds.Of(r.Body)) != "null" {
		return !prompt.Has() && r.Body[r.Embeds.From] == '"'
	}
	if !prompt.Has() || r.Body[prompt.From] == '"' {
		return true
	}
	return oneElement(prompt.Of(r.Body))
}

// oneElement reports whether a valid JSON value is a list of one element, or of numbers.
func oneElement(list []byte) bool {
	s := scanner{b: list}
	if !s.take('[') {
		return false
	}
	s.space()
	if s.at < len(list) && (list[s.at] == '-' || list[s.at] >= '0' && list[s.at] <= '9') {
		return true // token ids
	}
	if s.value(1) != nil {
		return false // an empty list
	}
	s.space()
	return s.take(']')
}
