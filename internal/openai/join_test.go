// SPDX-License-Identifier: Apache-2.0

package openai_test

import (
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/openai"
)

// Answers of parts are one answer: choices with their numbers, the sum of the usage, the id of the whole, all else as the first has it.
func TestJoinAnswers(t *testing.T) {
	parts := []openai.Part{{Index: 0, Whole: "r"}, {Index: 1, Whole: "r"}}
	got, err := openai.JoinAnswers(parts, [][]byte{
		[]byte(`{"id":"cmpl-r-0-x","odd": 1.50,"choices":[{"index":0,"text":"a \"index\":7"}],"usage":{"prompt_tokens":2,"d":{"cached_tokens":1},"f":0.5,"n":null},"kv_transfer_params":{"a":1}}`),
		[]byte(` {"choices": [ {"text":"b" ,"index": 0} ],"usage":{"prompt_tokens":3,"d":{"cached_tokens":4},"f":1,"n":7,"new":1}}`),
	})
	const want = `{"id":"cmpl-r","odd": 1.50,"choices":[{"index":0,"text":"a \"index\":7"},{"text":"b" ,"index": 1}],"usage":{"d":{"cached_tokens":5},"f":1.5,"n":7,"new":1,"prompt_tokens":5}}`
	if err != nil || string(got) != want {
		t.Errorf("%s, %v\nwant %s", got, err, want)
	}
	for _, bad := range []string{``, `[]`, `{}`, `{"choices":7}`, `{"choices":[7]}`, `{"choices":[{}],"usage":`} {
		if got, err := openai.JoinAnswers(parts[:1], [][]byte{[]byte(bad)}); err == nil {
			t.Errorf("%s: %s", bad, got)
		}
	}
}

// An event of a part gets the part's number. An event with only a usage is kept for the end.
func TestPartEvents(t *testing.T) {
	p := openai.Part{Index: 12, Whole: "r"}
	whole, usage, err := p.Event([]byte(`{"id":"cmpl-r-12","choices":[{"index":0,"text":"a"}],"usage":{"n":1}}`))
	if err != nil || usage != nil || string(whole) != `{"id":"cmpl-r","choices":[{"index":12,"text":"a"}],"usage":{"n":1}}` {
		t.Errorf("%s %s %v", whole, usage, err)
	}
	const last = `{"choices":[],"usage":{"n":1}}`
	if whole, usage, err = p.Event([]byte(last)); err != nil || whole != nil || string(usage) != last {
		t.Errorf("%s %s %v", whole, usage, err)
	}
	const extra = `{"choices":[],"usage":null,"sglext":{"x":1}}` // of the first part alone
	if whole, usage, err = p.Event([]byte(extra)); err != nil || whole != nil || usage != nil {
		t.Errorf("%s %s %v", whole, usage, err)
	}
	p.Index = 0
	if whole, usage, err = p.Event([]byte(extra)); err != nil || string(whole) != extra || usage != nil {
		t.Errorf("%s %s %v", whole, usage, err)
	}
}

// Only lists whose prompts can be sent one by one, with the same answers, are divided.
func TestPrompts(t *testing.T) {
	f := func(body string, count int, apart bool, want ...string) {
		t.Helper()
		r, err := openai.Scan([]byte(body))
		if err != nil {
			t.Fatal(err)
		}
		prompts, n, ok := r.Prompts(1024)
		var got []string
		for _, at := range prompts {
			got = append(got, string(at.Of(r.Body)))
		}
		if n != count || ok != apart || apart && strings.Join(got, "|") != strings.Join(want, "|") {
			t.Errorf("%s: %d %v %q", body, n, ok, got)
		}
	}
	f(`{"prompt":"a"}`, 0, false)
	f(`{"prompt":[1,2]}`, 0, false)
	f(`{"prompt":[]}`, 0, false)
	f(`{"prompt":{"a":1}}`, 0, false)
	f(`{"prompt":[null,"a"]}`, 0, false)
	f(`{"prompt":["a"]}`, 1, true, `"a"`)
	f(`{"prompt": [ "a,]" , "b\"" ]}`, 2, true, `"a,]"`, `"b\""`)
	f(`{"prompt":[[1, 2],[-3]],"n":1,"best_of":null,"use_beam_search":false}`, 2, true, "[1, 2]", "[-3]")
	f(`{"prompt":["a",""]}`, 2, false)
	f(`{"prompt":[[1],[]]}`, 2, false)
	f(`{"prompt":["a",[1]]}`, 2, false)
	f(`{"prompt":[["a"],["b"]]}`, 2, false)
	f(`{"prompt":[[[1]],[[2]]]}`, 2, false)
	f(`{"prompt":["a","b"],"n":2}`, 2, false)
	f(`{"prompt":["a","b"],"n":"1"}`, 2, false)
	f(`{"prompt":["a","b"],"use_beam_search":true}`, 2, false)
	f(`{"prompt":["a","b"],"prompt_embeds":"AA=="}`, 2, false)
}

