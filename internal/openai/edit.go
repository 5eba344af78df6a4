// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"bytes"
	"encoding/json"
	"slices"
)

func unquote(v []byte) (s string, err error) {
	err = json.Unmarshal(v, &s)
	return s, err
}

// Edit is a change of one key of a request.
type Edit struct {
	Key   string
	Value []byte // JSON; nil takes the key out
}

// Each calls f with each key and its value, in order.
func (r *Request) Each(f func(name string, value []byte)) {
	for i := range r.fields {
		name, _ := r.Text(r.fields[i].name)
		f(name, r.fields[i].value.Of(r.Body))
	}
}

// Apply returns the body with changes, as pieces that share the body's memory, and their
// length. A key that is there changes in its place, each time it comes; others are added at
// the end.
func (r *Request) Apply(edits ...Edit) (pieces [][]byte, length int) {
	at := 0
	put := func(b []byte) {
		if len(b) > 0 {
			pieces, length = append(pieces, b), length+len(b)
		}
	}
	done := make([]bool, len(edits))
	kept := 0
	for i := range r.fields {
		f := &r.fields[i]
		name, _ := r.Text(f.name)
		e := slices.IndexFunc(edits, func(e Edit) bool { return e.Key == name })
		switch {
		case e < 0:
			kept++
		case edits[e].Value != nil:
			done[e] = true
			put(r.Body[at:f.value.From])
			put(edits[e].Value)
			at = f.value.To
			kept++
		default:
			done[e] = true
			begin, end := f.begin, f.end
			if i == len(r.fields)-1 && kept == 0 {
				begin = f.name.From // every key before it is gone, with its comma
			}
			put(r.Body[at:max(at, begin)])
			at = max(at, end)
		}
	}
	brace := bytes.LastIndexByte(r.Body, '}')
	var tail []byte
	for i, e := range edits {
		if done[i] || e.Value == nil {
			continue
		}
		if kept > 0 {
			tail = append(tail, ',')
		}
		key, _ := json.Marshal(e.Key) // a string
		tail = append(append(append(tail, key...), ':'), e.Value...)
		kept++
	}
	put(r.Body[at:brace])
	put(tail)
	put(r.Body[brace:])
	return pieces, length
}
