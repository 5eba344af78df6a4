// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
)

// Sequence is one prompt and one answer of a request that asks for several.
type Sequence struct {
	Prompt int    // number of the prompt
	Sample int    // number of the answer to it
	Edits  []Edit // make the request one for this sequence alone
}

// ErrSequences means that a request does not say what its sequences are.
var ErrSequences = errors.New("openai: the request cannot be divided into its prompts and answers")

// batched are keys of SGLang's /generate whose value may be a list with an element for each prompt (SGLang 0.5.23, io_struct.py).
// Those that are lists for one prompt, too, are batched where their elements are lists.
var batched = map[string]bool{
	"sampling_params": true, "return_logprob": true, "logprob_start_len": true, "top_logprobs_num": true, "return_sampling_mask": true,
	"sampling_logprobs_mode": true, "return_hidden_states": true, "lora_path": true, "custom_logit_processor": true, "extra_key": true, "cache_salt": true,
	"watermark": true, "image_data": true, "video_data": true, "audio_data": true, "kv_hints": true, "mm_hashes": true, "mm_content_hashes": true,
	"token_ids_logprob": false, "multi_item_delimiter_indices": false, "token_indices_to_pool": false,
}

// Sequences returns the sequences of a request to SGLang, prompt by prompt, at most limit. The error says what is wrong with the request.
func (r *Request) Sequences(a API, limit int) (all []Sequence, err error) {
	var prompts [][]Edit
	n, listed := 1, false
	if a == Native {
		prompts, n, listed, err = r.nativePrompts(limit)
	} else {
		prompts, n, listed, err = r.openAIPrompts(limit)
	}
	if err != nil {
		return nil, err
	}
	if n > limit || n*len(prompts) > limit {
		return nil, fmt.Errorf("the request has %d prompts with %d answers each, at most %d answers are allowed", len(prompts), n, limit)
	}
	for i, edits := range prompts {
		for k := range n {
			own := edits[:len(edits):len(edits)]
			if rid, ok := r.ownID(i, k, n, listed); ok {
				own = append(own, rid)
			}
			all = append(all, Sequence{i, k, own})
		}
	}
	return all, nil
}

// answers returns the number at a range; a request without one wants one answer.
func (r *Request) answers(at Range) (int, error) {
	if !at.Has() || string(at.Of(r.Body)) == "null" {
		return 1, nil
	}
	n, ok := r.Int(at)
	if !ok || n < 1 {
		return 0, errors.New("n must be a number above 0")
	}
	return n, nil
}

// openAIPrompts returns edits that leave one prompt and one answer, for each prompt.
func (r *Request) openAIPrompts(limit int) (prompts [][]Edit, n int, listed bool, err error) {
	if n, err = r.answers(r.N); err != nil {
		return nil, 0, false, err
	}
	var one []Edit
	if n > 1 {
		one = []Edit{{Key: "n", Value: []byte("1")}}
	}
	list, listed, err := r.promptList(r.Prompt, limit)
	if err != nil || !listed {
		return [][]Edit{one}, n, false, err
	}
	for _, at := range list {
		prompts = append(prompts, append(one[:len(one):len(one)], Edit{Key: "prompt", Value: at.Of(r.Body)}))
	}
	return prompts, n, true, nil
}

// promptList returns the prompts of a list of texts or of lists of token ids; listed is false for a single prompt.
func (r *Request) promptList(at Range, limit int) (list []Range, listed bool, err error) {
	if !at.Has() || r.Body[at.From] != '[' {
		return nil, false, nil
	}
	list, ok := elements(r.Body, at)
	switch {
	case !ok || len(list) == 0:
		return nil, false, nil // the engine refuses it
	case r.Body[list[0].From] != '"' && r.Body[list[0].From] != '[':
		return nil, false, nil // token ids
	case len(list) > limit:
		return nil, false, fmt.Errorf("the request has %d prompts, at most %d are allowed", len(list), limit)
	}
	for _, at := range list {
		if r.Body[at.From] != r.Body[list[0].From] {
			return nil, false, errors.New("the prompts of a list must be of one kind")
		}
	}
	return list, true, nil
}

