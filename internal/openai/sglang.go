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

// Sequence is one prompt with one answer, of a request that asks for several.
type Sequence struct {
	Prompt int    // number of the prompt
	Sample int    // number of the answer to that prompt
	Edits  []Edit // turn the request into a request for this sequence only
}

// ErrSequences means that a request cannot be divided into its sequences.
var ErrSequences = errors.New("openai: the request cannot be divided into its prompts and answers")

// batched lists the keys of SGLang's /generate whose value may be a list with an element for each prompt (SGLang 0.5.23, io_struct.py).
// For a key with false, the value is a list even for one prompt; it has an element for each prompt only if its elements are lists.
var batched = map[string]bool{
	"sampling_params": true, "return_logprob": true, "logprob_start_len": true, "top_logprobs_num": true, "return_sampling_mask": true,
	"sampling_logprobs_mode": true, "return_hidden_states": true, "lora_path": true, "custom_logit_processor": true, "extra_key": true, "cache_salt": true,
	"watermark": true, "image_data": true, "video_data": true, "audio_data": true, "kv_hints": true, "mm_hashes": true, "mm_content_hashes": true,
	"input_ids":         false, // beside text
	"token_ids_logprob": false, "multi_item_delimiter_indices": false, "token_indices_to_pool": false,
}

// batchedOfCompletions is the same table for /v1/completions (SGLang 0.5.23, openai/protocol.py).
var batchedOfCompletions = map[string]bool{"lora_path": true, "extra_key": true, "cache_salt": true}

// Sequences returns the sequences of a request to a path of SGLang, ordered by prompt. It returns an error if they are more than `limit`, or
// if the request cannot be divided; the error says what is wrong with the request.
func (r *Request) Sequences(path string, limit int) (all []Sequence, err error) {
	var prompts [][]Edit
	n, listed := 1, false
	switch APIOf(path) {
	case Native:
		prompts, n, listed, err = r.nativePrompts(limit)
	case Completions:
		prompts, n, listed, err = r.openAIPrompts(path == "/v1/completions", limit)
	default:
		return []Sequence{{}}, nil
	}
	if err != nil {
		return nil, err
	}
	if n > limit || n*len(prompts) > limit {
		return nil, fmt.Errorf("the request has %d prompts with %d answers each, at most %d answers are allowed", len(prompts), n, limit)
	}
	var ids []string
	if listed || n > 1 {
		if ids, err = r.ownIDs(len(prompts), n); err != nil {
			return nil, err
		}
	}
	for i, edits := range prompts {
		for k := range n {
			own := edits[:len(edits):len(edits)]
			if ids != nil {
				value, _ := json.Marshal(ids[i*n+k]) // a string always encodes
				own = append(own, Edit{Key: "rid", Value: value})
			}
			all = append(all, Sequence{i, k, own})
		}
	}
	return all, nil
}

// given reports whether the value at a range exists and is not null.
func (r *Request) given(at Range) bool { return at.Has() && string(at.Of(r.Body)) != "null" }

// Given reports whether the request has the key with a value other than null.
func (r *Request) Given(key string) bool { return r.given(r.field(key)) }

// answers returns the number of answers at a range; 1 if the request does not give it.
func (r *Request) answers(at Range) (int, error) {
	if !r.given(at) {
		return 1, nil
	}
	n, ok := r.Int(at)
	if !ok || n < 1 {
		return 0, errors.New("n must be a number above 0")
	}
	return n, nil
}

// openAIPrompts returns, for each prompt, the edits that leave only that prompt, with one answer. n is the number of answers per prompt.
// lists means that the path allows a list of prompts (a chat has one prompt), and listed that the request has one. More than `limit`
// prompts are an error.
func (r *Request) openAIPrompts(lists bool, limit int) (prompts [][]Edit, n int, listed bool, err error) {
	if n, err = r.answers(r.N); err != nil {
		return nil, 0, false, err
	}
	var one []Edit
	if n > 1 {
		one = []Edit{{Key: "n", Value: []byte("1")}}
	}
	var list []Range
	if lists {
		list, listed, err = r.promptList(r.Prompt, limit)
	}
	if err != nil || !listed {
		return [][]Edit{one}, n, false, err
	}
	names, each, err := r.batchedFields("prompt", len(list), batchedOfCompletions)
	if err != nil {
		return nil, 0, false, err
	}
	for i, at := range list {
		edits := append(one[:len(one):len(one)], Edit{Key: "prompt", Value: at.Of(r.Body)})
		for f, name := range names {
			edits = append(edits, Edit{Key: name, Value: each[f][i].Of(r.Body)})
		}
		prompts = append(prompts, edits)
	}
	return prompts, n, true, nil
}

