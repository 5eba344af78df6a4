// SPDX-License-Identifier: Apache-2.0

package openai_test

import (
	"bytes"
	"runtime"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/openai"
)

// A request to SGLang is divided into its prompts and answers, prompt by prompt. Each part has its own element of a list.
func TestSequences(t *testing.T) {
	f := func(path, body, want string) {
		t.Helper()
		r := scan(t, body)
		all, err := r.Sequences(path, 8)
		var got []string
		for _, s := range all {
			pieces, _ := r.Apply(s.Edits...)
			got = append(got, string(bytes.Join(pieces, nil)))
		}
		if err != nil {
			got = []string{"error: " + err.Error()}
		}
		if s := strings.Join(got, "\n"); s != want {
			t.Errorf("%s\n got %s\nwant %s", body, s, want)
		}
	}
	f("/v1/completions", `{"prompt":"a","x": 1}`, `{"prompt":"a","x": 1}`)
	f("/v1/completions", `{"prompt":[1,2]}`, `{"prompt":[1,2]}`)
	f("/v1/completions", `{"prompt":["a",  "b"],"n":2}`, `{"prompt":"a","n":1}`+"\n"+`{"prompt":"a","n":1}`+"\n"+`{"prompt":"b","n":1}`+"\n"+`{"prompt":"b","n":1}`)
	f("/v1/completions", `{"prompt":[[1],[2,3]]}`, `{"prompt":[1]}`+"\n"+`{"prompt":[2,3]}`)
	f("/v1/completions", `{"prompt":["a","b"],"lora_path":["l",null],"extra_key":["k","k2"],"cache_salt":"s","stop":["x","y"],"n":2}`,
		strings.Repeat(`{"prompt":"a","lora_path":"l","extra_key":"k","cache_salt":"s","stop":["x","y"],"n":1}`+"\n", 2)+
			strings.TrimSuffix(strings.Repeat(`{"prompt":"b","lora_path":null,"extra_key":"k2","cache_salt":"s","stop":["x","y"],"n":1}`+"\n", 2), "\n"))
	f("/v1/completions", `{"prompt":["a"],"cache_salt":["s"],"n":2}`, `{"prompt":"a","cache_salt":"s","n":1}`+"\n"+`{"prompt":"a","cache_salt":"s","n":1}`)
	f("/v1/completions", `{"prompt":["a","b"],"cache_salt":["s"]}`, "error: cache_salt has 1 elements, the request has 2 prompts")
	f("/v1/completions", `{"prompt":["a",[1]]}`, "error: the prompts of a list must be of one kind")
	f("/v1/completions", `{"prompt":"a","n":0}`, "error: n must be a number above 0")
	f("/v1/completions", `{"prompt":"a","n":"x"}`, "error: n must be a number above 0")
	f("/v1/completions", `{"prompt":"a","n":9}`, "error: the request has 1 prompts with 9 answers each, at most 8 answers are allowed")
	f("/v1/completions", `{"prompt":["a","b"],"n":5}`, "error: the request has 2 prompts with 5 answers each, at most 8 answers are allowed")
	f("/v1/completions", `{"prompt":["a","b"],"n":4611686018427387905}`, "error: the request has 2 prompts with 4611686018427387905 answers each, at most 8 answers are allowed")
	f("/v1/completions", `{"prompt":["","","","","","","","",""]}`, "error: the request has 9 prompts, at most 8 are allowed")
	f("/v1/chat/completions", `{"messages":[],"n":2,"rid":"r"}`, `{"messages":[],"n":1,"rid":"r_0"}`+"\n"+`{"messages":[],"n":1,"rid":"r_1"}`)
	f("/generate", `{"text":"a"}`, `{"text":"a"}`)
	f("/generate", `{"input_ids":[5,6]}`, `{"input_ids":[5,6]}`)
	f("/generate", `{"text":"a","sampling_params":{"n": 2,"t":0}}`, `{"text":"a","sampling_params":{"n": 1,"t":0}}`+"\n"+`{"text":"a","sampling_params":{"n": 1,"t":0}}`)
	f("/generate", `{"text":"a","sampling_params":{"n":2,"beam_width":4}}`, `{"text":"a","sampling_params":{"n":2,"beam_width":4}}`)
	f("/generate", `{"text":null,"input_ids":[[5],[6]],"rid":["x","y"],"lora_path":["l",null],"token_ids_logprob":[1,2,3],"sampling_params":[{"t":1},{"t":2}]}`,
		`{"text":null,"input_ids":[5],"rid":"x","lora_path":"l","token_ids_logprob":[1,2,3],"sampling_params":{"t":1}}`+"\n"+
			`{"text":null,"input_ids":[6],"rid":"y","lora_path":null,"token_ids_logprob":[1,2,3],"sampling_params":{"t":2}}`)
	f("/generate", `{"text":["a","b"],"token_ids_logprob":[[1],[2]]}`, `{"text":"a","token_ids_logprob":[1]}`+"\n"+`{"text":"b","token_ids_logprob":[2]}`)
	f("/generate", `{"text":["a","b"],"lora_path":["l"]}`, "error: lora_path has 1 elements, the request has 2 prompts")
	f("/generate", `{"text":["a","b"],"sampling_params":[{"n":1},{"n":2}]}`, "error: n must be the same in all sampling_params")
	f("/generate", `{"text":["a","b"],"input_ids":[[1],[2]],"lora_path":["x","y","z"],"lora_path":["k","l"]}`,
		`{"text":"a","input_ids":[1],"lora_path":"k","lora_path":"k"}`+"\n"+`{"text":"b","input_ids":[2],"lora_path":"l","lora_path":"l"}`)
	f("/generate", `{"text":["a","b"],"rid":["r"]}`, "error: rid must be a text, or a list of one for each of the 2 prompts")
	f("/generate", `{"text":["a","b"],"rid":["r",1]}`, "error: rid must be a text, or a list of texts")
	f("/generate", `{"text":["a","b"],"rid":["r","s"],"sampling_params":{"n":2}}`, func() string {
		var out []string
		for _, one := range []string{`"a","rid":"r_0"`, `"a","rid":"r_1"`, `"b","rid":"s_0"`, `"b","rid":"s_1"`} {
			out = append(out, `{"text":`+one+`,"sampling_params":{"n":1}}`)
		}
		return strings.Join(out, "\n")
	}())
	f("/v1/chat/completions", `{"messages":[],"prompt":["a","b"]}`, `{"messages":[],"prompt":["a","b"]}`)
	f("/v1/responses", `{"input":"a","n":2}`, `{"input":"a","n":2}`)
	f("/generate", `{"text":"a","sampling_params":[{"n":2}]}`, "error: "+openai.ErrSequences.Error())
	f("/generate", `{"text":null,"input_ids":null,"input_embeds":[[[0.5]],[[1.5]]]}`, "error: "+openai.ErrSequences.Error())
	f("/generate", `{"text":null,"input_ids":[5],"input_embeds":null}`, `{"text":null,"input_ids":[5],"input_embeds":null}`)
	f("/generate", `{"text":"a","sampling_params":3}`, "error: sampling_params must be an object")
}

