// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// laxInt is a whole number in any form that Pydantic accepts: also 3.0, "3" and true.
type laxInt struct {
	set bool
	n   int
}

// laxBool is a boolean in any form that Pydantic accepts: also 1, "true" and "on".
type laxBool bool

// UnmarshalJSON implements json.Unmarshaler.
func (v *laxBool) UnmarshalJSON(text []byte) error {
	switch strings.ToLower(string(bytes.Trim(text, `"`))) {
	case "true", "1", "on", "yes", "t", "y":
		*v = true
	case "false", "0", "off", "no", "f", "n", "null":
		*v = false
	default:
		n, err := strconv.ParseFloat(string(text), 64)
		if err != nil || n != 0 && n != 1 {
			return &json.UnmarshalTypeError{Value: fmt.Sprintf("%.64s: it is neither true nor false", text), Type: reflect.TypeFor[bool]()}
		}
		*v = n == 1
	}
	return nil
}

// UnmarshalJSON implements json.Unmarshaler.
func (v *laxInt) UnmarshalJSON(text []byte) error {
	if string(text) == "null" {
		return nil
	}
	number := strings.TrimSpace(string(bytes.Trim(text, `"`)))
	switch string(text) {
	case "true":
		number = "1"
	case "false":
		number = "0"
	}
	n, err := strconv.Atoi(number)
	if f, ferr := strconv.ParseFloat(number, 64); err != nil && ferr == nil && f == math.Trunc(f) && math.Abs(f) < 1<<53 && (text[0] != '"' || !strings.ContainsAny(number, "eExX")) {
		n, err = int(f), nil
	}
	if err != nil {
		return &json.UnmarshalTypeError{Value: fmt.Sprintf("%.64s: it is no whole number", text), Type: reflect.TypeFor[int]()}
	}
	*v = laxInt{true, n}
	return nil
}

// maxAnswers is the largest n, the number of answers to a prompt. A request with a larger one gets an error. vLLM: VLLM_MAX_N_SEQUENCES.
const maxAnswers = 16384

// answers returns n, the number of answers to each prompt; default 1.
func (b *body) answers() int {
	if !b.N.set {
		return 1
	}
	return b.N.n
}

// tool is a tool that the model may call.
type tool struct {
	Function struct {
		Name string `json:"name"`
	} `json:"function"`
}

// calls reports whether the answer must be a call of a tool.
func (b *body) calls() bool {
	return len(b.Tools) > 0 && (string(b.ToolChoice) == `"required"` || bytes.HasPrefix(b.ToolChoice, []byte("{")))
}

// call returns a call of the first tool, with text as its argument.
func (b *body) call(index int, text string) []toolCall {
	c := toolCall{Index: 0, ID: fmt.Sprintf("chatcmpl-tool-%d", index), Type: "function"}
	c.Function.Name = b.Tools[0].Function.Name
	arguments, _ := json.Marshal(map[string]string{"text": text}) // plain values always encode
	c.Function.Arguments = string(arguments)
	return []toolCall{c}
}

// rich reports whether the events of the answer contain more than text.
func (b *body) rich() bool {
	return b.ReturnTokenIDs || b.StreamUsage.Continuous || b.wantsProbs() || b.calls()
}

func (b *body) wantsProbs() bool {
	return len(b.Logprobs) > 0 && !slices.Contains([]string{"null", "false"}, string(b.Logprobs))
}

// check returns an error, with vLLM's text, if vLLM would refuse the values in the body.
func (b *body) check(chat bool) *apiError {
	if bad := b.checkAnswers(); bad != nil {
		return bad
	}
	if bad := b.checkProbs(chat); bad != nil {
		return bad
	}
	switch {
	case b.Suffix != nil && *b.Suffix != "" && !chat:
		return badRequest("suffix", "suffix is not currently supported")
	case !bool(b.Stream) && (b.StreamUsage.IncludeUsage || b.StreamUsage.Continuous):
		return badRequest("stream_options", "Stream options can only be defined when `stream=True`.")
	case chat && len(b.Tools) == 0 && len(b.ToolChoice) > 0 && !slices.Contains([]string{"null", `"none"`, `"auto"`}, string(b.ToolChoice)):
		return badRequest("tool_choice", "When using `tool_choice`, `tools` must be set.")
	}
	return nil
}

// checkAnswers checks the number of answers to each prompt.
func (b *body) checkAnswers() *apiError {
	switch n := b.answers(); {
	case n < 1:
		return badRequest("n", "n must be at least 1, got %d.", n)
	case n > maxAnswers:
		return badRequest("n", "n must be at most %d, got %d.", maxAnswers, n)
	case n > 1 && b.Temperature != nil && *b.Temperature == 0 && !b.Beam:
		return badRequest("n", "n must be 1 when using greedy sampling, got %d.", n)
	}
	return nil
}

