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

// answer writes the answer to a request of completions or chat: either whole at the end, or event by event.
type answer struct {
	a     *API
	w     http.ResponseWriter
	rc    *http.ResponseController
	body  *body
	id    string
	chat  bool
	start time.Time
	seqs  []*sequence
	ended int // sequences that have ended

	first   time.Time
	last    time.Time
	started bool // the stream has been opened
	buf     []byte
	armed   time.Time // when the write deadline was set last
}

// sequence is one prompt with one answer, of a request.
type sequence struct {
	index  int
	prompt []uint32
	text   string // text of the prompt, if the client sent a text
	tokens []uint32
	end    *engine.End
	stream *engine.Stream

	// The parts of an event with only text that stand before and behind the text.
	before, behind []byte
}

// stopReason is the stop token that ended the sequence; nil: none did.
func (q *sequence) stopReason() any {
	if q.end == nil || q.end.Reason != "stop" || len(q.tokens) == 0 {
		return nil
	}
	return q.tokens[len(q.tokens)-1]
}

type choice struct {
	Index        int          `json:"index"`
	Text         *string      `json:"text,omitempty"`
	Message      *chatMessage `json:"message,omitempty"`
	Delta        *chatMessage `json:"delta,omitempty"`
	Logprobs     any          `json:"logprobs"`
	PromptProbs  any          `json:"prompt_logprobs,omitempty"`
	FinishReason *string      `json:"finish_reason"`
	StopReason   any          `json:"stop_reason"`
	TokenIDs     []uint32     `json:"token_ids,omitempty"`
	PromptIDs    []uint32     `json:"prompt_token_ids,omitempty"`
}

type chatMessage struct {
	Role    string     `json:"role,omitempty"`
	Content *string    `json:"content,omitempty"`
	Calls   []toolCall `json:"tool_calls,omitempty"`
}

