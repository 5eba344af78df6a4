// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
)

// API is one of the interfaces that an engine serves. Each API has its own kinds of events.
type API uint8

const (
	Completions API = iota // /v1/completions and /v1/chat/completions
	Responses              // /v1/responses
	Messages               // /v1/messages, Anthropic's
	Native                 // /generate, SGLang's
	Other                  // if it has streams, they end when the HTTP body ends
)

// APIOf returns the API to which a path belongs.
func APIOf(path string) API {
	switch {
	case path == "/v1/completions", strings.HasPrefix(path, "/v1/chat/completions"):
		return Completions
	case path == "/v1/responses":
		return Responses
	case path == "/v1/messages":
		return Messages
	case path == "/generate":
		return Native
	}
	return Other
}

// Last returns a text for logs that describes the last event of a complete stream of the API.
func (a API) Last() string {
	return [...]string{"data: " + Done, "response.completed, response.incomplete or response.failed", "message_stop", "data: " + Done, "any event"}[a]
}

// EndsWithDone reports whether the last event of a stream of the API is [DONE].
func (a API) EndsWithDone() bool { return a == Completions || a == Native }

// AppendError appends an event that ends a stream with an error, in the API's form. status is the HTTP status that this error would
// have outside a stream.
//
// Sources: vLLM 0.32 (completions), OpenAI's Responses streaming events ("error"), Anthropic's Messages streaming ("error").
func (a API) AppendError(b []byte, status int, kind, text string) []byte {
	inner := map[string]any{"message": text, "type": kind, "param": nil, "code": status}
	var data []byte // plain values can always be encoded
	switch a {
	case Responses:
		// Some clients look for "error" in the event, others for the event's own fields.
		data, _ = json.Marshal(map[string]any{"type": "error", "sequence_number": 0, "code": "server_error", "message": text, "param": nil, "error": inner})
		b = append(b, "event: error\n"...)
	case Messages:
		data, _ = json.Marshal(map[string]any{"type": "error", "error": map[string]any{"type": "api_error", "message": text}})
		b = append(b, "event: error\n"...)
	default:
		data, _ = json.Marshal(map[string]any{"error": inner})
	}
	return AppendEvent(b, data)
}

// State is how far a stream has come.
type State uint8

const (
	Open     State = iota // the last event has not come
	Complete              // the last event has come
	Failed                // the last event was an error that tells the client why the stream ended
)

// lineBytes is how many bytes of a line an End keeps: enough for the name of an event, or for the beginning of its data.
const lineBytes = 96

// End reads a stream of events, in pieces of any size, to find out whether the stream is complete.
//
// Comments, pings and empty events do not count. An event counts once the empty line after it has come. [DONE] needs no empty line.
type End struct {
	api   API
	state State

	line    [lineBytes]byte // the beginning of the current line
	n       int             // bytes of the current line in `line`
	long    bool            // the current line is longer than n
	events  int             // number of complete events with data, without pings
	name    string          // name of the current event; "": none
	data    []byte          // the beginning of the current event's data
	hasData bool
	failed  bool   // an event reported that the engine failed
	tail    []byte // for SGLang's /generate: the last bytes of the stream, in which a statusOfAbort may begin
}

// statusOfAbort is the text by which an event of SGLang's /generate reports that the engine itself is at fault for the end of the
// answer (0.5.23). It is in meta_info.finish_reason, after a text of any length. Inside a JSON string, its quotes would have
// backslashes.
var statusOfAbort = []byte(`"status_code":5`)

// NewEnd returns an End for a stream of the API a.
func NewEnd(a API) *End { return &End{api: a} }

