// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/sim/engine"
)

// The APIs besides completions and chat: OpenAI's Responses, Anthropic's Messages, vLLM's token-in generate. Each request has one
// prompt and one answer.

// eventStream writes the named events of one answer.
type eventStream struct {
	w     http.ResponseWriter
	rc    *http.ResponseController
	begun bool
	open  func() // writes the first events
	n     int    // sequence_number of the next event
}

func (s *eventStream) begin() {
	if s.begun {
		return
	}
	s.begun = true
	s.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	s.w.WriteHeader(http.StatusOK)
	s.open()
}

// event writes an event of that kind. It returns false if the client is gone.
func (s *eventStream) event(kind string, fields map[string]any) bool {
	fields["type"] = kind
	fields["sequence_number"] = s.n
	s.n++
	data, err := json.Marshal(fields)
	if err != nil {
		panic("BUG: api: " + err.Error())
	}
	_ = s.rc.SetWriteDeadline(time.Now().Add(sendTimeout)) // not every ResponseWriter has deadlines
	if _, err := fmt.Fprintf(s.w, "event: %s\ndata: %s\n\n", kind, data); err != nil {
		return false
	}
	return s.rc.Flush() == nil
}

func (s *eventStream) comment() bool {
	s.begin()
	if _, err := s.w.Write([]byte(": keep-alive\n\n")); err != nil {
		return false
	}
	return s.rc.Flush() == nil
}

// runSingle runs a request of one prompt with one answer. It calls fail to write an error, delta to write a part of a stream, and whole
// to write the whole answer or the end of a stream.
func (a *API) runSingle(w http.ResponseWriter, r *http.Request, b *body, prompt []uint32, shown string, fail func(*apiError), s *eventStream, delta func(text string) bool, whole func(q *sequence)) {
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	seqs, bad := a.begin(ctx, r, b, [][]uint32{prompt}, 16, shown, true)
	if bad != nil {
		fail(bad)
		return
	}
	n := &answer{a: a, start: time.Now(), body: b}
	var idle func() bool
	if s != nil {
		idle = s.comment
	}
	a.follow(r.Context(), seqs, idle, func(q *sequence, more []uint32, end *engine.End) bool {
		n.observe(more, end)
		q.tokens, q.end = append(q.tokens, more...), end
		if end != nil && end.Err != nil {
			fail(failure(end.Err))
			return false
		}
		if s != nil {
			s.begin()
			if len(more) > 0 && !delta(tokenText(more)) {
				return false
			}
		}
		if end != nil {
			whole(q)
		}
		return end == nil
	})
}

// maxResponses is how many answers of /v1/responses are remembered; beyond it, the oldest is forgotten.
const maxResponses = 1024

// responseStore remembers the last answers of /v1/responses, each with its conversation.
type responseStore struct {
	mu struct {
		sync.Mutex
		order []string
		by    map[string]storedResponse
	}
}

type storedResponse struct {
	answer       map[string]any
	conversation []message
}

func (s *responseStore) add(id string, r storedResponse) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.by == nil {
		s.mu.by = make(map[string]storedResponse)
	}
	if s.mu.by[id].answer == nil {
		s.mu.order = append(s.mu.order, id)
	}
	s.mu.by[id] = r
	if len(s.mu.order) > maxResponses {
		delete(s.mu.by, s.mu.order[0])
		s.mu.order = s.mu.order[1:]
	}
}

func (s *responseStore) find(id string) (r storedResponse, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, ok = s.mu.by[id]
	return r, ok
}

func noResponse(id string) *apiError {
	return &apiError{404, "invalid_request_error", "response_id", fmt.Sprintf("Response with id '%.128s' not found.", id)}
}

// response answers GET /v1/responses/ID and the request to cancel it: an answer that has ended stays as it is.
func (a *API) response(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	stored, ok := a.responses.find(id)
	if !ok {
		a.fail(w, noResponse(id))
		return
	}
	if r.Method == http.MethodPost {
		a.fail(w, badRequest("response_id", "Cannot cancel a synchronous response."))
		return
	}
	reply(w, 200, stored.answer)
}

type responsesBody struct {
	body
	Input        json.RawMessage `json:"input"`
	Instructions string          `json:"instructions"`
	MaxOutput    laxInt          `json:"max_output_tokens"`
	Previous     string          `json:"previous_response_id"`
	Store        *bool           `json:"store"`
	Tools        json.RawMessage `json:"tools"` // their shape differs
}