// promptList returns the ranges of the prompts in the value at the range `at`, a list of texts or of lists of token ids; listed is false for
// a single prompt. More than `limit` prompts are an error.
func (r *Request) promptList(at Range, limit int) (list []Range, listed bool, err error) {
	if !at.Has() || r.Body[at.From] != '[' {
		return nil, false, nil
	}
	if first := beginsWith(r.Body, at); first != '"' && first != '[' {
		return nil, false, nil // token ids, or an empty list, which the engine refuses
	}
	list, n, ok := firstElements(r.Body, at, limit)
	switch {
	case !ok:
		return nil, false, nil // the engine refuses it
	case n > limit:
		return nil, false, fmt.Errorf("the request has %d prompts, at most %d are allowed", n, limit)
	}
	for _, at := range list {
		if r.Body[at.From] != r.Body[list[0].From] {
			return nil, false, errors.New("the prompts of a list must be of one kind")
		}
	}
	return list, true, nil
}

// nativePrompts does for /generate what openAIPrompts does for OpenAI's paths.
func (r *Request) nativePrompts(limit int) (prompts [][]Edit, n int, listed bool, err error) {
	key, at := "text", r.TextIn
	if !r.given(at) {
		key, at = "input_ids", r.InputIDs
	}
	list, listed, err := r.promptList(at, limit)
	if err != nil {
		return nil, 0, false, err
	}
	if !listed {
		if r.Sampling.Has() && r.Body[r.Sampling.From] == '[' || !r.given(at) && r.given(r.field("input_embeds")) {
			return nil, 0, false, ErrSequences // a list of embeddings may be one prompt or several
		}
		edit, n, err := r.sampling(r.Sampling)
		return [][]Edit{edit}, n, false, err
	}
	names, each, err := r.batchedFields(key, len(list), batched)
	if err != nil {
		return nil, 0, false, err
	}
	var edit []Edit
	var last Range // the range read last: if many prompts share parameters, they are read and stored once
	for i, at := range list {
		edits := []Edit{{Key: key, Value: at.Of(r.Body)}}
		own := r.Sampling
		for f, name := range names {
			if name == "sampling_params" {
				own = each[f][i]
				continue
			}
			edits = append(edits, Edit{Key: name, Value: each[f][i].Of(r.Body)})
		}
		answers := n
		if i == 0 || own != last {
			if edit, answers, err = r.sampling(own); err != nil {
				return nil, 0, false, err
			}
			last = own
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

// batchedFields returns the names of the fields in the table batched that have an element for each prompt, except the field prompts, and
// the ranges of their elements (each). count is the number of prompts; a list of another length is an error. If a key occurs twice, the
// last one counts.
func (r *Request) batchedFields(prompts string, count int, batched map[string]bool) (names []string, each [][]Range, err error) {
	last := make(map[string]Range)
	for f := range r.fields {
		name, _ := r.Text(r.fields[f].name)
		if _, known := batched[name]; known && name != prompts {
			if _, twice := last[name]; !twice {
				names = append(names, name)
			}
			last[name] = r.fields[f].value
		}
	}
	listed := names[:0]
	for _, name := range names {
		value := last[name]
		if r.Body[value.From] != '[' {
			continue
		}
		if first := beginsWith(r.Body, value); first == 0 || !batched[name] && first != '[' {
			continue
		}
		all, n, ok := firstElements(r.Body, value, count)
		if !ok || n != count {
			return nil, nil, fmt.Errorf("%s has %d elements, the request has %d prompts", name, n, count)
		}
		listed, each = append(listed, name), append(each, all)
	}
	return listed, each, nil
}

// sampling returns how many answers the sampling parameters at a range ask for, and the edit that reduces that to one; nil: no edit is
// needed.
func (r *Request) sampling(at Range) (edit []Edit, n int, err error) {
	if !r.given(at) {
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
		return nil, 1, nil // in a beam search, n belongs to one sequence
	}
	pieces, _ := s.Apply(Edit{Key: "n", Value: []byte("1")})
	return []Edit{{Key: "sampling_params", Value: bytes.Join(pieces, nil)}}, n, nil
}

// maxIDs bounds the total length of the request ids of a divided request, in bytes; a request with longer ones is refused.
const maxIDs = 1 << 20

// ownIDs returns request ids for the sequences if the client chose a request id, or one for each prompt; else nil. They have the form
// ID_NUMBER, as in SGLang. All numbers have the same number of digits, because SGLang (0.5.23) aborts all requests whose ids begin with
// the id of an aborted one, as r_10 begins with r_1.
func (r *Request) ownIDs(prompts, n int) (ids []string, err error) {
	at := r.field("rid")
	if !r.given(at) {
		return nil, nil
	}
	numbered := func(id string, count int) {
		digits := len(strconv.Itoa(count - 1))
		for i := range count {
			ids = append(ids, fmt.Sprintf("%s_%0*d", id, digits, i))
		}
	}
	copies, size := n, at.To-at.From
	if r.Body[at.From] == '"' {
		copies *= prompts
	}
	if copies > 1 && size > maxIDs/copies {
		return nil, fmt.Errorf("rid has %d bytes, which is too long for %d prompts with %d answers each", size, prompts, n)
	}
	if id, single := r.Text(at); single {
		numbered(id, prompts*n)
		return ids, nil
	}
	each, count, ok := firstElements(r.Body, at, prompts)
	if !ok || count != prompts {
		return nil, fmt.Errorf("rid must be a text, or a list of one for each of the %d prompts", prompts)
	}
	for _, at := range each {
		id, isText := r.Text(at)
		switch {
		case !isText:
			return nil, errors.New("rid must be a text, or a list of texts")
		case n > 1:
			numbered(id, n)
		default:
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// PrefixID returns the edit that puts prefix before the request ids that a client chose for SGLang. ok is false if the client chose
// none.
func (r *Request) PrefixID(prefix string) (e Edit, ok bool) {
	at := r.field("rid")
	if !at.Has() {
		return e, false
	}
	if id, single := r.Text(at); single {
		value, _ := json.Marshal(prefix + id) // a string always encodes
		return Edit{Key: "rid", Value: value}, true
	}
	each, n, ok := firstElements(r.Body, at, maxFields)
	if !ok || n > maxFields {
		return e, false
	}
	var ids []string
	for _, at := range each {
		id, isText := r.Text(at)
		if !isText {
			return e, false // the engine refuses it
		}
		ids = append(ids, prefix+id)
	}
	value, _ := json.Marshal(ids) // strings always encode
	return Edit{Key: "rid", Value: value}, true
}

// NativeEvent turns an event of a part's stream of /generate into an event of the whole.
func (p Part) NativeEvent(data []byte) ([]byte, error) {
	r, err := Scan(data)
	if err != nil {
		return nil, err
	}
	pieces, _ := r.Apply(Edit{Key: "index", Value: strconv.AppendInt(nil, int64(p.Index), 10)})
	return bytes.Join(pieces, nil), nil
}

// JoinNative joins the answers of parts to one answer of /generate: a JSON list of them.
func JoinNative(answers [][]byte) ([]byte, error) {
	for _, text := range answers {
		if _, err := Scan(text); err != nil {
			return nil, err
		}
	}
	return list(slices.Clone(answers)), nil
}

// ErrorOf returns the error in an event that ends a stream of the API, as a JSON object.
func (a API) ErrorOf(data []byte) []byte {
	if a == Native {
		if status, text := aborted(data); status != 0 {
			body, _ := json.Marshal(map[string]any{"error": map[string]any{"message": text, "type": "InternalServerError", "code": status}}) // plain values
			return body
		}
	}
	return bytes.Clone(data)
}