// KindOf returns what an event says about the progress of an engine.
func TestKinds(t *testing.T) {
	f := func(api openai.API, event string, want openai.Kind) {
		t.Helper()
		if got := api.KindOf([]byte(event + "\n\n")); got != want {
			t.Errorf("%v %q: %v, want %v", api, event, got, want)
		}
	}
	const role = `data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""%s},"finish_reason":%s}]}`
	for _, api := range []openai.API{openai.Completions, openai.Responses, openai.Messages} {
		f(api, ": comment", openai.Nothing)
		f(api, "", openai.Nothing)
		f(api, "data:", openai.Nothing)
		f(api, "event: ping\ndata: {}", openai.Nothing)
		f(api, `data: {"type": "ping"}`, openai.Nothing)
		f(api, `data: {"error":{"code":500}}`, openai.Failure)
		f(api, `data: {"error":{"code":400}}`, openai.Data)
	}
	f(openai.Completions, strings.NewReplacer("%s},", "},", ":%s}", ":null}").Replace(role), openai.Opening)
	f(openai.Completions, strings.NewReplacer("%s},", `,"tool_calls":[]},`, ":%s}", ":null}").Replace(role), openai.Opening)
	f(openai.Completions, strings.NewReplacer("%s},", `,"reasoning":"a"},`, ":%s}", ":null}").Replace(role), openai.Data)
	f(openai.Completions, strings.NewReplacer("%s},", "},", ":%s}", `:"stop"}`).Replace(role), openai.Data)
	f(openai.Completions, "data: [DONE]", openai.Data)
	f(openai.Responses, "event: response.created\ndata: {}", openai.Opening)
	f(openai.Responses, "event: response.output_text.delta\ndata: {}", openai.Data)
	f(openai.Messages, "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\"}}", openai.Failure)
	f(openai.Messages, "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"invalid_request_error\"}}", openai.Data)
	f(openai.Messages, "event: message_start\ndata: {}", openai.Opening)
	f(openai.Messages, `data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}`, openai.Opening)
	f(openai.Messages, `data: {"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":"","signature":"a"}}`, openai.Opening)
	f(openai.Messages, `data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":"a"}}`, openai.Data)
	f(openai.Messages, `data: {"type":"content_block_start","index":0,"content_block":{"type":"tool_use","name":"f","input":{}}}`, openai.Data)
	f(openai.Messages, `data: {"type":"content_block_start"}`, openai.Data)
	f(openai.Messages, "event: content_block_delta\ndata: {}", openai.Data)
	f(openai.Responses, `data: {"type":"response.output_item.added","item":{"type":"message","content":[],"status":"in_progress"}}`, openai.Opening)
	f(openai.Responses, `data: {"type":"response.output_item.added","item":{"type":"reasoning","summary":[],"content":null}}`, openai.Opening)
	f(openai.Responses, `data: {"type":"response.output_item.added","item":{"type":"function_call","name":"f","arguments":""}}`, openai.Data)
	f(openai.Responses, `data: {"type":"response.content_part.added","part":{"type":"output_text","text":"","annotations":[]}}`, openai.Opening)
	f(openai.Responses, `data: {"type":"response.content_part.added","part":{"type":"output_text","text":"a"}}`, openai.Data)
}