func (a *API) respond(w http.ResponseWriter, r *http.Request) {
	text, bad := a.text(w, r)
	var b responsesBody
	if bad == nil {
		if err := json.Unmarshal(text, &b); err != nil {
			bad = badRequest("", "%v", err)
		} else if bad = a.known(b.Model); bad == nil {
			b.MaxTokens, b.MaxNew = b.MaxOutput, laxInt{}
		}
	}
	var conversation []message
	if bad == nil {
		conversation, bad = a.conversation(&b)
	}
	shown := ""
	if bad == nil {
		shown, bad = a.ids(r, &b.body, "resp_")
	}
	if bad != nil {
		a.fail(w, bad)
		return
	}
	created := time.Now().Unix()
	item := func(text, status string) map[string]any {
		content := []any{}
		if status != "in_progress" {
			content = append(content, map[string]any{"type": "output_text", "text": text, "annotations": []any{}})
		}
		return map[string]any{"id": "msg_" + shown, "type": "message", "role": "assistant", "status": status, "content": content}
	}
	object := func(status string) map[string]any {
		return map[string]any{"id": shown, "object": "response", "created_at": created, "model": a.e.Model(), "status": status, "output": []any{}}
	}
	var s *eventStream
	at := map[string]any{"item_id": "msg_" + shown, "output_index": 0, "content_index": 0}
	with := func(more map[string]any) map[string]any {
		for k, v := range at {
			more[k] = v
		}
		return more
	}
	if b.Stream {
		s = &eventStream{w: w, rc: http.NewResponseController(w)}
		s.open = func() {
			s.event("response.created", map[string]any{"response": object("in_progress")})
			s.event("response.in_progress", map[string]any{"response": object("in_progress")})
			s.event("response.output_item.added", map[string]any{"output_index": 0, "item": item("", "in_progress")})
			s.event("response.content_part.added", with(map[string]any{"part": map[string]any{"type": "output_text", "text": "", "annotations": []any{}}}))
		}
	}
	fail := func(bad *apiError) {
		if s != nil && s.begun {
			s.event("response.failed", map[string]any{"response": object("failed")})
			return
		}
		a.fail(w, bad)
	}
	delta := func(text string) bool {
		return s.event("response.output_text.delta", with(map[string]any{"delta": text, "logprobs": []any{}}))
	}
	a.runSingle(w, r, &b.body, tokenize(chatText(conversation)), shown, fail, s, delta, func(q *sequence) {
		said := tokenText(q.tokens)
		answer := object("completed")
		if q.end.Reason != "stop" {
			answer = object("incomplete")
			answer["incomplete_details"] = map[string]any{"reason": "max_output_tokens"}
		}
		answer["output"] = []any{item(said, "completed")}
		answer["usage"] = map[string]any{
			"input_tokens": len(q.prompt), "input_tokens_details": map[string]any{"cached_tokens": q.end.Cached}, "output_tokens": len(q.tokens),
			"output_tokens_details": map[string]any{"reasoning_tokens": 0}, "total_tokens": len(q.prompt) + len(q.tokens),
		}
		answer["kv_transfer_params"] = q.end.Params
		if b.Store == nil || *b.Store {
			content, _ := json.Marshal(said) // a string always encodes
			a.responses.add(shown, storedResponse{answer, append(conversation, message{"assistant", content})})
		}
		if s == nil {
			reply(w, 200, answer)
			return
		}
		s.event("response.output_text.done", with(map[string]any{"text": said}))
		s.event("response.output_item.done", map[string]any{"output_index": 0, "item": item(said, "completed")})
		s.event("response.completed", map[string]any{"response": answer})
	})
}

// conversation returns the messages of a request: those of the response that it continues, its instructions, and its input.
func (a *API) conversation(b *responsesBody) (list []message, bad *apiError) {
	if b.Instructions != "" {
		content, _ := json.Marshal(b.Instructions) // a string always encodes
		list = append(list, message{"system", content})
	}
	if b.Previous != "" {
		before, ok := a.responses.find(b.Previous)
		if !ok {
			return nil, noResponse(b.Previous)
		}
		list = append(list, before.conversation...)
	}
	var text string
	var items []message
	switch {
	case json.Unmarshal(b.Input, &text) == nil && text != "":
		list = append(list, message{"user", b.Input})
	case json.Unmarshal(b.Input, &items) == nil && len(items) > 0:
		list = append(list, items...)
	default:
		return nil, badRequest("input", "input must be a text or a list of items")
	}
	return list, checkMessages(list)
}

type messagesBody struct {
	body
	System json.RawMessage `json:"system"`
	Tools  json.RawMessage `json:"tools"` // their shape differs
}

// readMessages decodes a request of Anthropic's Messages API.
func (a *API) readMessages(w http.ResponseWriter, r *http.Request, count bool) (b messagesBody, prompt []uint32, bad *apiError) {
	text, bad := a.text(w, r)
	if bad != nil {
		return b, nil, bad
	}
	if err := json.Unmarshal(text, &b); err != nil {
		return b, nil, badRequest("", "%v", err)
	}
	if bad = a.known(b.Model); bad != nil {
		return b, nil, bad
	}
	list := b.Messages
	if len(b.System) > 0 && string(b.System) != "null" {
		list = append([]message{{"system", b.System}}, list...)
	}
	switch bad = checkMessages(list); {
	case bad != nil:
	case len(b.Messages) == 0:
		bad = badRequest("messages", "messages is missing")
	case !count && !b.MaxTokens.set:
		bad = badRequest("max_tokens", "max_tokens is missing")
	}
	if bad != nil {
		return b, nil, bad
	}
	b.MaxNew = laxInt{}
	return b, tokenize(chatText(list)), nil
}

