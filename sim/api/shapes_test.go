// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/sim/api"
	"github.com/kvasir-kv/kvasir/sim/engine"
)

// A stop token ends an answer and is its stop reason. A P whose token is a stop token keeps no KV.
func TestStopTokens(t *testing.T) {
	_, url := serve(t, engine.Options{})
	_, text := post(t, url+"/v1/completions", `{"prompt":"a b c","max_tokens":6,"return_token_ids":true}`)
	ids := parse(t, text).Choices[0].TokenIDs
	for i, id := range ids {
		_, text := post(t, url+"/v1/completions", fmt.Sprintf(`{"prompt":"a b c","max_tokens":6,"return_token_ids":true,"stop_token_ids":[%d]}`, id))
		if c := parse(t, text).Choices[0]; !slices.Equal(c.TokenIDs, ids[:i+1]) || !strings.Contains(string(text), fmt.Sprintf(`"finish_reason":"stop","stop_reason":%d`, id)) {
			t.Errorf("%d: %s", i, text)
		}
	}
}

// A list of prompts has the answers of its prompts, whole and streamed, n of each, and their summed usage.
func TestListsOfPrompts(t *testing.T) {
	_, url := serve(t, engine.Options{})
	f := func(list string, alone []string, n int) {
		t.Helper()
		var want []string
		tokens := 0
		for _, p := range alone {
			_, text := post(t, url+"/v1/completions", fmt.Sprintf(`{"prompt":%s,"max_tokens":5}`, p))
			c := parse(t, text)
			tokens += c.Usage.Prompt
			for range n {
				want = append(want, c.Choices[0].Text)
			}
		}
		body := fmt.Sprintf(`{"prompt":%s,"max_tokens":5,"n":%d`, list, n)
		_, text := post(t, url+"/v1/completions", body+"}")
		got, c := make([]string, len(want)), parse(t, text)
		for _, x := range c.Choices {
			got[x.Index] += x.Text
		}
		if !slices.Equal(got, want) || c.Usage.Prompt != tokens || c.Usage.Completion != 5*len(want) {
			t.Errorf("%s: %q, want %q, usage %+v", list, got, want, c.Usage)
		}
		got = make([]string, len(want))
		events := stream(t, url+"/v1/completions", body+`,"stream":true,"stream_options":{"include_usage":true}}`)
		for _, e := range events {
			for _, x := range e.Choices {
				got[x.Index] += x.Text
			}
		}
		if last := events[len(events)-1]; !slices.Equal(got, want) || last.Usage.Completion != 5*len(want) {
			t.Errorf("%s: streamed %q, want %q, %+v", list, got, want, last)
		}
	}
	f(`["one","two words","three more words"]`, []string{`"one"`, `"two words"`, `"three more words"`}, 1)
	f(`[[1,2,3],[4,5]]`, []string{`[1,2,3]`, `[4,5]`}, 1)
	f(`["a","b"]`, []string{`"a"`, `"b"`}, 3)
	f(`"a"`, []string{`"a"`}, 2)
}

// Answers have the extra parts that a request asks for: the prompt, log probabilities, tokens, calls of tools.
func TestWhatElseAnswersHave(t *testing.T) {
	_, url := serve(t, engine.Options{})
	f := func(path, body string, want ...string) {
		t.Helper()
		status, text := post(t, url+path, body)
		for _, w := range want {
			if status != 200 || !strings.Contains(string(text), w) {
				t.Errorf("%s %s: %d %s, want %s", path, body, status, text, w)
			}
		}
	}
	const ask = `"messages":[{"role":"user","content":"a b"}],"max_tokens":3`
	f("/v1/completions", `{"prompt":"a b","max_tokens":3,"echo":true,"logprobs":1}`, `"text":"a b ~`, `"token_logprobs":[`)
	f("/v1/completions", `{"prompt":"a b","max_tokens":3,"echo":true,"stream":true}`, `"text":"a b"`)
	f("/v1/completions", `{"prompt":"a b","max_tokens":3,"prompt_logprobs":1}`, `"prompt_logprobs":[null,{`)
	f("/v1/completions", `{"prompt":"a b","max_tokens":3,"return_token_ids":true,"stream":true}`, `"prompt_token_ids":[`, `"token_ids":[`)
	f("/v1/completions", `{"prompt":"a","n":"2","max_tokens":1}`, `"index":1`)
	f("/v1/chat/completions", `{`+ask+`,"logprobs":true}`, `"logprobs":{"content":[{`)
	f("/v1/chat/completions", `{`+ask+`,"tools":[{"type":"function","function":{"name":"look"}}],"tool_choice":"required"}`, `"tool_calls":[{`, `"name":"look"`)
	f("/v1/chat/completions/batch", `{"messages":[[{"role":"user","content":"a"}],[{"role":"user","content":"b"}]],"max_tokens":3}`, `"index":1`)
	f("/v1/responses", `{"input":"a b","max_output_tokens":3}`, `"object":"response"`, `"output_tokens":3`)
	f("/v1/responses", `{"input":"a b","max_output_tokens":3,"stream":true}`, "event: response.output_text.delta", "event: response.completed")
	f("/v1/messages", `{`+ask+`}`, `"stop_reason":"max_tokens"`, `"type":"message"`)
	f("/v1/messages", `{`+ask+`,"stream":true}`, "event: message_start", "event: content_block_delta", "event: message_stop")
	f("/v1/messages/count_tokens", `{`+ask+`}`, `"input_tokens":`)
	f("/inference/v1/generate", `{"token_ids":[1,2,3],"sampling_params":{"max_tokens":2}}`, `"token_ids":[`)
}