// nativePrompts is openAIPrompts for /generate.
func (r *Request) nativePrompts(limit int) (prompts [][]Edit, n int, listed bool, err error) {
	key, at := "text", r.TextIn
	if !at.Has() || string(at.Of(r.Body)) == "null" {
		key, at = "input_ids", r.InputIDs
	}
	list, listed, err := r.promptList(at, limit)
	if err != nil {
		return nil, 0, false, err
	}
	if !listed {
		if r.Sampling.Has() && r.Body[r.Sampling.From] == '[' || !at.Has() && r.field("input_embeds").Has() {
			return nil, 0, false, ErrSequences // a list of embeddings may be one prompt or several
		}
		edit, n, err := r.sampling(r.Sampling)
		return [][]Edit{edit}, n, false, err
	}
	for i, at := range list {
		edits := []Edit{{Key: key, Value: at.Of(r.Body)}}
		own := r.Sampling
		for f := range r.fields {
			name, _ := r.Text(r.fields[f].name)
			value := r.fields[f].value
			lists, known := batched[name]
			if !known || r.Body[value.From] != '[' {
				continue
			}
			each, ok := elements(r.Body, value)
			if !ok || len(each) == 0 || !lists && r.Body[each[0].From] != '[' {
				continue
			}
			if len(each) != len(list) {
				return nil, 0, false, fmt.Errorf("%s has %d elements, the request has %d prompts", name, len(each), len(list))
			}
			if name == "sampling_params" {
				own = each[i]
				continue
			}
			edits = append(edits, Edit{Key: name, Value: each[i].Of(r.Body)})
		}
		edit, answers, err := r.sampling(own)
		if err != nil {
			return nil, 0, false, err
		}
		if i > 0 && answers != n {
			return nil, 0, false, errors.New("n must be the same in all sampling_params")
		}
		n = answers
		if edit == nil && own != r.Sampling {
			edit = []Edit{{Key: "sampling_params", Value: own.Of(r.Body)}}
		}
		prompts = append(prompts, append(edits, edit...))
	}
	return prompts, n, true, nil
}

// sampling returns how many answers the sampling parameters at a range ask for, and the edit that makes it one; nil: it is.
func (r *Request) sampling(at Range) (edit []Edit, n int, err error) {
	if !at.Has() || string(at.Of(r.Body)) == "null" {
		return nil, 1, nil
	}
	s, err := Scan(at.Of(r.Body))
	if err != nil {
		return nil, 0, errors.New("sampling_params must be an object")
	}
	if n, err = s.answers(s.N); err != nil || n == 1 {
		return nil, n, err
	}
	if width, ok := s.Int(s.field("beam_width")); ok && width > 1 {
		return nil, 1, nil // n is of one search
	}
	pieces, _ := s.Apply(Edit{Key: "n", Value: []byte("1")})
	return []Edit{{Key: "sampling_params", Value: bytes.Join(pieces, nil)}}, n, nil
}

// ownID returns the edit that gives a sequence a request id of its own, where the client chose one. SGLang names those of a list so.
func (r *Request) ownID(prompt, sample, n int, listed bool) (e Edit, ok bool) {
	at := r.field("rid")
	if !at.Has() || !listed && n == 1 {
		return e, false
	}
	id, single := r.Text(at)
	if !single {
		each, ok := elements(r.Body, at)
		if !ok || prompt >= len(each) {
			return e, false
		}
		if id, ok = r.Text(each[prompt]); !ok {
			return e, false
		}
		if n > 1 {
			id += "_" + strconv.Itoa(sample)
		}
	} else {
		id += "_" + strconv.Itoa(prompt*n+sample)
	}
	value, _ := json.Marshal(id) // a text
	return Edit{Key: "rid", Value: value}, true
}

// NativeEvent returns an event of a part's stream of /generate as one of the whole.
func (p Part) NativeEvent(data []byte) ([]byte, error) {
	r, err := Scan(data)
	if err != nil {
		return nil, err
	}
	pieces, _ := r.Apply(Edit{Key: "index", Value: strconv.AppendInt(nil, int64(p.Index), 10)})
	return bytes.Join(pieces, nil), nil
}

// JoinNative makes one answer of /generate of those of parts: their list.
func JoinNative(answers [][]byte) ([]byte, error) {
	for _, text := range answers {
		if _, err := Scan(text); err != nil {
			return nil, err
		}
	}
	return list(slices.Clone(answers)), nil
}

// ErrorOf returns the error of an event that ends a stream of the API with one, as a JSON object.
func (a API) ErrorOf(data []byte) []byte {
	if a == Native {
		if status, text := aborted(data); status != 0 {
			body, _ := json.Marshal(map[string]any{"error": map[string]any{"message": text, "type": "InternalServerError", "code": status}}) // plain values
			return body
		}
	}
	return bytes.Clone(data)
}
