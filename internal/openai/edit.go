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

// Edit is a change of one key of a request's JSON object.
type Edit struct {
	Key   string
	Value []byte // the new value as JSON; nil removes the key
}

// Each calls f with each key and its value, in order.
func (r *Request) Each(f func(name string, value []byte)) {
	for i := range r.fields {
		name, _ := r.Text(r.fields[i].name)
		f(name, r.fields[i].value.Of(r.Body))
	}
}

// Apply returns the body with the edits made, as pieces that share the body's memory, and their total length. It changes an existing
// key in its place, at each occurrence. It adds a new key at the end.
func (r *Request) Apply(edits ...Edit) (pieces [][]byte, length int) {
	at := 0
	put := func(b []byte) {
		if len(b) > 0 {
			pieces, length = append(pieces, b), length+len(b)
		}
	}
	done := make([]bool, len(edits))
	var most [32]int
	which := most[:0]   // index of the edit of each field; -1: none
	kept, last := 0, -1 // number of the fields that stay, and the last of them
	for i := range r.fields {
		name, _ := r.Text(r.fields[i].name)
		e := slices.IndexFunc(edits, func(e Edit) bool { return e.Key == name })
		if which = append(which, e); e < 0 || edits[e].Value != nil {
			last = i
		}
	}
	for i, e := range which {
		f := &r.fields[i]
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
			begin := f.name.From
			if last >= 0 && i > last { // also cut the comma after the last field that stays
				begin = r.fields[last].value.To
			}
			put(r.Body[at:max(at, begin)])
			at = max(at, f.end)
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
		key, _ := json.Marshal(e.Key) // a string always encodes
		tail = append(append(append(tail, key...), ':'), e.Value...)
		kept++
	}
	put(r.Body[at:brace])
	put(tail)
	put(r.Body[brace:])
	return pieces, length
}
