// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bytes"
	"encoding/json"
	"net/http"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/sim/engine"
)

// answer writes what becomes of a request: at the end, or event by event.
type answer struct {
	a      *API
	w      http.ResponseWriter
	rc     *http.ResponseController
	body   *body
	id     string
	chat   bool
	prompt []uint32
	start  time.Time

	tokens  []uint32
	first   time.Time
	last    time.Time
	started bool // the stream
	buf     []byte
	armed   time.Time // when the limit on sending was set

	// An event with nothing but text is these, and the text in between.
	before, behind []byte
}

type choice struct {
	Index        int      `json:"index"`
	Text         *string  `json:"text,omitempty"`
	Message      *said    `json:"message,omitempty"`
	Delta        *said    `json:"delta,omitempty"`
	Logprobs     any      `json:"logprobs"`
	FinishReason *string  `json:"finish_reason"`
	StopReason   any      `json:"stop_reason"`
	TokenIDs     []uint32 `json:"token_ids,omitempty"`
	PromptIDs    []uint32 `json:"prompt_token_ids,omitempty"`
}

type said struct {
	Role    string  `json:"role,omitempty"`
	Content *string `json:"content,omitempty"`
}

type usage struct {
	Prompt     int `json:"prompt_tokens"`
	Total      int `json:"total_tokens"`
	Completion int `json:"completion_tokens"`
	Details    *struct {
		Cached int `json:"cached_tokens"`
	} `json:"prompt_tokens_details,omitempty"`
}

type response struct {
	ID      string                 `json:"id"`
	Object  string                 `json:"object"`
	Created int64                  `json:"created"`
	Model   string                 `json:"model"`
	Choices []choice               `json:"choices"`
	Usage   *usage                 `json:"usage,omitempty"`
	Params  *wire.KVTransferParams `json:"kv_transfer_params,omitempty"`
}

func (n *answer) usage(end *engine.End) *usage {
	u := &usage{Prompt: len(n.prompt), Completion: len(n.tokens), Total: len(n.prompt) + len(n.tokens)}
	if end != nil && end.Cached > 0 {
		u.Details = &struct {
			Cached int `json:"cached_tokens"`
		}{end.Cached}
	}
	return u
}

func (n *answer) response(object string) *response {
	return &response{ID: n.id, Object: object, Created: n.start.Unix(), Model: n.a.e.Model(), Choices: []choice{}}
}

// take takes tokens in, and the end; it reports whether there is more to come.
func (n *answer) take(more []uint32, end *engine.End) bool {
	n.observe(more, end)
	if now := time.Now(); now.Sub(n.armed) > sendTimeout/8 {
		n.armed = now
		_ = n.rc.SetWriteDeadline(now.Add(sendTimeout)) // not every ResponseWriter has deadlines
	}
	n.tokens = append(n.tokens, more...)
	if !n.body.Stream {
		if end != nil {
			n.whole(end)
		}
		return end == nil
	}
	if !n.started && (end == nil || end.Err == nil) {
		n.open()
	}
	// The reason of the end has an event even where it comes after the last token, alone.
	if ended := end != nil && end.Err == nil; (len(more) > 0 || ended) && !n.event(more, end) {
		return false // the client has gone
	}
	if end == nil {
		return true
	}
	n.close(end)
	return false
}

// observe counts times as vLLM does.
func (n *answer) observe(more []uint32, end *engine.End) {
	now, s := time.Now(), n.a.stats
	if len(more) > 0 {
		if n.first.IsZero() {
			n.first = now
			s.ttft.Took(now.Sub(n.start))
		} else {
			s.itl.Took(now.Sub(n.last))
		}
		n.last = now
	}
	if end != nil {
		s.e2e.Took(now.Sub(n.start))
	}
}

// whole writes the answer of a request that does not stream.
func (n *answer) whole(end *engine.End) {
	if end.Err != nil {
		n.a.fail(n.w, failure(end.Err))
		return
	}
	text := tokenText(n.tokens)
	c := choice{FinishReason: &end.Reason}
	object := "text_completion"
	if n.chat {
		object, c.Message = "chat.completion", &said{"assistant", &text}
	} else {
		c.Text = &text
	}
	if n.body.ReturnTokenIDs {
		c.TokenIDs, c.PromptIDs = n.tokens, n.prompt
	}
	r := n.response(object)
	r.Choices, r.Usage, r.Params = []choice{c}, n.usage(end), end.Params
	reply(n.w, http.StatusOK, r)
}

