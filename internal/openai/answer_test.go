// SPDX-License-Identifier: Apache-2.0

package openai_test

import (
	"encoding/json"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/openai"
)

func TestScanAnswer(t *testing.T) {
	f := func(text, params string, cached int) {
		t.Helper()
		a, err := openai.ScanAnswer([]byte(text))
		if err != nil || string(a.Params) != params || a.Cached != cached {
			t.Errorf("%s: %q %d %v", text, a.Params, a.Cached, err)
		}
	}
	f(`{"kv_transfer_params":{"a": [1,2]},"usage":{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":3}}}`, `{"a": [1,2]}`, 3)
	f(`{"kv_transfer_params":null,"usage":{"prompt_tokens":5}}`, "", 0)
	f(`{"kv_transfer_params":{},"usage":null}`, "", -1)
	f(`{"usage":{"prompt_tokens_details":null}}`, "", 0)
	f(`{"usage":{"prompt_tokens_details":{"cached_tokens":"x"}}}`, "", -1)
	f(`{"choices":[{"text":"\"usage\":{\"prompt_tokens_details\":{\"cached_tokens\":9}}"}]}`, "", -1)
	if _, err := openai.ScanAnswer([]byte(`[]`)); err == nil {
		t.Error("no object")
	}
}

// Only the number in the usage of an answer or event changes: not texts that look like it, and not the arguments that a model
// gives to a tool.
func TestSetCached(t *testing.T) {
	f := func(text, want string) {
		t.Helper()
		if got := string(openai.SetCached([]byte(text), 42)); got != want {
			t.Errorf("%s\n got %s\nwant %s", text, got, want)
		}
	}
	f(`{"usage":{"a":{"cached_tokens":7}}}`, `{"usage":{"a":{"cached_tokens":42}}}`)
	f("data: {\"usage\" : {\"cached_tokens\" : 700 ,\"b\":1}}\n\n", "data: {\"usage\" : {\"cached_tokens\" : 42 ,\"b\":1}}\n\n")
	f(`{"usage":{"cached_tokens":1,"x":{"cached_tokens":2}}}`, `{"usage":{"cached_tokens":42,"x":{"cached_tokens":42}}}`)
	f("event: message_start\r\ndata:{\"message\":{\"content\":[{\"cached_tokens\":1}],\"usage\":{\"cache_read_input_tokens\":3}}}\r\n\r\n",
		"event: message_start\r\ndata:{\"message\":{\"content\":[{\"cached_tokens\":1}],\"usage\":{\"cache_read_input_tokens\":42}}}\r\n\r\n")
	f(` {"response":{"usage":{"input_tokens_details":{"cached_tokens":5}},"tools":[{"cached_tokens":6}]},"usage":{"cached_tokens":7}}`,
		` {"response":{"usage":{"input_tokens_details":{"cached_tokens":42}},"tools":[{"cached_tokens":6}]},"usage":{"cached_tokens":42}}`)
	for _, same := range []string{
		`{}`, `{"usage":{"cached_tokens":null}}`, `{"usage":{"cached_tokens":`, `["cached_tokens",3]`, `{"t":"\"cached_tokens\":5"}`, `{"t":"cached_tokens"}`, "",
		`{"usage":{"t":"\"cached_tokens\":5"}}`, `{"usage":7,"cached_tokens":5}`, `{"content":[{"type":"tool_use","input":{"cached_tokens":7,"usage":{"cached_tokens":7}}}]}`,
		"event: content_block_start\ndata: {\"content_block\":{\"input\":{\"cached_tokens\":7}}}\n\n", "data: {\"usage\":{\"cached_tokens\":7}\n\n",
	} {
		f(same, same)
	}
}

// JSON stays JSON, and only numbers change.
func FuzzSetCached(f *testing.F) {
	f.Add([]byte(`{"text":"\"cached_tokens\":5","usage":{"cached_tokens":5}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var before, after any
		if json.Unmarshal(b, &before) != nil {
			_ = openai.SetCached(b, 1)
			return
		}
		if err := json.Unmarshal(openai.SetCached(b, 1), &after); err != nil {
			t.Fatalf("%q: %v", b, err)
		}
	})
}

// Stopped is true for a P that ended at a stop token, and false for one that ended at its length or whose front found a text of stop.
func TestStopped(t *testing.T) {
	f := func(text string, want bool) {
		t.Helper()
		a, err := openai.ScanAnswer([]byte(text))
		if err != nil || a.Stopped != want {
			t.Errorf("%s: %v, %v", text, a.Stopped, err)
		}
	}
	f(`{"choices":[{"finish_reason":"stop"}]}`, true)
	f(`{"choices":[{"index":0,"finish_reason":"stop","stop_reason":null}]}`, true)
	f(`{"choices":[{"finish_reason":"stop","stop_reason":128001}]}`, true)
	f(`{"choices":[{"finish_reason":"stop","stop_reason":"END"}]}`, false)
	f(`{"choices":[{"finish_reason":"length"}]}`, false)
	f(`{"choices":[{"finish_reason":null}]}`, false)
	f(`{"choices":[{"text":"\"finish_reason\":\"stop\""}]}`, false)
	for _, none := range []string{`[]`, `{}`, `7`, `null`, `[7]`} {
		f(`{"choices":`+none+`}`, false)
	}
	f(`{"type":"message","stop_reason":"end_turn"}`, true)
	f(`{"type":"message","stop_reason":"max_tokens"}`, false)
	f(`{"type":"message","stop_reason":"stop_sequence"}`, false)
	f(`{"object":"response","status":"completed"}`, true)
	f(`{"object":"response","status":"incomplete"}`, false)
}

// The texts of errors as engines write them.
func TestErrorIn(t *testing.T) {
	f := func(body, kind, text string) {
		t.Helper()
		if k, got := openai.ErrorIn([]byte(body)); k != kind || got != text {
			t.Errorf("%s: %q, %q", body, k, got)
		}
	}
	f(`{"error":{"message":"no","type":"BadRequestError","code":400}}`, "BadRequestError", "no")
	f(`{"object":"error","message":"too long","type":"BadRequest","param":null,"code":400}`, "BadRequest", "too long")
	f(`{"detail":"Not Found"}`, "", "Not Found")
	f(`{"detail":[{"loc":["body"]}]}`, "", "")
	f(`{"error":"x","message":"m"}`, "", "m")
	f(`busy`, "", "")
}