// checkProbs checks the fields that ask for log probabilities.
func (b *body) checkProbs(chat bool) *apiError {
	var probs laxInt
	if !chat && b.wantsProbs() {
		if err := json.Unmarshal(b.Logprobs, &probs); err != nil {
			return badRequest("logprobs", "logprobs: %v", err)
		}
	}
	switch {
	case bool(b.Stream) && b.PromptLogprobs != nil && (*b.PromptLogprobs > 0 || *b.PromptLogprobs == -1):
		return badRequest("prompt_logprobs", "`prompt_logprobs` are not available when `stream=True`.")
	case b.PromptLogprobs != nil && *b.PromptLogprobs < -1:
		return badRequest("prompt_logprobs", "`prompt_logprobs` must be a positive value or -1.")
	case probs.n < 0:
		return badRequest("logprobs", "`logprobs` must be a positive value.")
	case chat && b.TopLogprobs != nil && *b.TopLogprobs > 0 && !b.wantsProbs():
		return badRequest("top_logprobs", "when using `top_logprobs`, `logprobs` must be set to true.")
	}
	return nil
}

// probability returns an invented log probability, always the same for the same token.
func probability(token uint32) float64 { return -float64(token%1000) / 100 }

type tokenProb struct {
	Token   string  `json:"token"`
	Logprob float64 `json:"logprob"`
	Bytes   []int   `json:"bytes"`
	Top     []any   `json:"top_logprobs"`
}

// probs returns the log probabilities of tokens of an answer; nil: the request does not ask for them. Those of an echoed prompt come
// with the first tokens.
func (b *body) probs(q *sequence, tokens []uint32, chat bool) any {
	if !b.wantsProbs() {
		return nil
	}
	if chat {
		content := []tokenProb{}
		for _, t := range tokens {
			content = append(content, tokenProb{tokenText([]uint32{t}), probability(t), nil, []any{}})
		}
		return map[string]any{"content": content}
	}
	if b.Echo && (!bool(b.Stream) || tokens == nil) {
		tokens = slices.Concat(q.prompt, tokens)
	}
	texts, values, at, offsets := []string{}, []float64{}, 0, []int{}
	for _, t := range tokens {
		text := tokenText([]uint32{t})
		texts, values, offsets = append(texts, text), append(values, probability(t)), append(offsets, at)
		at += len(text)
	}
	return map[string]any{"tokens": texts, "token_logprobs": values, "text_offset": offsets, "top_logprobs": []any{}}
}

// promptProbs returns the log probabilities of the prompt's tokens; nil: the request does not ask for them.
func (b *body) promptProbs(q *sequence) any {
	if b.PromptLogprobs == nil {
		return nil
	}
	list := []any{nil} // the first token has no log probability
	for _, t := range q.prompt[1:] {
		list = append(list, map[string]any{strconv.FormatUint(uint64(t), 10): map[string]any{"logprob": probability(t), "rank": 1}})
	}
	return list
}

// prompts returns the prompts of a completion: a text, a list of token ids, or a list of several texts or of several lists. texts has
// the text of each prompt, with token ids written as words.
func (b *body) prompts() (prompts [][]uint32, texts []string, bad *apiError) {
	raw := bytes.TrimSpace(b.Prompt)
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil, badRequest("prompt", "Either prompt or prompt_embeds must be provided and non-empty.")
	}
	items := []json.RawMessage{raw}
	var list []json.RawMessage
	if json.Unmarshal(raw, &list) == nil {
		if len(list) == 0 {
			return nil, nil, badRequest("prompt", "Either prompt or prompt_embeds must be provided and non-empty.")
		}
		if first := bytes.TrimSpace(list[0]); first[0] == '[' || first[0] == '"' {
			items = list
		}
	}
	for _, item := range items {
		var text string
		var ids []*uint32 // null is not a token
		item = bytes.TrimSpace(item)
		switch {
		case item[0] != items[0][0]:
			return nil, nil, badRequest("prompt", "prompt must be a text, a list of texts, a list of token ids or a list of such lists")
		case json.Unmarshal(item, &text) == nil && item[0] == '"':
		case json.Unmarshal(item, &ids) != nil || slices.Contains(ids, nil):
			return nil, nil, badRequest("prompt", "prompt must be a text or a list of token ids")
		}
		tokens := tokenize(text)
		for _, id := range ids {
			tokens = append(tokens, *id)
		}
		if len(tokens) == 0 {
			return nil, nil, badRequest("prompt", "The decoder prompt cannot be empty")
		}
		if ids != nil {
			text = tokenText(tokens)
		}
		prompts, texts = append(prompts, tokens), append(texts, text)
	}
	return prompts, texts, nil
}