func (n *answer) object() string {
	if n.chat {
		return "chat.completion.chunk"
	}
	return "text_completion"
}

// open begins a stream; a chat's first event has the role.
func (n *answer) open() {
	n.started = true
	h := n.w.Header()
	h.Set("Content-Type", "text/event-stream; charset=utf-8")
	h.Set("Cache-Control", "no-cache")
	n.w.WriteHeader(http.StatusOK)
	if n.chat {
		r, empty := n.response(n.object()), ""
		r.Choices = []choice{{Delta: &said{"assistant", &empty}}}
		n.write(r)
	}
}

// event writes tokens; the last ones have the reason of the end.
func (n *answer) event(more []uint32, end *engine.End) bool {
	text := tokenText(more)
	if end == nil && !n.body.ReturnTokenIDs && !n.body.StreamUsage.Continuous && plain(text) {
		if n.before == nil {
			n.before, n.behind = n.frame()
		}
		n.buf = append(append(append(n.buf[:0], n.before...), text...), n.behind...)
		return n.send()
	}
	c := choice{}
	if n.chat {
		c.Delta = &said{Content: &text}
	} else {
		c.Text = &text
	}
	if n.body.ReturnTokenIDs {
		c.TokenIDs = more
	}
	if end != nil && end.Err == nil {
		c.FinishReason = &end.Reason
	}
	r := n.response(n.object())
	r.Choices = []choice{c}
	if n.body.StreamUsage.Continuous {
		r.Usage = n.usage(nil)
	}
	return n.write(r)
}

// plain reports whether text is the same in JSON.
func plain(text string) bool {
	for i := range len(text) {
		if c := text[i]; c < ' ' || c > '~' || c == '"' || c == '\\' || c == '<' || c == '>' || c == '&' {
			return false
		}
	}
	return true
}

// frame returns what stands before and behind the text of an event.
func (n *answer) frame() (before, behind []byte) {
	const mark = "@text@"
	text := mark
	c := choice{}
	if n.chat {
		c.Delta = &said{Content: &text}
	} else {
		c.Text = &text
	}
	r := n.response(n.object())
	r.Choices = []choice{c}
	r.ID, r.Model = "", "" // may have the mark
	whole, err := json.Marshal(r)
	if err != nil {
		panic("BUG: api: " + err.Error())
	}
	at := bytes.Index(whole, []byte(mark))
	r.ID, r.Model = n.id, n.a.e.Model()
	full, err := json.Marshal(r)
	if err != nil {
		panic("BUG: api: " + err.Error())
	}
	at += len(full) - len(whole) // the id and the model stand before the text
	return append([]byte("data: "), full[:at]...), append(bytes.Clone(full[at+len(mark):]), "\n\n"...)
}

// close ends a stream.
func (n *answer) close(end *engine.End) {
	switch {
	case end.Err != nil && !n.started:
		n.a.fail(n.w, failure(end.Err))
		return
	case end.Err != nil:
		n.write(failure(end.Err).body())
	case n.body.StreamUsage.IncludeUsage:
		r := n.response(n.object())
		r.Usage = n.usage(end)
		n.write(r)
	}
	if _, err := n.w.Write([]byte("data: [DONE]\n\n")); err == nil {
		_ = n.rc.Flush()
	}
}

// write writes one event and reports whether the client is there.
func (n *answer) write(v any) bool {
	text, err := json.Marshal(v)
	if err != nil {
		panic("BUG: api: " + err.Error())
	}
	n.buf = append(append(append(n.buf[:0], "data: "...), text...), "\n\n"...)
	return n.send()
}

// send writes buf and reports whether the client is there.
func (n *answer) send() bool {
	if _, err := n.w.Write(n.buf); err != nil {
		return false
	}
	return n.rc.Flush() == nil
}