// Add reads the next bytes of the stream.
func (e *End) Add(b []byte) {
	if e.api == Native && !e.failed {
		n := len(statusOfAbort) - 1
		seam := append(e.tail, b[:min(n, len(b))]...)
		e.failed = bytes.Contains(seam, statusOfAbort) || bytes.Contains(b, statusOfAbort)
		last := b[max(0, len(b)-n):]
		if len(b) < n {
			last = seam[max(0, len(seam)-n):]
		}
		e.tail = append(e.tail[:0], last...)
	}
	for len(b) > 0 {
		i := bytes.IndexByte(b, '\n')
		piece := b
		if i >= 0 {
			piece = b[:i]
		}
		n := copy(e.line[e.n:], piece)
		e.n += n
		e.long = e.long || n < len(piece)
		if i < 0 {
			return
		}
		e.takeLine()
		b = b[i+1:]
	}
}

// takeLine handles a complete line.
func (e *End) takeLine() {
	line := bytes.TrimPrefix(e.line[:e.n], bom)
	if !e.long {
		line = bytes.TrimSuffix(line, []byte("\r"))
	}
	e.n, e.long = 0, false
	if len(line) == 0 {
		if e.hasData {
			e.state = e.after()
			e.failed = e.failed || e.state == Failed
			if e.name != "ping" && typeOf(e.data) != "ping" && len(e.data) > 0 {
				e.events++
			}
		}
		e.name, e.data, e.hasData = "", e.data[:0], false
		return
	}
	if name, ok := bytes.CutPrefix(line, []byte("event:")); ok {
		e.name = string(bytes.TrimSpace(name))
	} else if data, ok := bytes.CutPrefix(line, []byte("data:")); ok && !e.hasData {
		e.hasData = true
		e.data = append(e.data[:0], bytes.TrimPrefix(data, []byte(" "))...)
	}
}

// after returns the state of the stream after the event that has just been read.
func (e *End) after() State {
	name := e.name
	if name == "" {
		name = typeOf(e.data)
	}
	switch {
	case e.api.EndsWithDone() && string(e.data) == Done:
		return Complete
	case string(e.data) == Done, name == "ping":
		return e.state
	case name == "error", e.api.EndsWithDone() && bytes.HasPrefix(e.data, []byte(`{"error"`)):
		return Failed
	case slices.Contains(lastEvents[e.api], name):
		return Complete
	}
	return Open
}

var lastEvents = map[API][]string{
	Responses: {"response.completed", "response.incomplete", "response.failed"},
	Messages:  {"message_stop"},
}

// typeOf returns the value of "type" at the beginning of an event's data; "": there is none.
func typeOf(data []byte) string {
	rest, ok := bytes.CutPrefix(data, []byte(`{"type":`))
	if rest = bytes.TrimLeft(rest, " "); !ok || len(rest) == 0 || rest[0] != '"' {
		return ""
	}
	name, _, ok := bytes.Cut(rest[1:], []byte(`"`))
	if !ok {
		return ""
	}
	return string(name)
}

// Failed reports whether any event of the stream was an error. Engines may send [DONE] even after an error.
func (e *End) Failed() bool { return e.failed }

// Events returns how many events with data have come, without pings.
func (e *End) Events() int { return e.events }

// State returns the state of the stream so far.
func (e *End) State() State {
	rest := bytes.TrimPrefix(bytes.TrimSuffix(e.line[:e.n], []byte("\r")), bom)
	switch {
	case e.api == Other:
		return Complete
	case e.api.EndsWithDone() && !e.long && (string(rest) == "data: "+Done || string(rest) == "data:"+Done),
		e.api.EndsWithDone() && e.n == 0 && e.hasData && string(e.data) == Done:
		return Complete
	case e.n > 0 || e.hasData || e.name != "":
		return Open // an event has begun but not ended
	}
	return e.state
}

// Kind says what an event tells about the progress of an answer.
type Kind uint8

const (
	Nothing Kind = iota // a comment, a ping or an empty event
	Opening             // the beginning of an answer, without a token
	Failure             // the engine failed, and the request is not at fault
	Data                // anything else
)

