// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/proxy"
)

// The number of cached tokens is P's, also where P's answer is read after D's: on each API, whole and streamed, of one prompt and of a list.
func TestCachedTokensWaitForP(t *testing.T) {
	begun := make(chan struct{}, 8) // D has answered
	p := http.NewServeMux()
	p.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	p.HandleFunc("POST /v1/", func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/v1/messages" { // on /v1/messages P answers first
			<-begun
			time.Sleep(20 * time.Millisecond) // the answer of D is on its way
		}
		fmt.Fprint(w, `{"usage":{"prompt_tokens":900,"prompt_tokens_details":{"cached_tokens":7},"input_tokens_details":{"cached_tokens":7},"cache_read_input_tokens":7}}`)
	})
	d := http.NewServeMux()
	d.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	answer := ""
	d.HandleFunc("POST /v1/", func(w http.ResponseWriter, _ *http.Request) {
		if strings.HasPrefix(answer, "data") || strings.HasPrefix(answer, "event") {
			w.Header().Set("Content-Type", "text/event-stream")
		}
		fmt.Fprint(w, answer)
		begun <- struct{}{}
	})
	url, s := startProxy(t, proxy.Options{
		Prefill: []proxy.Prefill{{URL: serveMux(t, p), Registry: mockRegistry(t, oneRank)}}, Decode: []string{serveMux(t, d)}, HealthInterval: time.Hour,
	})
	reach(t, url)
	const usage = `"usage":{"prompt_tokens":900,"prompt_tokens_details":{"cached_tokens":900}}`
	const input, read = `"usage":{"input_tokens":900,"input_tokens_details":{"cached_tokens":900}}`, `"usage":{"input_tokens":900,"cache_read_input_tokens":900}`
	f := func(path, body, says string, numbers int) {
		t.Helper()
		answer = says
		status, text, err := postAndRead(t, url+path, body)
		if status != 200 || err != nil || strings.Contains(text, `tokens":900}}`) || strings.Contains(text, `cache_read_input_tokens":900`) || strings.Count(text, `tokens":7`)+strings.Count(text, `tokens":14`) != numbers {
			t.Errorf("%s %s: %d %s, %v", path, body, status, text, err)
		}
	}
	const c, chat, one = "/v1/completions", "/v1/chat/completions", `{"index":0,"text":"a"}`
	f(c, `{"prompt":"a","max_tokens":1}`, `{"choices":[`+one+`],`+usage+`}`, 1)
	f(c, `{"prompt":["a","b"],"max_tokens":1}`, `{"choices":[`+one+`],`+usage+`}`, 1)
	f(c, `{"prompt":"a","stream":true,"stream_options":{"include_usage":true}}`, token+"data: {\"choices\":[],"+usage+"}\n\n"+done, 1)
	f(c, `{"prompt":["a","b"],"stream":true,"stream_options":{"include_usage":true}}`, token+"data: {\"choices\":[],"+usage+"}\n\n"+done, 1)
	f(chat, `{"messages":[]}`, `{"choices":[],`+usage+`}`, 1)
	f(chat, `{"messages":[],"stream":true,"stream_options":{"include_usage":true}}`, "data: {\"choices\":[],"+usage+"}\n\n"+done, 1)
	f("/v1/responses", `{"input":"a"}`, `{"output":[],`+input+`}`, 1)
	f("/v1/responses", `{"input":"a","stream":true}`, "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{"+input+"}}\n\n", 1)
	f("/v1/messages", `{"messages":[]}`, `{"content":[],`+read+`}`, 1)
	f("/v1/messages", `{"messages":[],"stream":true}`, "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{"+read+"}}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n", 1)
	if n := s.Stats(); n.Requests["ok"] != 10 {
		t.Errorf("%+v", n)
	}
}

// The proxy changes cached tokens in the usage alone. Equal names in the input of a tool call pass unchanged, whole and streamed.
func TestToolInputsPass(t *testing.T) {
	const input = `"input":{"cached_tokens":7,"cache_read_input_tokens":8,"usage":{"cached_tokens":9}}`
	const usage = `"usage":{"cache_read_input_tokens":%d}`
	for _, stream := range []bool{false, true} {
		format := `{"content":[{"type":"tool_use",` + input + `}],` + usage + `}`
		if stream {
			format = "event: content_block_start\ndata: {\"type\":\"content_block_start\",\"content_block\":{" + input + "}}\n\n" +
				"event: message_delta\ndata: {\"type\":\"message_delta\"," + usage + "}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"
		}
		engine := func(f func(w http.ResponseWriter)) string {
			mux := http.NewServeMux()
			mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
			mux.HandleFunc("POST /v1/messages", func(w http.ResponseWriter, _ *http.Request) { f(w) })
			return serveMux(t, mux)
		}
		p := engine(func(w http.ResponseWriter) {
			fmt.Fprint(w, `{"kv_transfer_params":{"a":1},"usage":{"cache_read_input_tokens":2}}`)
		})
		d := engine(func(w http.ResponseWriter) {
			if stream {
				w.Header().Set("Content-Type", "text/event-stream")
			}
			fmt.Fprintf(w, format, 500)
		})
		url, _ := startProxy(t, proxy.Options{Dialect: proxy.NIXL, Prefill: []proxy.Prefill{{URL: p}}, Decode: []string{d}, HealthInterval: time.Hour})
		reach(t, url)
		_, got, err := postAndRead(t, url+"/v1/messages", fmt.Sprintf(`{"messages":[],"max_tokens":9,"stream":%v}`, stream))
		if want := fmt.Sprintf(format, 2); got != want || err != nil {
			t.Errorf("%s, %v\nwant %s", got, err, want)
		}
	}
}
