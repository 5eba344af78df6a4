// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/kvasir-kv/kvasir/sim/engine"
)

// sglangAnswer writes the answer to a request in SGLang's form.
type sglangAnswer struct {
	s        *SGLang
	w        http.ResponseWriter
	r        *http.Request
	rc       *http.ResponseController
	q        *sglangRequest
	room     string
	released <-chan struct{} // closed when P no longer needs the request's blocks

	begun  bool
	tokens []uint32
	end    *engine.End
}

// follow writes the answer. P answers only when D has got the KV.
func (n *sglangAnswer) follow(ctx context.Context, stream *engine.Stream) {
	n.s.waits(1)
	waiting := true
	defer func() {
		if waiting {
			n.s.waits(-1)
		}
	}()
	for n.end == nil {
		more, end, err := stream.Next(ctx)
		if err != nil { // the client has gone, or the request was aborted
			if n.r.Context().Err() == nil {
				n.failed(400, "Aborted by AbortReq.")
			}
			return
		}
		if waiting && n.s.o.Mode != "prefill" {
			waiting = false
			n.s.waits(-1)
		}
		n.tokens, n.end = append(n.tokens, more...), end
		switch {
		case end != nil && end.Err != nil:
			n.failed(500, fmt.Sprintf("Decode transfer failed for request rid=%s bootstrap_room=%s: %v", n.q.RID, n.room, end.Err))
			return
		case n.s.o.Mode == "prefill" && end != nil:
			late := time.NewTimer(n.s.o.Timeout)
			defer late.Stop()
			select {
			case <-n.released:
			case <-ctx.Done():
				return
			case <-late.C:
				n.failed(500, fmt.Sprintf("Prefill bootstrap failed for request rid=%s bootstrap_room=%s: timed out after %.1fs in KVPoll.Bootstrapping", n.q.RID, n.room, n.s.o.Timeout.Seconds()))
				return
			}
		}
		if n.q.Stream && !n.event(more) {
			return
		}
	}
	if n.q.Stream {
		n.closeStream()
		return
	}
	n.whole()
}

// failed informs the client that the engine failed; in a stream, as an event.
func (n *sglangAnswer) failed(status int, text string) {
	if !n.q.Stream {
		n.s.fail(n.w, n.r, status, text)
		return
	}
	n.beginStream()
	event := map[string]any{"error": map[string]any{"object": "error", "message": text, "type": "InternalServerError", "param": nil, "code": status}}
	if n.r.URL.Path == "/generate" {
		event = map[string]any{"text": "", "output_ids": []uint32{}, "meta_info": map[string]any{
			"id": n.q.RID, "finish_reason": map[string]any{"type": "abort", "message": text, "status_code": status, "err_type": nil},
		}}
	}
	n.send(event)
	_, _ = n.w.Write([]byte("data: [DONE]\n\n")) // the client may have gone
}

func (n *sglangAnswer) beginStream() {
	if !n.begun {
		n.begun = true
		n.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		n.w.WriteHeader(http.StatusOK)
	}
}

func (n *sglangAnswer) send(event any) bool {
	data, _ := json.Marshal(event) // plain values always encode
	if _, err := fmt.Fprintf(n.w, "data: %s\n\n", data); err != nil {
		return false
	}
	return n.rc.Flush() == nil
}

func (n *sglangAnswer) native() map[string]any {
	m := map[string]any{"id": n.q.RID, "finish_reason": nil, "prompt_tokens": len(n.q.ids), "completion_tokens": len(n.tokens), "cached_tokens": 0}
	if n.end != nil {
		m["finish_reason"] = map[string]any{"type": "length", "length": len(n.tokens)}
		m["cached_tokens"] = n.end.Cached
	}
	return map[string]any{"text": tokenText(n.tokens), "output_ids": n.tokens, "meta_info": m}
}

func (n *sglangAnswer) usage() map[string]any {
	return map[string]any{
		"prompt_tokens": len(n.q.ids), "completion_tokens": len(n.tokens), "total_tokens": len(n.q.ids) + len(n.tokens),
		"prompt_tokens_details": map[string]any{"cached_tokens": n.end.Cached}, "reasoning_tokens": 0,
	}
}

func (n *sglangAnswer) object(chunk bool, choices ...any) map[string]any {
	kind := "text_completion"
	if n.q.chat {
		kind = "chat.completion"
		if chunk {
			kind += ".chunk"
		}
	}
	if choices == nil {
		choices = []any{}
	}
	return map[string]any{"id": n.q.RID, "object": kind, "created": time.Now().Unix(), "model": n.s.a.e.Model(), "choices": choices, "usage": nil}
}

// event writes an event with new tokens. Events of /generate also repeat all earlier tokens. It returns false if the client is gone.
func (n *sglangAnswer) event(more []uint32) bool {
	n.beginStream()
	if n.r.URL.Path == "/generate" {
		return n.send(n.native())
	}
	c := map[string]any{"index": 0, "logprobs": nil, "finish_reason": nil, "matched_stop": nil}
	if n.q.chat {
		c["delta"] = map[string]any{"role": "assistant", "content": tokenText(more)}
	} else {
		c["text"] = tokenText(more)
	}
	if n.end != nil {
		c["finish_reason"] = n.end.Reason
	}
	return n.send(n.object(true, c))
}

func (n *sglangAnswer) closeStream() {
	if n.q.StreamUsage.IncludeUsage && n.r.URL.Path != "/generate" {
		o := n.object(true)
		o["usage"] = n.usage()
		if !n.send(o) {
			return
		}
	}
	_, _ = n.w.Write([]byte("data: [DONE]\n\n")) // the client may have gone
}

// whole writes the answer of a request that does not stream.
func (n *sglangAnswer) whole() {
	if n.r.URL.Path == "/generate" {
		var answer any = n.native()
		if n.q.list {
			answer = []any{answer}
		}
		reply(n.w, 200, answer)
		return
	}
	c := map[string]any{"index": 0, "logprobs": nil, "finish_reason": n.end.Reason, "matched_stop": nil}
	if n.q.chat {
		c["message"] = map[string]any{"role": "assistant", "content": tokenText(n.tokens), "reasoning_content": nil}
	} else {
		c["text"] = tokenText(n.tokens)
	}
	o := n.object(false, c)
	o["usage"] = n.usage()
	reply(n.w, 200, o)
}