// KindOf returns the kind of an event. raw includes the empty line after it.
func (a API) KindOf(raw []byte) Kind {
	var name string
	var data []byte
	for line := range bytes.Lines(bytes.TrimPrefix(raw, bom)) {
		line = bytes.TrimRight(line, "\r\n")
		if v, ok := bytes.CutPrefix(line, []byte("event:")); ok {
			name = string(bytes.TrimSpace(v))
		} else if v, ok := bytes.CutPrefix(line, []byte("data:")); ok && data == nil {
			data = bytes.TrimSpace(v)
		}
	}
	if name == "" {
		name = typeOf(data)
	}
	switch {
	case len(data) == 0, name == "ping":
		return Nothing
	case name == "response.created", name == "response.in_progress", name == "response.queued":
		return Opening
	case name == "message_start", isOpening[name] && opensEmpty(data):
		return Opening
	case name == "error", bytes.HasPrefix(data, []byte(`{"error"`)):
		return a.failureOf(data)
	case a == Native && bytes.Contains(data, []byte(`"abort"`)):
		if status, _ := aborted(data); status >= 500 {
			return Failure
		}
	case a == Completions && bytes.Contains(data, []byte(`"role"`)) && onlyRole(data):
		return Opening
	}
	return Data
}

// isOpening lists the events that begin a part of an answer. A text part begins empty, without a token; a tool call begins with its
// name.
var isOpening = map[string]bool{
	"content_block_start": true, "response.output_item.added": true, "response.content_part.added": true,
	"response.reasoning_part.added": true, "response.reasoning_summary_part.added": true,
}

// opensEmpty reports whether an event begins a text, a message or a reasoning that is still empty.
func opensEmpty(data []byte) bool {
	var e struct {
		Block map[string]any `json:"content_block"`
		Item  map[string]any `json:"item"`
		Part  map[string]any `json:"part"`
	}
	if json.Unmarshal(data, &e) != nil {
		return false
	}
	of := e.Block
	if of == nil {
		of = e.Item
	}
	if of == nil {
		of = e.Part
	}
	switch of["type"] {
	case "text", "thinking", "message", "reasoning", "output_text", "reasoning_text", "summary_text":
	default:
		return false
	}
	for _, k := range []string{"text", "thinking", "content", "summary", "encrypted_content"} {
		if list, ok := of[k].([]any); of[k] != nil && of[k] != "" && (!ok || len(list) > 0) {
			return false
		}
	}
	return true
}

// errorEvent is an event that ends a stream with an error.
type errorEvent struct {
	Error struct {
		Code any    `json:"code"`
		Type string `json:"type"`
	} `json:"error"`
}

// status returns the HTTP status that the same error would have outside a stream; 0: the event does not tell it.
//
// If the request is at fault, SGLang's /generate streams {"error":{"message":TEXT}}; without a stream it answers 400 (0.5.23,
// http_server.py). The error of an engine that failed has a code.
func (e *errorEvent) status(a API) int {
	if code, ok := e.Error.Code.(float64); ok {
		return int(code)
	}
	if a == Native && e.Error.Code == nil && e.Error.Type == "" {
		return 400
	}
	return 0
}

// failureOf returns Data for an error event that says that the request is at fault, and Failure for any other error.
func (a API) failureOf(data []byte) Kind {
	var e errorEvent
	if json.Unmarshal(data, &e) != nil {
		return Data
	}
	if code := e.status(a); code != 0 && code < 500 || strings.HasPrefix(e.Error.Type, "invalid_request") {
		return Data
	}
	return Failure
}

// aborted returns the status and the text of the error with which SGLang ended an answer of /generate; status 0: there was none.
func aborted(data []byte) (status int, text string) {
	var e struct {
		Meta struct {
			Reason struct {
				Type    string `json:"type"`
				Message string `json:"message"`
				Status  int    `json:"status_code"`
			} `json:"finish_reason"`
		} `json:"meta_info"`
	}
	if json.Unmarshal(data, &e) != nil || e.Meta.Reason.Type != "abort" {
		return 0, ""
	}
	return e.Meta.Reason.Status, e.Meta.Reason.Message
}