func failMessages(w http.ResponseWriter, e *apiError) {
	kind := map[int]string{400: "invalid_request_error", 404: "not_found_error", 413: "request_too_large"}[e.status]
	if kind == "" {
		kind = "api_error"
	}
	reply(w, e.status, map[string]any{"type": "error", "error": map[string]any{"type": kind, "message": e.message}})
}

func (a *API) message(w http.ResponseWriter, r *http.Request) {
	b, prompt, bad := a.readMessages(w, r, false)
	shown := ""
	if bad == nil {
		shown, bad = a.ids(r, &b.body, "msg_")
	}
	if bad != nil {
		failMessages(w, bad)
		return
	}
	var s *eventStream
	answer := map[string]any{"id": shown, "type": "message", "role": "assistant", "model": a.e.Model(), "content": []any{}, "stop_reason": nil, "stop_sequence": nil}
	if b.Stream {
		s = &eventStream{w: w, rc: http.NewResponseController(w)}
		s.open = func() {
			answer["usage"] = map[string]any{"input_tokens": len(prompt), "output_tokens": 0}
			s.event("message_start", map[string]any{"message": answer})
			s.event("content_block_start", map[string]any{"index": 0, "content_block": map[string]any{"type": "text", "text": ""}})
		}
	}
	fail := func(bad *apiError) {
		if s != nil && s.begun {
			s.event("error", map[string]any{"error": map[string]any{"type": "api_error", "message": bad.message}})
			return
		}
		failMessages(w, bad)
	}
	delta := func(text string) bool {
		return s.event("content_block_delta", map[string]any{"index": 0, "delta": map[string]any{"type": "text_delta", "text": text}})
	}
	a.runSingle(w, r, &b.body, prompt, shown, fail, s, delta, func(q *sequence) {
		usage := map[string]any{"input_tokens": len(q.prompt), "output_tokens": len(q.tokens), "cache_read_input_tokens": q.end.Cached}
		reason := "max_tokens"
		if q.end.Reason == "stop" {
			reason = "end_turn"
		}
		if s == nil {
			answer["content"] = []any{map[string]any{"type": "text", "text": tokenText(q.tokens)}}
			answer["stop_reason"], answer["usage"], answer["kv_transfer_params"] = reason, usage, q.end.Params
			reply(w, 200, answer)
			return
		}
		s.event("content_block_stop", map[string]any{"index": 0})
		s.event("message_delta", map[string]any{"delta": map[string]any{"stop_reason": reason, "stop_sequence": nil}, "usage": usage})
		s.event("message_stop", map[string]any{})
	})
}

func (a *API) countTokens(w http.ResponseWriter, r *http.Request) {
	_, prompt, bad := a.readMessages(w, r, true)
	if bad != nil {
		failMessages(w, bad)
		return
	}
	reply(w, 200, map[string]any{"input_tokens": len(prompt)})
}

type generateBody struct {
	body
	TokenIDs []uint32 `json:"token_ids"`
	Sampling struct {
		MaxTokens laxInt   `json:"max_tokens"`
		StopIDs   []uint32 `json:"stop_token_ids"`
		N         laxInt   `json:"n"`
	} `json:"sampling_params"`
}

// generate serves vLLM's /inference/v1/generate: token ids in, token ids out.
func (a *API) generate(w http.ResponseWriter, r *http.Request) {
	text, bad := a.text(w, r)
	var b generateBody
	if bad == nil {
		if err := json.Unmarshal(text, &b); err != nil {
			bad = badRequest("", "%v", err)
		} else if bad = a.known(b.Model); bad == nil {
			b.MaxTokens, b.MaxNew, b.N = b.Sampling.MaxTokens, laxInt{}, b.Sampling.N
			b.StopIDs = b.Sampling.StopIDs
			bad = b.check(true)
		}
	}
	if bad == nil && len(b.TokenIDs) == 0 {
		bad = badRequest("token_ids", "token_ids is missing")
	}
	if bad == nil && (b.answers() != 1 || bool(b.Stream)) {
		bad = badRequest("sampling_params", "n must be 1, and stream false")
	}
	shown := ""
	if bad == nil {
		shown, bad = a.ids(r, &b.body, "generate-tokens-")
	}
	if bad != nil {
		a.fail(w, bad)
		return
	}
	a.runSingle(w, r, &b.body, b.TokenIDs, shown, func(bad *apiError) { a.fail(w, bad) }, nil, nil, func(q *sequence) {
		reply(w, 200, map[string]any{
			"request_id": shown, "prompt_logprobs": nil, "kv_transfer_params": q.end.Params,
			"choices": []any{map[string]any{"index": 0, "logprobs": nil, "finish_reason": q.end.Reason, "token_ids": q.tokens}},
		})
	})
}
