// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/sim/api"
	"github.com/kvasir-kv/kvasir/sim/engine"
	"github.com/kvasir-kv/kvasir/sim/kvmem"
)

func serve(t testing.TB, o engine.Options) (*engine.Engine, string) {
	t.Helper()
	o.Model, o.MaxModel = "m", 512
	o.KV = kvmem.Geometry{Layers: 1, Heads: 2, HeadBytes: 8, BlockTokens: 16, Blocks: 200}
	e, err := engine.Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewServer(api.New(e, api.Options{Version: "1", MaxBody: 1 << 20}))
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		s.Close()
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e, s.URL
}

func post(t testing.TB, url, body string) (int, []byte) {
	t.Helper()
	r, err := http.Post(url, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, text
}

type completion struct {
	ID      string
	Object  string
	Choices []struct {
		Index        int
		Text         string
		FinishReason string   `json:"finish_reason"`
		TokenIDs     []uint32 `json:"token_ids"`
		Message      struct{ Role, Content string }
		Delta        struct{ Role, Content string }
	}
	Usage struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
		Details    struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
}

func parse(t testing.TB, text []byte) (c completion) {
	t.Helper()
	if err := json.Unmarshal(text, &c); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return c
}

// A prompt gives the same tokens as text and as ids, alone and from the cache, whole and as a
// stream.
func TestCompletions(t *testing.T) {
	_, url := serve(t, engine.Options{})
	words := strings.Repeat("the quick brown fox ", 20)
	status, text := post(t, url+"/v1/completions", fmt.Sprintf(`{"model":"m","prompt":%q,"max_tokens":7,"return_token_ids":true,"temperature":0,"seed":3}`, words))
	first := parse(t, text)
	if status != 200 || !strings.HasPrefix(first.ID, "cmpl-") || first.Object != "text_completion" || len(first.Choices[0].TokenIDs) != 7 ||
		first.Choices[0].FinishReason != "length" || first.Usage.Completion != 7 || first.Usage.Details.Cached != 0 {
		t.Fatalf("%d %s", status, text)
	}
	_, text = post(t, url+"/tokenize", fmt.Sprintf(`{"prompt":%q}`, words))
	var tokens struct{ Tokens []uint32 }
	if err := json.Unmarshal(text, &tokens); err != nil || len(tokens.Tokens) != first.Usage.Prompt {
		t.Fatalf("%s, %v", text, err)
	}
	ids, _ := json.Marshal([][]uint32{tokens.Tokens})
	_, text = post(t, url+"/v1/completions", fmt.Sprintf(`{"prompt":%s,"max_tokens":7}`, ids))
	again := parse(t, text)
	if again.Choices[0].Text != first.Choices[0].Text || again.Usage.Details.Cached < 64 {
		t.Fatalf("%s", text)
	}
	events := stream(t, url+"/v1/completions", fmt.Sprintf(`{"prompt":%q,"max_tokens":7,"stream":true,"stream_options":{"include_usage":true}}`, words))
	got, reason := "", ""
	for _, e := range events {
		if len(e.Choices) > 0 {
			got += e.Choices[0].Text
			reason += e.Choices[0].FinishReason
		}
	}
	if last := events[len(events)-1]; got != first.Choices[0].Text || reason != "length" || last.Usage.Completion != 7 || len(last.Choices) != 0 {
		t.Fatalf("%q, %q, %+v", got, reason, last)
	}
}

// stream returns the events of an answer, which ends with [DONE].
func stream(t testing.TB, url, body string) (list []completion) {
	t.Helper()
	r, err := http.Post(url, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	s, done := bufio.NewScanner(r.Body), false
	for s.Scan() {
		data, ok := strings.CutPrefix(s.Text(), "data: ")
		switch {
		case done && ok:
			t.Fatal("more after [DONE]")
		case data == "[DONE]":
			done = true
		case ok:
			list = append(list, parse(t, []byte(data)))
		}
	}
	if !done || s.Err() != nil {
		t.Fatalf("no [DONE]: %v", s.Err())
	}
	return list
}

// An answer that a client sends back in the next turn becomes the same tokens, so the turn hits the KV
// of the turn before it.
func TestChatTurnsHit(t *testing.T) {
	_, url := serve(t, engine.Options{})
	history := `{"role":"user","content":"` + strings.Repeat("tell me of fish ", 10) + `"}`
	status, text := post(t, url+"/v1/chat/completions", `{"messages":[`+history+`],"max_tokens":40}`)
	first := parse(t, text)
	if status != 200 || first.Object != "chat.completion" || first.Choices[0].Message.Role != "assistant" {
		t.Fatalf("%d %s", status, text)
	}
	answer, _ := json.Marshal(first.Choices[0].Message.Content)
	status, text = post(t, url+"/v1/chat/completions", fmt.Sprintf(`{"messages":[%s,{"role":"assistant","content":%s},{"role":"user","content":[{"type":"text","text":"go on"}]}],"max_tokens":3}`, history, answer))
	second := parse(t, text)
	if status != 200 || second.Usage.Details.Cached < first.Usage.Prompt+40-17 {
		t.Fatalf("first %+v; second %s", first.Usage, text)
	}
	events := stream(t, url+"/v1/chat/completions", `{"messages":[`+history+`],"max_completion_tokens":5,"stream":true}`)
	got := ""
	for _, e := range events {
		got += e.Choices[0].Delta.Content
	}
	if events[0].Choices[0].Delta.Role != "assistant" || !strings.HasPrefix(first.Choices[0].Message.Content, got) || strings.Count(got, "~") != 5 {
		t.Fatalf("%q of %q", got, first.Choices[0].Message.Content)
	}
}

// Invalid requests are refused with vLLM's error text, which names the field.
func TestRefusals(t *testing.T) {
	_, url := serve(t, engine.Options{})
	f := func(path, body string, status int, words string) {
		t.Helper()
		got, text := post(t, url+path, body)
		var e struct {
			Error struct {
				Message, Type string
				Code          int
			}
		}
		if err := json.Unmarshal(text, &e); got != status || err != nil || e.Error.Code != status || !strings.Contains(e.Error.Message, words) {
			t.Errorf("%s: %d %s, want %d %q", body, got, text, status, words)
		}
	}
	f("/v1/completions", `{"prompt":`, 400, "position 10")
	f("/v1/completions", `{"prompt":"a","max_tokens":"x"}`, 400, "max_tokens")
	f("/v1/completions", `{"prompt":"a","max_tokens":0}`, 400, "max_tokens must be at least 1")
	f("/v1/completions", `{"prompt":""}`, 400, "cannot be empty")
	f("/v1/completions", `{}`, 400, "non-empty")
	f("/v1/completions", `{"prompt":["a",""]}`, 400, "cannot be empty")
	f("/v1/completions", `{"prompt":["a",[1]]}`, 400, "list of")
	f("/v1/completions", `{"prompt":[[[1]],[[2]]]}`, 400, "list of token ids")
	f("/v1/completions", `{"prompt":[]}`, 400, "non-empty")
	f("/v1/completions", `{"prompt":"a","n":0}`, 400, "n must be at least 1, got 0.")
	f("/v1/completions", `{"prompt":"a","n":16385}`, 400, "n must be at most")
	f("/v1/completions", `{"prompt":"a","n":2,"temperature":0}`, 400, "greedy")
	f("/v1/completions", `{"prompt":"a","n":"x"}`, 400, "whole number")
	f("/v1/completions", `{"prompt":"a","suffix":"b"}`, 400, "suffix")
	f("/v1/completions", `{"prompt":"a","stream":true,"prompt_logprobs":1}`, 400, "prompt_logprobs")
	f("/v1/completions", `{"prompt":"a","stream_options":{"include_usage":true}}`, 400, "Stream options")
	f("/v1/completions", `{"prompt":"a","min_tokens":9,"max_tokens":8}`, 400, "min_tokens")
	f("/v1/chat/completions", `{"messages":[{"role":"user","content":"a"}],"top_logprobs":1}`, 400, "top_logprobs")
	f("/v1/chat/completions", `{"messages":[{"role":"user","content":"a"}],"tool_choice":"required"}`, 400, "tools")
	f("/v1/chat/completions/batch", `{"messages":[[{"role":"user","content":"a"}]],"stream":true}`, 400, "batch")
	f("/v1/responses", `{"input":"a","previous_response_id":"resp_none"}`, 404, "not found")
	f("/inference/v1/generate", `{"token_ids":[]}`, 400, "token_ids")
	f("/v1/completions", `{"model":"other","prompt":"a"}`, 404, "The model `other` does not exist.")
	f("/v1/completions", `{"prompt":"a","max_tokens":512}`, 400, "maximum context length is 512 tokens. However, you requested 512 output tokens")
	f("/v1/completions", `{"prompt":"`+strings.Repeat("a ", 600)+`"}`, 400, "exceeds this limit even without any output tokens")
	f("/v1/completions", `{"prompt":"a","kv_transfer_params":[1]}`, 400, "kv_transfer_params")
	f("/v1/completions", `{"prompt":"`+strings.Repeat("a", 1<<20)+`"}`, 413, "longer than")
	f("/v1/chat/completions", `{}`, 400, "messages is missing")
	f("/v1/chat/completions", `{"messages":[{"role":"user","content":3}]}`, 400, "messages[0].content")
}

// A client that leaves ends its request, in both phases; its blocks are free.
func TestClientLeaves(t *testing.T) {
	e, url := serve(t, engine.Options{StepTime: 200 * time.Millisecond}) // no request ends by itself
	for _, tokens := range []int64{0, 3} {
		before := e.Stats().Generated
		ctx, cancel := context.WithCancel(t.Context())
		r, _ := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", strings.NewReader(`{"prompt":"a b c","max_tokens":400,"stream":true}`))
		r.Header.Set("Content-Type", "application/json")
		go func() {
			for s := e.Stats(); t.Context().Err() == nil && (s.Running+s.Waiting == 0 || s.Generated < before+tokens); s = e.Stats() {
				time.Sleep(time.Millisecond)
			}
			cancel()
		}()
		if resp, err := http.DefaultClient.Do(r); err == nil {
			_, _ = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
	}
	for end := time.Now().Add(60 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if s := e.Stats(); s.Aborted == 2 && s.Free == s.Blocks {
			break
		} else if time.Now().After(end) {
			t.Fatalf("%+v", s)
		}
	}
}

func TestOtherEndpoints(t *testing.T) {
	e, url := serve(t, engine.Options{})
	get := func(path string) string {
		t.Helper()
		r, err := http.Get(url + path)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		text, _ := io.ReadAll(r.Body)
		if r.StatusCode != 200 {
			t.Fatalf("%s: %d %s", path, r.StatusCode, text)
		}
		return string(text)
	}
	get("/health")
	get("/ping")
	if text := get("/v1/models"); !strings.Contains(text, `"id":"m"`) || !strings.Contains(text, `"max_model_len":512`) {
		t.Fatal(text)
	}
	post(t, url+"/v1/completions", `{"prompt":"`+strings.Repeat("x ", 40)+`","max_tokens":3}`)
	text := get("/metrics")
	for _, want := range []string{
		`vllm:generation_tokens_total{engine="0",model_name="m"} 3`, `vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 1`,
		`vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 1`, `vllm:inter_token_latency_seconds_count{engine="0",model_name="m"}`,
		`vllm:request_queue_time_seconds_count{engine="0",model_name="m"} 1`, `vllm:request_prefill_time_seconds_count{engine="0",model_name="m"} 1`,
		`vllm:request_decode_time_seconds_count{engine="0",model_name="m"} 1`, `kvasir_engine_load_seconds_count{engine="0",model_name="m"} 0`,
		`vllm:num_requests_running{engine="0",model_name="m"} 0`, `vllm:prefix_cache_queries_total{engine="0",model_name="m"} 41`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %s in\n%s", want, text)
		}
	}
	if status, _ := post(t, url+"/reset_prefix_cache", ""); status != 200 {
		t.Fatal(status)
	}
	if s := e.Stats(); s.Finished != 1 {
		t.Fatalf("%+v", s)
	}
	var back struct{ Prompt string }
	_, answer := post(t, url+"/detokenize", `{"tokens":[1,151935]}`)
	if err := json.Unmarshal(answer, &back); err != nil {
		t.Fatal(err)
	}
	_, answer = post(t, url+"/tokenize", fmt.Sprintf(`{"prompt":%q}`, back.Prompt))
	var ids struct{ Tokens []uint32 }
	if err := json.Unmarshal(answer, &ids); err != nil || !slices.Equal(ids.Tokens, []uint32{1, 151935}) {
		t.Fatalf("%s", answer)
	}
}