// Refused returns the status and the error, a JSON object, if the first event of a stream says that the request is at fault, or that
// the engine has no room (503). Status 0 means that the event says neither.
func (a API) Refused(raw []byte) (status int, text []byte) {
	refusal := func(status int) bool { return status >= 400 && status < 500 || status == 503 }
	for line := range bytes.Lines(raw) {
		data, ok := bytes.CutPrefix(bytes.TrimSpace(line), []byte("data:"))
		data = bytes.TrimSpace(data)
		switch {
		case !ok:
			continue
		case bytes.HasPrefix(data, []byte(`{"error"`)):
			var e errorEvent
			if json.Unmarshal(data, &e) != nil {
				return 0, nil
			}
			if code := e.status(a); refusal(code) {
				return code, bytes.Clone(data)
			}
		case a == Native && bytes.Contains(data, []byte(`"abort"`)):
			if status, text := aborted(data); refusal(status) {
				body, _ := json.Marshal(map[string]any{"error": map[string]any{"message": text}}) // strings always encode
				return status, body
			}
		}
		return 0, nil
	}
	return 0, nil
}

// onlyRole reports whether a chunk of a chat contains only the role and no content.
func onlyRole(data []byte) bool {
	var c struct {
		Choices []struct {
			Delta  map[string]any `json:"delta"`
			Reason *string        `json:"finish_reason"`
		} `json:"choices"`
	}
	if json.Unmarshal(data, &c) != nil || len(c.Choices) == 0 {
		return false
	}
	for _, x := range c.Choices {
		if x.Reason != nil || x.Delta["role"] == nil {
			return false
		}
		for k, v := range x.Delta {
			if list, ok := v.([]any); k != "role" && v != nil && v != "" && (!ok || len(list) > 0) {
				return false
			}
		}
	}
	return true
}

// Aborted reports whether an answer of the completions API, or the beginning of its stream, says that the engine aborted the request
// before its first token, as vLLM does when it shuts down: each choice contains only the finish_reason "abort".
func (a API) Aborted(text []byte) bool {
	if a != Completions || !bytes.Contains(text, []byte(`"abort"`)) {
		return false
	}
	for n := EventLen(text); n > 0; n = EventLen(text) {
		if kind := a.KindOf(text[:n]); kind == Opening || kind == Nothing {
			text = text[n:]
			continue
		}
		at := bytes.Index(text[:n], []byte("data:"))
		if at < 0 {
			return false
		}
		text = text[at+len("data:") : n]
		break
	}
	type said struct {
		Content   any   `json:"content"`
		Reasoning any   `json:"reasoning_content"`
		Thoughts  any   `json:"reasoning"`
		Calls     []any `json:"tool_calls"`
	}
	var c struct {
		Choices []struct {
			Text    string `json:"text"`
			Message said   `json:"message"`
			Delta   said   `json:"delta"`
			Reason  string `json:"finish_reason"`
		} `json:"choices"`
	}
	if json.Unmarshal(text, &c) != nil || len(c.Choices) == 0 {
		return false
	}
	nothing := func(v any) bool { return v == nil || v == "" }
	for _, x := range c.Choices {
		for _, m := range []said{x.Message, x.Delta} {
			if !nothing(m.Content) || !nothing(m.Reasoning) || !nothing(m.Thoughts) || len(m.Calls) > 0 {
				return false
			}
		}
		if x.Reason != "abort" || x.Text != "" {
			return false
		}
	}
	return true
}

// EventLen returns the length of the first event in b, with its empty line; 0: the event is incomplete.
func EventLen(b []byte) int {
	for at := 0; ; {
		i := bytes.IndexByte(b[at:], '\n')
		if i < 0 {
			return 0
		}
		if line := b[at : at+i]; len(line) == 0 || len(line) == 1 && line[0] == '\r' {
			return at + i + 1
		}
		at += i + 1
	}
}