// The prompt of several answers counts once, and the whole has one id.
func TestJoinAnswersToOnePrompt(t *testing.T) {
	answer := func(text string) []byte {
		return []byte(`{"id":"x","choices":[{"index":0,"text":"` + text + `"}],"usage":{"prompt_tokens":7,"total_tokens":10,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}}`)
	}
	parts := []openai.Part{{Index: 0, ID: "r"}, {Index: 1, ID: "r", Later: true}}
	got, err := openai.JoinAnswers(parts, [][]byte{answer("a"), answer("b")})
	want := `{"id":"r","choices":[{"index":0,"text":"a"},{"index":1,"text":"b"}],"usage":{"completion_tokens":6,"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":4},"total_tokens":13}}`
	if err != nil || string(got) != want {
		t.Errorf("%s, %v\nwant %s", got, err, want)
	}
}

// An error at the beginning of a stream tells a fault of the client from one of the engine.
func TestRefused(t *testing.T) {
	f := func(a openai.API, event string, status int, kind openai.Kind) {
		t.Helper()
		got, body := a.Refused([]byte(event))
		if got != status || a.KindOf([]byte(event)) != kind || got != 0 && !bytes.HasPrefix(body, []byte(`{"error"`)) {
			t.Errorf("%s: %d %s, kind %d", event, got, body, a.KindOf([]byte(event)))
		}
	}
	f(openai.Completions, "data: {\"error\": {\"message\":\"no\",\"code\": 400}}\n\n", 400, openai.Data)
	f(openai.Completions, "data: {\"error\":{\"code\":500}}\n\n", 0, openai.Failure)
	f(openai.Completions, "data: {\"error\":{\"code\":503}}\n\n", 503, openai.Failure)
	f(openai.Completions, "data: {\"error\":{\"message\":\"m\"}}\n\n", 0, openai.Failure)
	f(openai.Native, "data: {\"error\":{\"message\":\"too long\"}}\n\n", 400, openai.Data)
	f(openai.Native, "data: {\"error\":{\"message\":\"m\",\"type\":\"InternalServerError\"}}\n\n", 0, openai.Failure)
	f(openai.Native, "data: {\"text\":\"\",\"meta_info\":{\"finish_reason\":{\"type\":\"abort\",\"status_code\":503}}}\n\n", 503, openai.Failure)
	f(openai.Native, "data: {\"text\":\"\",\"meta_info\":{\"finish_reason\":{\"type\":\"abort\",\"status_code\":500}}}\n\n", 0, openai.Failure)
	f(openai.Native, "data: {\"text\":\"\",\"meta_info\":{\"finish_reason\":{\"type\":\"abort\",\"message\":\"m\",\"status_code\":400}}}\n\n", 400, openai.Data)
	f(openai.Native, "data: {\"text\":\"abort\",\"meta_info\":{\"finish_reason\":null}}\n\n", 0, openai.Data)
	f(openai.Native, "data: {\"text\":\"\",\"meta_info\":{\"finish_reason\":{\"type\":\"abort\",\"message\":\"Aborted\"}}}\n\n", 0, openai.Data)
}

