// SPDX-License-Identifier: Apache-2.0

package api

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/sim/engine"
	"github.com/kvasir-kv/kvasir/sim/kvmem"
)

// A stream has one finish_reason, whether the end of the request comes with its last token,
// after it, or without any.
func TestStreamsEndWithAReason(t *testing.T) {
	e, err := engine.Open(t.Context(), engine.Options{KV: kvmem.Geometry{Layers: 1, Heads: 1, HeadBytes: 8, BlockTokens: 16, Blocks: 8}})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	a := New(e, Options{})
	end := &engine.End{Reason: "length"}
	type step struct {
		tokens []uint32
		end    *engine.End
	}
	for name, steps := range map[string][]step{
		"with the last token":  {{[]uint32{1}, nil}, {[]uint32{2}, end}},
		"after the last token": {{[]uint32{1, 2}, nil}, {nil, end}},
		"without a token":      {{nil, end}},
	} {
		for _, chat := range []bool{false, true} {
			w := httptest.NewRecorder()
			n := &answer{a: a, w: w, rc: http.NewResponseController(w), body: &body{Stream: true}, chat: chat, seqs: []*sequence{{}}}
			for i, s := range steps {
				if more := n.take(n.seqs[0], s.tokens, s.end); more != (i < len(steps)-1) {
					t.Errorf("%s: more to come after step %d: %v", name, i, more)
				}
			}
			text := w.Body.String()
			if strings.Count(text, `"finish_reason":"length"`) != 1 || !strings.HasSuffix(text, "data: [DONE]\n\n") {
				t.Errorf("%s, chat %v: %s", name, chat, text)
			}
		}
	}
}

// An event that the API builds from parts equals the one that encoding/json writes, whatever names it has.
func TestEventsPutTogether(t *testing.T) {
	e, err := engine.Open(t.Context(), engine.Options{Model: `@text@ "<m>`, KV: kvmem.Geometry{Layers: 1, Heads: 1, HeadBytes: 8, BlockTokens: 16, Blocks: 8}})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	a := New(e, Options{})
	for _, chat := range []bool{false, true} {
		texts := map[bool]string{}
		for _, whole := range []bool{false, true} {
			w := httptest.NewRecorder()
			n := &answer{a: a, w: w, rc: http.NewResponseController(w), body: &body{Stream: true}, chat: chat, id: `@text@"\`, seqs: []*sequence{{}}}
			if whole { // events with continuous usage are not built from parts; without the figures they are equal
				n.body.StreamUsage.Continuous = true
			}
			n.take(n.seqs[0], []uint32{1, 2}, nil)
			n.take(n.seqs[0], []uint32{3}, nil)
			text, _, _ := strings.Cut(w.Body.String(), "[DONE]")
			for {
				from := strings.Index(text, `,"usage":{`)
				if from < 0 {
					break
				}
				text = text[:from] + text[from+strings.Index(text[from:], "}")+1:]
			}
			texts[whole] = text
		}
		if texts[false] != texts[true] {
			t.Errorf("chat %v:\n%s\n%s", chat, texts[false], texts[true])
		}
	}
}
