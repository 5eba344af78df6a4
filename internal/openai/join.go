// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"bytes"
	"encoding/json"
	"errors"
	"strconv"
	"strings"
)

// Part describes one of several answers that are joined into one answer (the whole): the answer to one prompt of a list.
type Part struct {
	Index int    // index of the part's choice in the whole
	Whole string // request id of the whole, with which the part's request id begins. The answer's id is cut after it. "": the id stays
	ID    string // id of the whole's answer, which replaces the part's id; "": see Whole
	Later bool   // an earlier part has the same prompt, whose tokens the whole counts only once
}

var errNoChoices = errors.New("openai: the answer has no choices")

// field returns the range of the value of a top-level key; of several, the last.
func (r *Request) field(name string) (at Range) {
	for i := range r.fields {
		if key, _ := r.Text(r.fields[i].name); key == name {
			at = r.fields[i].value
		}
	}
	return at
}

// renumbered returns the choices of an answer or event, with the index of the part.
func (p Part) renumbered(r *Request) (choices [][]byte, err error) {
	list, ok := elements(r.Body, r.field("choices"))
	if !ok {
		return nil, errNoChoices
	}
	index := strconv.AppendInt(nil, int64(p.Index), 10)
	for _, at := range list {
		c, err := Scan(at.Of(r.Body))
		if err != nil {
			return nil, err
		}
		pieces, _ := c.Apply(Edit{Key: "index", Value: index})
		choices = append(choices, bytes.Join(pieces, nil))
	}
	return choices, nil
}

// id returns the edit that gives an answer the id of the whole.
func (p Part) id(r *Request) []Edit {
	if p.ID != "" {
		value, _ := json.Marshal(p.ID) // a string always encodes
		return []Edit{{Key: "id", Value: value}}
	}
	id, _ := r.Text(r.field("id"))
	at := strings.Index(id, p.Whole)
	if at < 0 || p.Whole == "" {
		return nil
	}
	value, _ := json.Marshal(id[:at+len(p.Whole)]) // a string always encodes
	return []Edit{{Key: "id", Value: value}}
}

// Event turns an event of a part's stream into an event of the whole. For an event without choices it returns only the usage, because
// the whole has one usage, at its end. An event with neither choices nor usage, such as SGLang's sglext, is passed on only from the
// first part, as one engine would send it; for other parts both results are nil.
func (p Part) Event(data []byte) (whole, usage []byte, err error) {
	r, err := Scan(data)
	if err != nil {
		return nil, nil, err
	}
	choices, err := p.renumbered(r)
	if err != nil {
		return nil, nil, err
	}
	switch {
	case len(choices) == 0 && r.Given("usage"):
		return nil, data, nil
	case len(choices) == 0 && p.Index > 0:
		return nil, nil, nil
	}
	pieces, _ := r.Apply(append(p.id(r), Edit{Key: "choices", Value: list(choices)})...)
	return bytes.Join(pieces, nil), nil, nil
}

func list(items [][]byte) []byte {
	b := append([]byte{'['}, bytes.Join(items, []byte{','})...)
	return append(b, ']')
}

// JoinAnswers makes one answer of the answers of parts: all choices, the sum of the usages, and everything else from the first answer.
// It can also join events that have only a usage.
func JoinAnswers(parts []Part, answers [][]byte) ([]byte, error) {
	var choices [][]byte
	var sum any
	var first *Request
	for i, text := range answers {
		r, err := Scan(text)
		if err != nil {
			return nil, err
		}
		more, err := parts[i].renumbered(r)
		if err != nil {
			return nil, err
		}
		choices = append(choices, more...)
		if at := r.field("usage"); at.Has() {
			var usage any
			d := json.NewDecoder(bytes.NewReader(at.Of(text)))
			d.UseNumber()
			if err := d.Decode(&usage); err != nil {
				return nil, err
			}
			if parts[i].Later {
				usage = withoutPrompt(usage)
			}
			sum = added(sum, usage)
		}
		if first == nil {
			first = r
		}
	}
	edits := append(parts[0].id(first), Edit{Key: "choices", Value: list(choices)}, Edit{Key: "kv_transfer_params"})
	if sum != nil {
		usage, err := json.Marshal(sum)
		if err != nil {
			return nil, err
		}
		edits = append(edits, Edit{Key: "usage", Value: usage})
	}
	pieces, _ := first.Apply(edits...)
	return bytes.Join(pieces, nil), nil
}

// withoutPrompt returns a usage that does not count the tokens of the prompt.
func withoutPrompt(usage any) any {
	u, ok := usage.(map[string]any)
	if !ok {
		return usage
	}
	number := func(name string) int64 {
		v, _ := u[name].(json.Number)
		n, _ := v.Int64() // 0 if it is not a number
		return n
	}
	if _, ok := u["total_tokens"]; ok {
		u["total_tokens"] = json.Number(strconv.FormatInt(number("total_tokens")-number("prompt_tokens"), 10))
	}
	delete(u, "prompt_tokens")
	delete(u, "prompt_tokens_details")
	return u
}

// added adds the numbers in two JSON values, key by key. For values that are not numbers it returns the first.
func added(a, b any) any {
	switch x := a.(type) {
	case nil:
		return b
	case json.Number:
		y, ok := b.(json.Number)
		if !ok {
			return a
		}
		n, err := x.Int64()
		m, err2 := y.Int64()
		if err != nil || err2 != nil {
			f, _ := x.Float64() // 0 if it is not a number
			g, _ := y.Float64()
			return f + g
		}
		return json.Number(strconv.FormatInt(n+m, 10))
	case map[string]any:
		if y, ok := b.(map[string]any); ok {
			for k, v := range y {
				x[k] = added(x[k], v)
			}
		}
	}
	return a
}
