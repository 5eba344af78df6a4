// SPDX-License-Identifier: Apache-2.0

package openai_test

import (
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/openai"
)

// A stream is whole once the last event of its API has come, in whatever pieces the stream comes.
func TestEnd(t *testing.T) {
	f := func(api openai.API, stream string, want openai.State) {
		t.Helper()
		for n := 1; n <= len(stream)+1; n++ {
			end := openai.NewEnd(api)
			for rest := stream; rest != ""; {
				piece := rest[:min(n, len(rest))]
				rest = rest[len(piece):]
				end.Add([]byte(piece))
			}
			if end.State() != want {
				t.Errorf("%q in pieces of %d: %v", stream, n, end.State())
			}
		}
	}
	const c, r, m = openai.Completions, openai.Responses, openai.Messages
	f(c, "", openai.Open)
	f(c, "data: [DONE]", openai.Complete)
	f(c, "data: [DONE]\n", openai.Complete)
	f(c, "data: [DONE]\r\n\r\n", openai.Complete)
	f(c, "data:[DONE]\n\n", openai.Complete)
	f(c, strings.Repeat("data: {}\n\n", 20)+"data: [DONE]\n\n", openai.Complete)
	f(c, "data: "+strings.Repeat("x", 300)+"\n\ndata: [DONE]\n\n: bye\n\n", openai.Complete)
	f(c, "data: [DONE]\n\ndata: {}\n\n", openai.Open)
	f(c, "\ufeffdata: [DONE]", openai.Complete)
	f(c, "\ufeffdata: {}\r\n\r\ndata: [DONE]\r\n\r\n", openai.Complete)
	f(c, "[DONE]", openai.Open)
	f(c, "data: [DONE", openai.Open)
	f(c, "data: {}\n\ndata: {\"error\":{\"code\":500}}\n\n", openai.Failed)
	f(c, "data: {\"error\":{\"code\":500}}\n\ndata: [DONE]\n\n", openai.Complete)

	f(r, "", openai.Open)
	whole := `{"type":"response.completed","response":{"output":"` + strings.Repeat("long ", 100) + `"}}`
	f(r, "event: response.created\ndata: {}\n\nevent: response.completed\ndata: "+whole+"\n\n", openai.Complete)
	f(r, "event: response.completed\r\ndata: "+whole+"\r\n\r\n", openai.Complete)
	f(r, "data: "+whole+"\n\n", openai.Complete)
	f(r, "data: {\"type\": \"response.incomplete\"}\n\ndata: [DONE]\n\n", openai.Complete)
	f(r, "event: response.failed\ndata: {}\n\n", openai.Complete)
	f(r, "event: error\ndata: {}\n\n", openai.Failed)
	f(r, "event: response.completed\ndata: "+whole, openai.Open)
	f(r, "event: response.completed\ndata: "+whole+"\n", openai.Open)
	f(r, "event: response.completed\n", openai.Open)
	f(r, "event: response.completed\n\n", openai.Open) // no data
	f(r, "event: response.output_text.delta\ndata: {\"delta\":\"event: response.completed\"}\n\n", openai.Open)
	f(r, "data: [DONE]\n\n", openai.Open)

	f(m, "event: message_start\ndata: {}\n\n", openai.Open)
	f(m, "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n", openai.Complete)
	f(m, "event: message_stop\ndata: {}\n\nevent: ping\ndata: {}\n\n: comment\n\n", openai.Complete)
	f(m, "event: error\ndata: {\"type\":\"error\"}\n\n", openai.Failed)
	f(m, "event: message_stop\ndata: {}\n\nevent: message_start\ndata: {}\n\n", openai.Open)
	f(m, "\ufeffevent: message_stop\ndata: {}\n\n", openai.Complete)
	f(m, "event: message_sto", openai.Open)

	f(openai.Other, "", openai.Complete)
	f(openai.Other, "anything", openai.Complete)
}

