// SPDX-License-Identifier: Apache-2.0

package api

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// apiError is an error in the form of vLLM's error answers.
type apiError struct {
	status  int
	kind    string // type
	param   string
	message string
}

func (e *apiError) Error() string { return e.message }

func badRequest(param, format string, args ...any) *apiError {
	return &apiError{400, "BadRequestError", param, fmt.Sprintf(format, args...)}
}

// body has the fields that requests of completions and of chat have in common. Fields that only shape sampling are accepted and
// ignored: there is no model.
type body struct {
	Model       string  `json:"model"`
	MaxTokens   laxInt  `json:"max_tokens"`
	MaxNew      laxInt  `json:"max_completion_tokens"`
	Stream      laxBool `json:"stream"`
	StreamUsage struct {
		IncludeUsage bool `json:"include_usage"`
		Continuous   bool `json:"continuous_usage_stats"`
	} `json:"stream_options"`
	N              laxInt          `json:"n"`
	Temperature    *float64        `json:"temperature"`
	Beam           bool            `json:"use_beam_search"`
	MinTokens      laxInt          `json:"min_tokens"`
	StopIDs        []uint32        `json:"stop_token_ids"`
	Echo           bool            `json:"echo"`
	Suffix         *string         `json:"suffix"`
	Logprobs       json.RawMessage `json:"logprobs"` // a number in completions, a boolean in chat
	TopLogprobs    *int            `json:"top_logprobs"`
	PromptLogprobs *int            `json:"prompt_logprobs"`
	Tools          []tool          `json:"tools"`
	ToolChoice     json.RawMessage `json:"tool_choice"`
	Priority       int             `json:"priority"`
	Salt           string          `json:"cache_salt"`
	RequestID      string          `json:"request_id"`
	ReturnTokenIDs bool            `json:"return_token_ids"`
	SkipCache      bool            `json:"skip_reading_prefix_cache"`
	Params         json.RawMessage `json:"kv_transfer_params"`

	Prompt   json.RawMessage `json:"prompt"`
	Messages []message       `json:"messages"`
}

// message is one message of a chat.
type message struct {
	Role    string          `json:"role"`
	Content json.RawMessage `json:"content"`
}

// text returns the content: a text, or the joined texts of its parts.
func (m *message) text() string {
	var s string
	if json.Unmarshal(m.Content, &s) == nil {
		return s
	}
	var parts []struct{ Text string }
	_ = json.Unmarshal(m.Content, &parts) // decode has checked it
	for _, p := range parts {
		s += p.Text
	}
	return s
}

// decode decodes the body of a request.
func decode(text []byte) (*body, *apiError) {
	var b body
	if err := json.Unmarshal(text, &b); err != nil {
		var syntax *json.SyntaxError
		if errors.As(err, &syntax) {
			return nil, badRequest("", "JSON decode error at position %d: %v", syntax.Offset, err)
		}
		var kind *json.UnmarshalTypeError
		if errors.As(err, &kind) {
			return nil, badRequest(kind.Field, "%s cannot be %s", kind.Field, kind.Value)
		}
		return nil, badRequest("", "%v", err)
	}
	if bad := checkMessages(b.Messages); bad != nil {
		return nil, bad
	}
	return &b, nil
}

func checkMessages(messages []message) *apiError {
	for i, m := range messages {
		if strings.TrimSpace(m.Role) == "" {
			return badRequest("messages", "messages[%d] has no role", i)
		}
		var s string
		var parts []struct{ Text string }
		if len(m.Content) > 0 && json.Unmarshal(m.Content, &s) != nil && json.Unmarshal(m.Content, &parts) != nil {
			return badRequest("messages", "messages[%d].content must be a text or a list of parts", i)
		}
	}
	return nil
}

// limit returns how many tokens the request may generate. usual is the number if the request does not say.
func (b *body) limit(usual int) (int, *apiError) {
	n := usual
	for _, v := range []laxInt{b.MaxTokens, b.MaxNew} {
		if v.set {
			n = v.n
		}
	}
	if n < 1 {
		return 0, badRequest("max_tokens", "max_tokens must be at least 1, got %d.", n)
	}
	if b.MinTokens.n > n {
		return 0, badRequest("min_tokens", "min_tokens must be less than or equal to max_tokens=%d, got %d.", n, b.MinTokens.n)
	}
	return n, nil
}

func (b *body) params() (*wire.KVTransferParams, *apiError) {
	if len(b.Params) == 0 {
		return nil, nil
	}
	p, err := wire.ParseKVTransferParams(b.Params)
	if err != nil {
		return nil, badRequest("kv_transfer_params", "%v", err)
	}
	return p, nil
}