type toolCall struct {
	Index    int    `json:"index"`
	ID       string `json:"id"`
	Type     string `json:"type"`
	Function struct {
		Name      string `json:"name"`
		Arguments string `json:"arguments"`
	} `json:"function"`
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

// usage returns the summed usage of the given sequences. A prompt with several answers counts once.
func (n *answer) usage(seqs []*sequence) *usage {
	u, cached := &usage{}, 0
	for i, q := range seqs {
		if i%n.body.answers() == 0 || len(seqs) == 1 {
			u.Prompt += len(q.prompt)
			if q.end != nil {
				cached += q.end.Cached
			}
		}
		u.Completion += len(q.tokens)
	}
	u.Total = u.Prompt + u.Completion
	if cached > 0 {
		u.Details = &struct {
			Cached int `json:"cached_tokens"`
		}{cached}
	}
	return u
}

func (n *answer) response(object string) *response {
	return &response{ID: n.id, Object: object, Created: n.start.Unix(), Model: n.a.e.Model(), Choices: []choice{}}
}

// take adds tokens of a sequence, and its end, to the answer. It returns false if nothing more may come.
func (n *answer) take(q *sequence, more []uint32, end *engine.End) bool {
	n.observe(more, end)
	if now := time.Now(); now.Sub(n.armed) > sendTimeout/8 {
		n.armed = now
		_ = n.rc.SetWriteDeadline(now.Add(sendTimeout)) // not every ResponseWriter has deadlines
	}
	q.tokens, q.end = append(q.tokens, more...), end
	if end != nil {
		n.ended++
	}
	failed := end != nil && end.Err != nil
	if !n.body.Stream {
		if failed {
			n.a.fail(n.w, failure(end.Err))
			return false
		}
		if n.ended == len(n.seqs) {
			n.whole()
		}
		return n.ended < len(n.seqs)
	}
	if !n.started && !failed {
		n.open()
	}
	// If the end comes after the last token, its reason gets an event of its own.
	if ended := end != nil && !failed; (len(more) > 0 || ended) && !n.event(q, more, end) {
		return false // the client has gone
	}
	if !failed && n.ended < len(n.seqs) {
		return true
	}
	n.close(end)
	return false
}

// comment writes a comment, which keeps the connection open. It returns false if the client is gone.
func (n *answer) comment() bool {
	if !n.started {
		n.open()
	}
	n.buf = append(n.buf[:0], ": keep-alive\n\n"...)
	return n.send()
}

// observe counts the times of tokens as vLLM does.
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
func (n *answer) whole() {
	object := "text_completion"
	if n.chat {
		object = "chat.completion"
	}
	r := n.response(object)
	for _, q := range n.seqs {
		text := tokenText(q.tokens)
		c := choice{Index: q.index, FinishReason: &q.end.Reason, StopReason: q.stopReason(), Logprobs: n.body.probs(q, q.tokens, n.chat), PromptProbs: n.body.promptProbs(q)}
		switch {
		case n.chat && n.body.calls():
			c.Message = &chatMessage{Role: "assistant", Calls: n.body.call(q.index, text)}
		case n.chat:
			c.Message = &chatMessage{Role: "assistant", Content: &text}
		default:
			if n.body.Echo {
				text = q.text + text
			}
			c.Text = &text
		}
		if n.body.ReturnTokenIDs {
			c.TokenIDs, c.PromptIDs = q.tokens, q.prompt
		}
		r.Choices = append(r.Choices, c)
	}
	r.Usage, r.Params = n.usage(n.seqs), n.seqs[0].end.Params
	reply(n.w, http.StatusOK, r)
}

func (n *answer) object() string {
	if n.chat {
		return "chat.completion.chunk"
	}
	return "text_completion"
}

// open begins a stream. The first event of a chat has the role.
func (n *answer) open() {
	n.started = true
	h := n.w.Header()
	h.Set("Content-Type", "text/event-stream; charset=utf-8")
	h.Set("Cache-Control", "no-cache")
	n.w.WriteHeader(http.StatusOK)
	for _, q := range n.seqs {
		r, empty := n.response(n.object()), ""
		if n.chat {
			r.Choices = []choice{{Index: q.index, Delta: &chatMessage{Role: "assistant", Content: &empty}}}
		} else if r.Choices = []choice{{Index: q.index, Text: &q.text, Logprobs: n.body.probs(q, nil, false)}}; !n.body.Echo {
			continue
		}
		n.write(r)
	}
}

// event writes an event with tokens; the last event also has the reason of the end. It returns false if the client is gone.
func (n *answer) event(q *sequence, more []uint32, end *engine.End) bool {
	text := tokenText(more)
	if end == nil && !n.body.rich() && plain(text) {
		if q.before == nil {
			q.before, q.behind = n.frame(q.index)
		}
		n.buf = append(append(append(n.buf[:0], q.before...), text...), q.behind...)
		return n.send()
	}
	c := choice{Index: q.index, Logprobs: n.body.probs(q, more, n.chat)}
	switch {
	case n.chat && n.body.calls():
		c.Delta = &chatMessage{Calls: n.body.call(q.index, text)}
	case n.chat:
		c.Delta = &chatMessage{Content: &text}
	default:
		c.Text = &text
	}
	if n.body.ReturnTokenIDs {
		c.TokenIDs = more
		if len(q.tokens) == len(more) {
			c.PromptIDs = q.prompt
		}
	}
	if end != nil && end.Err == nil {
		c.FinishReason, c.StopReason = &end.Reason, q.stopReason()
	}
	r := n.response(n.object())
	r.Choices = []choice{c}
	if n.body.StreamUsage.Continuous {
		r.Usage = n.usage([]*sequence{{prompt: q.prompt, tokens: q.tokens}})
	}
	return n.write(r)
}

// plain reports whether text stays the same when it is encoded as JSON.
func plain(text string) bool {
	for i := range len(text) {
		if c := text[i]; c < ' ' || c > '~' || c == '"' || c == '\\' || c == '<' || c == '>' || c == '&' {
			return false
		}
	}
	return true
}

// frame returns the parts of an event before and behind its text.
func (n *answer) frame(index int) (before, behind []byte) {
	const mark = "@text@"
	text := mark
	c := choice{Index: index}
	if n.chat {
		c.Delta = &chatMessage{Content: &text}
	} else {
		c.Text = &text
	}
	r := n.response(n.object())
	r.Choices = []choice{c}
	r.ID, r.Model = "", "" // they may contain the mark
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

// close ends a stream. end is the end of the last sequence, or of a failed one.
func (n *answer) close(end *engine.End) {
	switch {
	case end.Err != nil && !n.started:
		n.a.fail(n.w, failure(end.Err))
		return
	case end.Err != nil:
		n.write(failure(end.Err).body())
	case n.body.StreamUsage.IncludeUsage:
		r := n.response(n.object())
		r.Usage = n.usage(n.seqs)
		n.write(r)
	}
	if _, err := n.w.Write([]byte("data: [DONE]\n\n")); err == nil {
		_ = n.rc.Flush()
	}
}

// write writes one event. It returns false if the client is gone.
func (n *answer) write(v any) bool {
	text, err := json.Marshal(v)
	if err != nil {
		panic("BUG: api: " + err.Error())
	}
	n.buf = append(append(append(n.buf[:0], "data: "...), text...), "\n\n"...)
	return n.send()
}

// send writes buf to the client. It returns false if the client is gone.
func (n *answer) send() bool {
	if _, err := n.w.Write(n.buf); err != nil {
		return false
	}
	return n.rc.Flush() == nil
}