// SGLang ends all requests whose ids begin with the id of a request that ends early. So no part's id is the beginning of another part's id.
func TestIDsOfPartsEndAlone(t *testing.T) {
	f := func(path, body string, want int) {
		t.Helper()
		r := scan(t, body)
		all, err := r.Sequences(path, 128)
		if err != nil || len(all) != want {
			t.Fatalf("%d, %v", len(all), err)
		}
		var ids []string
		for _, s := range all {
			for _, e := range s.Edits {
				if e.Key == "rid" {
					ids = append(ids, strings.Trim(string(e.Value), `"`))
				}
			}
		}
		if len(ids) != want {
			t.Fatalf("%d ids", len(ids))
		}
		for i, id := range ids {
			for k, other := range ids {
				if i != k && strings.HasPrefix(other, id) {
					t.Errorf("%s: the end of %q ends %q", path, id, other)
				}
			}
		}
	}
	f("/generate", `{"text":["`+strings.Repeat(`a","`, 11)+`a"],"rid":"r"}`, 12)
	f("/generate", `{"text":["a","b"],"rid":"r","sampling_params":{"n":64}}`, 128)
	f("/v1/chat/completions", `{"messages":[],"rid":["r"],"n":20}`, 20)
	f("/v1/completions", `{"prompt":["a","b"],"rid":["r","s"],"n":11}`, 22)
}

