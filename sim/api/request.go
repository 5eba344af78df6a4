// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// apiError is an error as vLLM answers it.
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

// body is what the two completion requests have in common. Fields that only shape sampling
// are taken and mean nothing here: there is no model.
type body struct {
	Model       string `json:"model"`
	MaxTokens   *int   `json:"max_tokens"`
	MaxNew      *int   `json:"max_completion_tokens"`
	Stream      bool   `json:"stream"`
	StreamUsage struct {
		IncludeUsage bool `json:"include_usage"`
		Continuous   bool `json:"continuous_usage_stats"`
	} `json:"stream_options"`
	N              *int            `json:"n"`
	Priority       int             `json:"priority"`
	Salt           string          `json:"cache_salt"`
	RequestID      string          `json:"request_id"`
	ReturnTokenIDs bool            `json:"return_token_ids"`
	SkipCache      bool            `json:"skip_reading_prefix_cache"`
	Params         json.RawMessage `json:"kv_transfer_params"`

	Prompt   json.RawMessage `json:"prompt"`
	Messages []message       `json:"messages"`
}

// message is one of a chat.
type message struct {
	Role    string          `json:"role"`
	Content json.RawMessage `json:"content"`
}

// text returns the content: a text, or the texts of its parts.
func (m *message) text() string {
	var s string
	if json.Unmarshal(m.Content, &s) == nil {
		return s
	}
	var parts []struct{ Text string }
	_ = json.Unmarshal(m.Content, &parts) // checked by decode
	for _, p := range parts {
		s += p.Text
	}
	return s
}

// decode reads a request.
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
	if b.N != nil && *b.N != 1 {
		return nil, badRequest("n", "n must be 1, got %d", *b.N)
	}
	for i, m := range b.Messages {
		if strings.TrimSpace(m.Role) == "" {
			return nil, badRequest("messages", "messages[%d] has no role", i)
		}
		var s string
		var parts []struct{ Text string }
		if len(m.Content) > 0 && json.Unmarshal(m.Content, &s) != nil && json.Unmarshal(m.Content, &parts) != nil {
			return nil, badRequest("messages", "messages[%d].content must be a text or a list of parts", i)
		}
	}
	return &b, nil
}

// prompt returns the prompt of a completion: a text or a list of tokens, alone in a list or
// not.
func (b *body) prompt() ([]uint32, *apiError) {
	raw := bytes.TrimSpace(b.Prompt)
	var list []json.RawMessage
	if json.Unmarshal(raw, &list) == nil && len(list) > 0 {
		if first := bytes.TrimSpace(list[0]); len(first) > 0 && (first[0] == '[' || first[0] == '"') {
			if len(list) != 1 {
				return nil, badRequest("prompt", "one prompt at a time, got %d", len(list))
			}
			raw = first
		}
	}
	var text string
	var ids []*uint32 // null is no token
	switch {
	case len(raw) == 0:
		return nil, badRequest("prompt", "prompt is missing")
	case json.Unmarshal(raw, &text) == nil:
	case json.Unmarshal(raw, &ids) != nil || slices.Contains(ids, nil):
		return nil, badRequest("prompt", "prompt must be a text or a list of token ids")
	}
	tokens := tokenize(text)
	for _, id := range ids {
		tokens = append(tokens, *id)
	}
	if len(tokens) == 0 {
		return nil, badRequest("prompt", "The decoder prompt cannot be empty")
	}
	return tokens, nil
}

// limit returns how many tokens are to be generated.
func (b *body) limit(usual int) (int, *apiError) {
	n := usual
	for _, v := range []*int{b.MaxTokens, b.MaxNew} {
		if v != nil {
			n = *v
		}
	}
	if n < 1 {
		return 0, badRequest("max_tokens", "max_tokens must be at least 1, got %d.", n)
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
