// SPDX-License-Identifier: Apache-2.0

package openai

import "slices"

// OneSequence reports whether an engine makes a single sequence of the request: one prompt with one answer.
//
// vLLM makes several sequences if the prompt is a list of texts or of lists of token ids (a list of numbers is one prompt), if n or
// best_of is above 1, and for a beam search. Each sequence has a prefill of its own, while kv_transfer_params name a single transfer. A
// value that this package does not understand counts as several: the engine refuses it, or knows what it means.
func (r *Request) OneSequence() bool {
	is := func(at Range, values ...string) bool {
		return !at.Has() || slices.Contains(values, string(at.Of(r.Body)))
	}
	return is(r.N, "1", "null") && is(r.BestOf, "1", "null") && is(r.Beam, "false", "null") && r.onePrompt()
}

// OfVLLM reports whether a request asks for something that only vLLM can do: a beam search, the best of several answers, or an answer
// to embeddings.
func (r *Request) OfVLLM() bool {
	is := func(at Range, values ...string) bool {
		return !at.Has() || slices.Contains(values, string(at.Of(r.Body)))
	}
	return !is(r.BestOf, "1", "null") || !is(r.Beam, "false", "null") || !is(r.Embeds, "null")
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

// oneElement reports whether a valid JSON value is a list of one element, or a list of numbers.
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

// Prompts returns the ranges of the prompts of a completion whose prompt is a list. apart means that each prompt can be sent as a
// request of its own, with the same answers: all are texts or lists of token ids, none is empty, and the other fields ask for one
// answer per prompt. count is the number of prompts, or less than 2 if the request has no such list; prompts has only the first `limit` of
// them.
func (r *Request) Prompts(limit int) (prompts []Range, count int, apart bool) {
	if !r.Prompt.Has() || r.Body[r.Prompt.From] != '[' {
		return nil, 0, false
	}
	if first := beginsWith(r.Body, r.Prompt); first != '"' && first != '[' {
		return nil, 0, false // token ids
	}
	prompts, count, ok := firstElements(r.Body, r.Prompt, limit)
	if !ok {
		return nil, 0, false
	}
	is := func(at Range, values ...string) bool {
		return !at.Has() || slices.Contains(values, string(at.Of(r.Body)))
	}
	apart = is(r.N, "1", "null") && is(r.BestOf, "1", "null") && is(r.Beam, "false", "null") && is(r.Embeds, "null")
	for _, at := range prompts {
		apart = apart && r.Body[at.From] == r.Body[prompts[0].From] && isSinglePrompt(r.Body, at)
	}
	return prompts, count, apart
}

// isSinglePrompt reports whether a prompt in a list can be a request of its own: it is a text or a list of numbers, and is not empty.
func isSinglePrompt(body []byte, at Range) bool {
	if body[at.From] == '"' {
		return at.To-at.From > 2
	}
	if body[at.From] != '[' {
		return false
	}
	s := scanner{b: body[:at.To], at: at.From + 1}
	for n := 0; ; n++ {
		if s.space(); s.take(']') {
			return n > 0
		}
		if s.number() != nil {
			return false
		}
		s.space()
		s.take(',')
	}
}

// elements returns the ranges of the elements of a valid JSON list.
func elements(body []byte, list Range) (all []Range, ok bool) {
	all, _, ok = firstElements(body, list, len(body))
	return all, ok
}

// firstElements returns the ranges of the first elements of a valid JSON list, at most limit, and the number of all elements.
func firstElements(body []byte, list Range, limit int) (all []Range, n int, ok bool) {
	s := scanner{b: body[:list.To], at: list.From}
	if !s.take('[') {
		return nil, 0, false
	}
	for s.space(); !s.take(']'); s.space() {
		from := s.at
		if s.value(1) != nil {
			return nil, 0, false
		}
		if n++; n <= limit {
			all = append(all, Range{from, s.at})
		}
		s.space()
		s.take(',')
	}
	return all, n, true
}

// beginsWith returns the first byte of the first element of a valid JSON list; 0: the list is empty.
func beginsWith(body []byte, list Range) byte {
	s := scanner{b: body[:list.To], at: list.From + 1}
	if s.space(); s.at >= list.To-1 {
		return 0
	}
	return body[s.at]
}