// Scan allocates a bounded amount for a list of token ids, or for more prompts than are allowed.
func TestSequencesAllocateLittle(t *testing.T) {
	ids := "[" + strings.Repeat("1,", 1<<20) + "1]"
	for path, body := range map[string]string{
		"/v1/completions": `{"prompt":` + ids + `}`, "/generate": `{"input_ids":` + ids + `,"token_ids_logprob":` + ids + `,"rid":` + ids + `}`,
		"/generate?": `{"text":["a","b"],"lora_path":` + ids + `}`, "/v1/completions?": `{"prompt":[` + strings.Repeat(`"",`, 1<<19) + `""]}`,
	} {
		path = strings.TrimSuffix(path, "?")
		r := scan(t, body)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, _ = r.Sequences(path, 128)
		_, _, _ = r.Prompts(128)
		runtime.ReadMemStats(&after)
		if n := after.TotalAlloc - before.TotalAlloc; n > 256<<10 {
			t.Errorf("%s %.20s: %d bytes for a body of %d", path, body, n, len(body))
		}
	}
}

// The common data of all parts of a request is kept once, however many parts there are.
func TestSequencesShareWhatIsLong(t *testing.T) {
	long := strings.Repeat("x", 1<<20)
	prompts := `["` + strings.Repeat(`a","`, 127) + `a"]`
	for path, body := range map[string]string{
		"/generate":            `{"text":` + prompts + `,"sampling_params":{"stop":"` + long + `","n":1}}`,
		"/generate?":           `{"text":["` + strings.Repeat(`a","`, 63) + `a"],"sampling_params":{"stop":"` + long + `","n":2}}`,
		"/generate??":          `{"text":` + prompts + `,"rid":"` + long + `"}`,
		"/v1/completions":      `{"prompt":["a","b"],"rid":["` + long + `","s"],"n":64}`,
		"/v1/chat/completions": `{"messages":[],"rid":"` + long + `","n":128}`,
	} {
		path = strings.TrimRight(path, "?")
		r := scan(t, body)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, _ = r.Sequences(path, 128)
		runtime.ReadMemStats(&after)
		if n := after.TotalAlloc - before.TotalAlloc; n > 8<<20 {
			t.Errorf("%s: %d bytes for a body of %d", path, n, len(body))
		}
	}
}

// Each part of any request is a request for a single prompt and a single answer, with its own request id.
func FuzzSequences(f *testing.F) {
	for _, body := range []string{
		`{"text":["a","b"],"sampling_params":[{"n":2},{"n":2}],"rid":["x","y"],"lora_path":["l",null]}`, `{"input_ids":[[1],[2,3]],"rid":"r","token_ids_logprob":[[1],[2]]}`,
		`{"text":"a","sampling_params":{"n":3},"text":"b","rid":"r"}`, `{"prompt":["a","b"],"n":2,"cache_salt":["s","t"],"n":2.0}`, `{"prompt":[[1,2],[3]],"ri\u0064":"r","n":"2"}`,
	} {
		f.Add(uint8(0), body)
		f.Add(uint8(1), body)
	}
	f.Fuzz(func(t *testing.T, api uint8, body string) {
		path := []string{"/generate", "/v1/completions", "/v1/chat/completions"}[api%3]
		r, err := openai.Scan([]byte(body))
		if err != nil {
			return
		}
		const limit = 16
		all, err := r.Sequences(path, limit)
		if err != nil {
			return
		}
		if len(all) == 0 || len(all) > limit {
			t.Fatalf("%s: %d parts", body, len(all))
		}
		if len(all) == 1 {
			return // it is sent undivided
		}
		ids := map[string]bool{}
		for _, s := range all {
			pieces, _ := r.Apply(s.Edits...)
			one, err := openai.Scan(bytes.Join(pieces, nil))
			if err != nil {
				t.Fatalf("%s: %v", body, err)
			}
			if again, err := one.Sequences(path, limit); err != nil || len(again) != 1 {
				t.Fatalf("%s: the part %s has %d parts, %v", body, one.Body, len(again), err)
			}
			one.Each(func(name string, value []byte) {
				if name == "rid" && string(value) != "null" && value[0] != '"' {
					t.Fatalf("%s: the part %s", body, one.Body)
				}
			})
			for _, e := range s.Edits {
				if e.Key == "rid" {
					ids[string(e.Value)] = true
				}
			}
		}
		if r.Given("rid") && !strings.Contains(body, "[") && len(ids) != len(all) {
			t.Fatalf("%s: %d ids of %d parts", body, len(ids), len(all))
		}
	})
}