// If SGLang ends an answer of /generate for a fault of its own, that event makes the stream a failure, wherever it comes and in whatever
// pieces. An end that the client asked for does not.
func TestEndOfNativeStreams(t *testing.T) {
	f := func(reason string, failed bool) {
		t.Helper()
		text := `\"status_code\":500 ` + strings.Repeat("long ", 50)
		stream := `data: {"text":"` + text + `","meta_info":{"finish_reason":null}}` + "\n\n" + `data: {"text":"` + text + `","meta_info":{"finish_reason":` + reason + "}}\n\ndata: [DONE]\n\n"
		for n := 1; n <= len(stream)+1; n++ {
			end := openai.NewEnd(openai.Native)
			for rest := stream; rest != ""; {
				piece := rest[:min(n, len(rest))]
				rest = rest[len(piece):]
				end.Add([]byte(piece))
			}
			if end.State() != openai.Complete || end.Failed() != failed {
				t.Fatalf("%s in pieces of %d: %v, failed %v", reason, n, end.State(), end.Failed())
			}
		}
	}
	f(`{"type":"abort","message":"Lost connection","status_code":500,"err_type":null}`, true)
	f(`{"type":"abort","message":"Aborted","status_code":null,"err_type":null}`, false)
	f(`{"type":"length","length":4}`, false)
}

// An answer without a token whose choices were all aborted is a failure. An answer with a token, another reason or another form is none.
func TestAborted(t *testing.T) {
	f := func(want bool, text string) {
		t.Helper()
		if got := openai.Completions.Aborted([]byte(text)); got != want {
			t.Errorf("%s: %v", text, got)
		}
	}
	f(true, `{"choices":[{"index":0,"text":"","finish_reason":"abort"}],"usage":{"prompt_tokens":3}}`)
	f(true, `{"choices":[{"message":{"role":"assistant","content":null,"tool_calls":[]},"finish_reason":"abort"},{"message":{"content":""},"finish_reason":"abort"}]}`)
	f(true, "data: {\"choices\":[{\"text\":\"\",\"finish_reason\":\"abort\"}]}\n\ndata: [DONE]\n\n")
	f(true, ": ping\n\ndata: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\ndata: {\"choices\":[{\"delta\":{\"content\":\"\"},\"finish_reason\":\"abort\"}]}\n\n")
	f(false, `{"choices":[{"text":" a","finish_reason":"abort"}]}`)
	f(false, `{"choices":[{"text":"","finish_reason":"abort"},{"text":" b","finish_reason":"length"}]}`)
	f(false, `{"choices":[{"message":{"content":"\"abort\""},"finish_reason":"stop"}]}`)
	f(false, `{"choices":[{"message":{"content":null,"reasoning_content":"a"},"finish_reason":"abort"}]}`)
	f(false, `{"choices":[{"message":{"content":null,"tool_calls":[{"id":"1"}]},"finish_reason":"abort"}]}`)
	f(false, "data: {\"choices\":[{\"text\":\" a\",\"finish_reason\":null}]}\n\ndata: {\"choices\":[{\"text\":\"\",\"finish_reason\":\"abort\"}]}\n\n")
	f(false, `{"choices":[],"x":"abort"}`)
	f(false, `"abort"`)
	f(false, `{"choices":[{"text":"","finish_reason":"abort"}`)
	if openai.Messages.Aborted([]byte(`{"choices":[{"text":"","finish_reason":"abort"}]}`)) {
		t.Error("an answer of another API")
	}
}

func FuzzEnd(f *testing.F) {
	f.Add(uint8(1), "event: response.completed\ndata: {}\n\n", 3)
	f.Add(uint8(0), "data: [DONE]\r\n\r\n", 1)
	f.Add(uint8(3), "data: {\"meta_info\":{\"finish_reason\":{\"type\":\"abort\",\"status_code\":500}}}\n\ndata: [DONE]\n\n", 60)
	f.Fuzz(func(t *testing.T, api uint8, stream string, cut int) {
		one, two := openai.NewEnd(openai.API(api%4)), openai.NewEnd(openai.API(api%4))
		one.Add([]byte(stream))
		at := max(0, min(cut, len(stream)))
		two.Add([]byte(stream[:at]))
		two.Add([]byte(stream[at:]))
		if one.State() != two.State() || one.Failed() != two.Failed() {
			t.Fatalf("%q cut at %d: %v, failed %v, whole: %v, %v", stream, at, two.State(), two.Failed(), one.State(), one.Failed())
		}
	})
}
