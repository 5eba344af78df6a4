// SPDX-License-Identifier: Apache-2.0

package openai_test

import (
	"testing"

	"github.com/kvasir-kv/kvasir/internal/openai"
)

// A request for several prompts or answers never counts as one sequence, however it is written.
func TestOneSequence(t *testing.T) {
	f := func(body string, want bool) {
		t.Helper()
		r, err := openai.Scan([]byte(body))
		if err != nil {
			t.Fatal(err)
		}
		if got := r.OneSequence(); got != want {
			t.Errorf("%s: %v", body, got)
		}
	}
	for _, one := range []string{
		`{}`, `{"prompt":"a"}`, `{"prompt":"[1,2]"}`, `{"prompt":[1,2,3]}`, `{"prompt":[ -1 , 2]}`, `{"prompt":["a"]}`, `{"prompt":[ "a,b" ]}`, `{"prompt":[[1,2,3]]}`,
		`{"prompt":null}`, `{"messages":[{"role":"user"},{"role":"user"}]}`, `{"prompt":"a","n":1}`, `{"prompt":"a","n":null,"best_of":null,"use_beam_search":false}`,
		`{"prompt_embeds":"AA=="}`, `{"prompt":"a","prompt_embeds":null}`, `{"prompt":["a","b"],"prompt":"c"}`,
	} {
		f(one, true)
	}
	for _, several := range []string{
		`{"prompt":["a","b"]}`, `{"prompt":[[1],[2]]}`, `{"prompt":[["a"],["b"]]}`, `{"prompt":[[], []]}`, `{"prompt":[]}`, `{"prompt":{}}`, `{"prompt":[null,1]}`,
		`{"prompt":"a","n":2}`, `{"prompt":"a","n":"3"}`, `{"prompt":"a","n":0}`, `{"prompt":"a","n":1.5}`, `{"prompt":"a","n":true}`, `{"messages":[],"n":129}`,
		`{"prompt":"a","best_of":2}`, `{"prompt":"a","use_beam_search":true}`, `{"prompt":"a","use_beam_search":1}`,
		`{"prompt":"a","prompt_embeds":"AA=="}`, `{"prompt_embeds":["AA==","AA=="]}`, `{"pro\u006dpt":["a","b"]}`, `{"prompt":"c","prompt":["a","b"]}`,
	} {
		f(several, false)
	}
}
