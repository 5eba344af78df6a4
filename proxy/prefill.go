// SPDX-License-Identifier: Apache-2.0

package proxy

import "github.com/kvasir-kv/kvasir/internal/openai"

// prefillPieces returns the body of the request for P, which computes one token. The request holds the body; the caller must release
// it.
//
// Fields that D would refuse stay if P refuses them, too: otherwise P would compute the prompt for nothing, and keep its KV. Fields
// that matter only for the output are dropped: they would make P's answer long for nothing.
func (e *exchange) prefillPieces(params []byte) ([][]byte, *body) {
	edits := append(e.prefillEdits(), openai.Edit{Key: "kv_transfer_params", Value: params})
	pieces, _ := e.q.Apply(append(edits, e.salt...)...)
	e.body.hold()
	return pieces, e.body
}

// ofOutput are fields that affect only the answer, and not the KV of the prompt.
var ofOutput = []openai.Edit{
	{Key: "logprobs"},
	{Key: "top_logprobs"},
	{Key: "prompt_logprobs"},
	{Key: "logprob_token_ids"},
	{Key: "return_token_ids"},
	{Key: "return_tokens_as_token_ids"},
	{Key: "echo"},
	{Key: "n"},
	{Key: "best_of"},
	{Key: "response_format"},
	{Key: "structured_outputs"},
	{Key: "guided_json"},
	{Key: "guided_regex"},
	{Key: "guided_choice"},
	{Key: "guided_grammar"},
	{Key: "ec_transfer_params"},
	{Key: "stop"},
	{Key: "stop_sequences"},
	{Key: "stop_token_ids"},
}

// pastStops are edits that keep P from ending at a stop token, for APIs with such a field: a P that ends there gives its KV to no D.
var pastStops = []openai.Edit{{Key: "ignore_eos", Value: yes}}

var (
	one  = []byte("1")
	no   = []byte("false")
	yes  = []byte("true")
	auto = []byte(`"auto"`)
)

func (e *exchange) prefillEdits() []openai.Edit {
	q := e.q
	edits := ofOutput[:len(ofOutput):len(ofOutput)]
	if path := e.r.URL.Path; path != "/v1/messages" && path != "/inference/v1/generate" {
		edits = append(edits, pastStops...)
	}
	if string(q.ToolChoice.Of(q.Body)) == `"required"` || q.ToolChoice.Has() && q.Body[q.ToolChoice.From] == '{' {
		choice := openai.Edit{Key: "tool_choice", Value: auto}
		if e.r.URL.Path == "/v1/messages" {
			choice.Value = nil // this API's default is auto
		}
		edits = append(edits, choice)
	}
	stream, _ := q.Bool(q.Stream)
	if stream || !q.Stream.Has() && e.r.URL.Path != "/inference/v1/generate" {
		edits = append(edits, openai.Edit{Key: "stream", Value: no})
	}
	if stream {
		edits = append(edits, openai.Edit{Key: "stream_options"})
	}
	switch e.r.URL.Path {
	case "/v1/responses":
		edits = append(edits, openai.Edit{Key: "store", Value: no}, openai.Edit{Key: "text"})
		if q.Countable(q.MaxOutput) {
			edits = append(edits, openai.Edit{Key: "max_output_tokens", Value: one})
		}
		return edits
	case "/inference/v1/generate":
		object := []byte("{}")
		if q.Sampling.Has() {
			object = q.Sampling.Of(q.Body)
		}
		sampling, err := openai.Scan(object)
		if err != nil || !sampling.Countable(sampling.MaxTokens) {
			return edits
		}
		inner := append(ofOutput[:len(ofOutput):len(ofOutput)], openai.Edit{Key: "max_tokens", Value: one}, openai.Edit{Key: "min_tokens"})
		inner = append(inner, pastStops...)
		return append(edits, nested("sampling_params", object, inner...)...)
	}
	least, _ := q.Int(q.MinTokens)
	most, some := q.Int(q.MaxTokens)
	if more, ok := q.Int(q.MaxNew); ok {
		most, some = more, true
	}
	if some && least > most {
		return edits
	}
	edits = append(edits, openai.Edit{Key: "min_tokens"})
	if q.Countable(q.MaxTokens) && (q.MaxTokens.Has() || e.r.URL.Path != "/v1/messages") {
		edits = append(edits, openai.Edit{Key: "max_tokens", Value: one})
	}
	if q.MaxNew.Has() && q.Countable(q.MaxNew) {
		edits = append(edits, openai.Edit{Key: "max_completion_tokens", Value: one})
	}
	return edits
}