// A response can be read again, and a conversation can continue from it.
func TestResponsesAreRemembered(t *testing.T) {
	_, url := serve(t, engine.Options{})
	_, text := post(t, url+"/v1/responses", `{"input":"a b","max_output_tokens":3}`)
	var first struct {
		ID    string
		Usage struct {
			Input int `json:"input_tokens"`
		}
	}
	if err := json.Unmarshal(text, &first); err != nil {
		t.Fatal(err)
	}
	r, err := http.Get(url + "/v1/responses/" + first.ID)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	if again, _ := io.ReadAll(r.Body); r.StatusCode != 200 || !strings.Contains(string(again), first.ID) {
		t.Errorf("%d %s", r.StatusCode, again)
	}
	next := first
	_, text = post(t, url+"/v1/responses", fmt.Sprintf(`{"input":"c","max_output_tokens":3,"previous_response_id":%q}`, first.ID))
	if err := json.Unmarshal(text, &next); err != nil || next.Usage.Input < first.Usage.Input+4 {
		t.Errorf("%s, %v", text, err)
	}
}

// Adapters can be loaded and unloaded; while one is loaded, its name is a model.
func TestAdapters(t *testing.T) {
	_, url := serve(t, engine.Options{})
	ask := func() int {
		status, _ := post(t, url+"/v1/completions", `{"model":"lora","prompt":"a","max_tokens":1}`)
		return status
	}
	before := ask()
	status, text := post(t, url+"/v1/load_lora_adapter", `{"lora_name":"lora","lora_path":"/x"}`)
	r, err := http.Get(url + "/v1/models")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	list, _ := io.ReadAll(r.Body)
	during := ask()
	again, _ := post(t, url+"/v1/load_lora_adapter", `{"lora_name":"lora","lora_path":"/x"}`)
	post(t, url+"/v1/unload_lora_adapter", `{"lora_name":"lora"}`)
	if before != 404 || status != 200 || during != 200 || again != 400 || ask() != 404 || !strings.Contains(string(list), `"parent":"m"`) {
		t.Errorf("%d %d %s %d %d %s", before, status, text, during, again, list)
	}
}

// Requests of another media type, and of a data-parallel rank that is not there, are refused as vLLM refuses them.
func TestHeadersAreChecked(t *testing.T) {
	e, _ := serve(t, engine.Options{})
	s := httptest.NewServer(api.New(e, api.Options{Ranks: 2}))
	defer s.Close()
	f := func(kind, rank string, want int) {
		t.Helper()
		r, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL+"/v1/completions", strings.NewReader(`{"prompt":"a","max_tokens":1}`))
		r.Header.Set("Content-Type", kind)
		r.Header.Set("X-Data-Parallel-Rank", rank)
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("%q, rank %q: %d", kind, rank, resp.StatusCode)
		}
	}
	f("application/json; charset=utf-8", "1", 200)
	f("application/json", "x", 200)
	f("application/json", "2", 400)
	f("application/json", "-1", 400)
	f("text/plain", "", 400)
	f("", "", 400)
}

// A stream without an event has a comment each KeepAlive, its head comes at once.
func TestKeepAliveComments(t *testing.T) {
	for step := 300 * time.Millisecond; !commentsCome(t, step); step *= 2 { // on a busy machine a stream has fewer of them
		if step > 20*time.Second {
			t.Fatal("a stream has too few comments")
		}
	}
}

func commentsCome(t *testing.T, step time.Duration) bool {
	t.Helper()
	e, _ := serve(t, engine.Options{StepTime: step})
	s := httptest.NewServer(api.New(e, api.Options{KeepAlive: 20 * time.Millisecond}))
	defer s.Close()
	for path, body := range map[string]string{
		"/v1/completions": `{"prompt":"a","max_tokens":2,"stream":true}`,
		"/v1/responses":   `{"input":"a","max_output_tokens":2,"stream":true}`,
		"/v1/messages":    `{"messages":[{"role":"user","content":"a"}],"max_tokens":2,"stream":true}`,
	} {
		r, err := http.Post(s.URL+path, "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		comments := 0
		for lines := bufio.NewScanner(r.Body); lines.Scan(); {
			if strings.HasPrefix(lines.Text(), ":") {
				comments++
			}
		}
		r.Body.Close()
		if comments < 5 {
			t.Logf("%s: %d comments with steps of %v", path, comments, step)
			return false
		}
	}
	testkit.Eventually(t, "all has ended", func() bool { return e.Stats().Running == 0 })
	return true
}
