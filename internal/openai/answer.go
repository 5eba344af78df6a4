// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"bytes"
	"encoding/json"
	"strconv"
)

// Answer holds what a proxy needs to know about an answer that is no stream.
type Answer struct {
	Params []byte // kv_transfer_params, a JSON object; nil: none
	Cached int    // usage.prompt_tokens_details.cached_tokens; engines leave it out if it is 0; -1: there is no usage
	// Stopped means that a stop token of the model ended the answer. The length did not end it, nor did a text in the request's stop,
	// which the engine's frontend finds only after the scheduler.
	Stopped bool
}

// ScanAnswer reads an answer, which must be a JSON object. The result does not keep text in memory.
func ScanAnswer(text []byte) (a Answer, err error) {
	r := Request{Body: text, fields: make([]field, 0, usualFields)}
	if err := r.scan(); err != nil {
		return a, err
	}
	a.Cached = -1
	if v := r.Params.Of(text); len(v) > 2 && v[0] == '{' {
		a.Params = bytes.Clone(v)
	}
	type details struct {
		Cached int `json:"cached_tokens"`
	}
	var usage struct {
		Details *details `json:"prompt_tokens_details"`
		Input   *details `json:"input_tokens_details"`    // of Responses
		Read    int      `json:"cache_read_input_tokens"` // of Messages
		Cached  int      `json:"cached_tokens"`           // of SGLang's meta_info
	}
	for i := range r.fields {
		name, _ := r.Text(r.fields[i].name)
		value := r.fields[i].value
		switch name {
		case "choices": // of completions, chat and generate
			a.Stopped = a.Stopped || stopped(text, value)
		case "stop_reason": // of Messages
			a.Stopped = a.Stopped || string(value.Of(text)) == `"end_turn"`
		case "status": // of Responses
			a.Stopped = a.Stopped || string(value.Of(text)) == `"completed"`
		}
		if name == "usage" || name == "meta_info" {
			v := value.Of(text)
			if v[0] != '{' {
				continue
			}
			if !HasCached(v) { // skip the decoding, which costs more than the rest of ScanAnswer
				a.Cached = 0
				continue
			}
			if json.Unmarshal(v, &usage) != nil {
				continue
			}
			a.Cached = max(usage.Read, usage.Cached, 0)
			for _, d := range []*details{usage.Details, usage.Input} {
				if d != nil {
					a.Cached = max(a.Cached, d.Cached)
				}
			}
		}
	}
	return a, nil
}

// stopped reports whether the first choice of an answer ended at a stop token.
func stopped(text []byte, choices Range) bool {
	list, ok := elements(text, choices)
	if !ok || len(list) == 0 {
		return false
	}
	c := Request{Body: list[0].Of(text), fields: make([]field, 0, usualFields)}
	if c.scan() != nil {
		return false
	}
	_, byText := c.Text(c.field("stop_reason"))
	reason, _ := c.Text(c.field("finish_reason"))
	return reason == "stop" && !byText
}

// cachedKeys are the keys for the number of cached tokens in a usage, in OpenAI's APIs and in Anthropic's.
var cachedKeys = [][]byte{[]byte(`"cached_tokens"`), []byte(`"cache_read_input_tokens"`)}

// HasCached reports whether an answer, or an event of a stream, contains a number of cached tokens.
func HasCached(text []byte) bool {
	return bytes.Contains(text, cachedKeys[0]) || bytes.Contains(text, cachedKeys[1])
}

// HasMoreEvents reports whether an event of a stream of SGLang's /generate says that others follow (finish_reason null). Each event has
// the number of cached tokens.
func HasMoreEvents(event []byte) bool {
	at := bytes.LastIndex(event, finishReason) // the last occurrence, because a text before it may contain the same words
	return at >= 0 && bytes.HasPrefix(bytes.TrimLeft(event[at+len(finishReason):], " :"), []byte("null"))
}

var finishReason = []byte(`"finish_reason"`)

// SetCached returns an answer, or an event of a stream, with n as the number of cached tokens in its usage. A text without such a
// number stays unchanged. The same keys elsewhere, for example in a tool call, stay unchanged, too.
func SetCached(text []byte, n int) []byte {
	if !HasCached(text) {
		return text
	}
	var out []byte
	at := 0
	for _, usage := range usages(text) {
		value := usage.Of(text)
		for _, key := range cachedKeys {
			value = setCached(value, key, n)
		}
		out = append(append(out, text[at:usage.From]...), value...)
		at = usage.To
	}
	if out == nil {
		return text
	}
	return append(out, text[at:]...)
}

// usages returns the ranges of the usages in an answer, or in an event of a stream: at the top, or in the event's response or message.
func usages(text []byte) (all []Range) {
	if json := bytes.TrimLeft(text, " \t\r\n"); len(json) > 0 && json[0] == '{' {
		return usagesOf(text, Range{0, len(text)}, nil)
	}
	at := 0
	for line := range bytes.Lines(text) {
		if bytes.HasPrefix(line, []byte("data:")) {
			all = usagesOf(text, Range{at + len("data:"), at + len(line)}, all)
		}
		at += len(line)
	}
	return all
}

// usagesOf appends to all the ranges of the usages in an object, in order.
func usagesOf(text []byte, object Range, all []Range) []Range {
	r, err := Scan(object.Of(text))
	if err != nil {
		return all
	}
	for _, f := range r.fields {
		name, _ := r.Text(f.name)
		value := Range{object.From + f.value.From, object.From + f.value.To}
		switch {
		case text[value.From] != '{':
		case name == "usage", name == "meta_info": // SGLang's native answers
			all = append(all, value)
		case name == "response", name == "message":
			inner, err := Scan(value.Of(text))
			if err != nil {
				continue
			}
			if at := inner.field("usage"); at.Has() && text[value.From+at.From] == '{' {
				all = append(all, Range{value.From + at.From, value.From + at.To})
			}
		}
	}
	return all
}

func setCached(text, cachedKey []byte, n int) []byte {
	var out []byte
	for {
		at := bytes.Index(text, cachedKey)
		if at < 0 {
			break
		}
		end := at + len(cachedKey)
		from := end + len(text[end:]) - len(bytes.TrimLeft(text[end:], " :"))
		to := from
		for to < len(text) && text[to] >= '0' && text[to] <= '9' {
			to++
		}
		if to == from || bytes.IndexByte(text[end:from], ':') < 0 || at > 0 && text[at-1] == '\\' {
			out = append(out, text[:end]...)
			text = text[end:]
			continue
		}
		out = strconv.AppendInt(append(out, text[:from]...), int64(n), 10)
		text = text[to:]
	}
	if out == nil {
		return text
	}
	return append(out, text...)
}

// ErrorIn returns the kind and the text of the error in the body of an engine's answer; "": there is none. vLLM puts them under error,
// and SGLang's OpenAI routes at the top (0.5.23). FastAPI, on which both are built, puts a text under detail.
func ErrorIn(body []byte) (kind, text string) {
	type said struct {
		Message string `json:"message"`
		Type    string `json:"type"`
	}
	var answer struct {
		said
		Error  *said  `json:"error"`
		Detail string `json:"detail"`
	}
	_ = json.Unmarshal(body, &answer) // decodes as far as it can
	switch {
	case answer.Error != nil && answer.Error.Message != "":
		return answer.Error.Type, answer.Error.Message
	case answer.Message != "":
		return answer.Type, answer.Message
	}
	return "", answer.Detail
}
