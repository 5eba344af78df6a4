// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
)

// joined is an answer to several prompts: texts by index, and the usage.
type joined struct {
	Texts []string
	ids   map[string]bool
	usage struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
		Total      int `json:"total_tokens"`
	}
}

// choicesOf reads an answer, whole or streamed. Of a stream it wants the last event.
func choicesOf(t testing.TB, answer string) (j joined) {
	t.Helper()
	j.ids = map[string]bool{}
	stream := strings.HasPrefix(answer, "data: ") || strings.HasPrefix(answer, ":")
	if stream && !strings.HasSuffix(answer, "data: [DONE]\n\n") {
		t.Errorf("a stream without an end: %q", answer)
	}
	for line := range strings.Lines(answer) {
		line, data := strings.CutPrefix(strings.TrimSpace(line), "data: ")
		if line == "" || line == "[DONE]" || stream && !data {
			continue
		}
		var c struct {
			ID      string
			Choices []struct {
				Index int
				Text  string
			}
			Usage json.RawMessage
		}
		if err := json.Unmarshal([]byte(line), &c); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		for _, x := range c.Choices {
			for len(j.Texts) <= x.Index {
				j.Texts = append(j.Texts, "")
			}
			j.Texts[x.Index] += x.Text
		}
		if len(c.Usage) > 0 && string(c.Usage) != "null" {
			if err := json.Unmarshal(c.Usage, &j.usage); err != nil {
				t.Fatal(err)
			}
		}
		j.ids[c.ID] = true
	}
	return j
}

// prompts returns n different prompts, the second one shorter than a block.
func prompts(first, n int) string {
	var list []string
	for i := range n {
		p := fmt.Sprintf("prompt %d ", first+i) + strings.Repeat("tell me more ", 20+i)
		if i == 1 {
			p = fmt.Sprintf("short %d", first)
		}
		list = append(list, p)
	}
	text, _ := json.Marshal(list)
	return string(text)
}

// A list of prompts through P and D is answered as by one engine, whole and streamed: each prompt has a transfer of its own, P
// computes each, and no block stays anywhere.
func TestListsGoThroughPAndD(t *testing.T) {
	for _, dialect := range []proxy.Dialect{proxy.Mooncake, proxy.Mooncake013} {
		t.Run(fmt.Sprint(dialect), func(t *testing.T) {
			x := &deployment{t: t}
			x.stopAll()
			o := proxy.Options{HealthInterval: 50 * time.Millisecond}
			x.pair(t, pair{model: "m", dialect: dialect, p: 2, d: 2}, &o, 0)
			x.start(o)
			alone := serve(t, "", "", 0)
			defer alone.stop(t)
			asked := int64(0)
			for round, n := range []int{1, 2, 8} {
				for _, more := range []string{"", `,"stream":true`, `,"stream":true,"stream_options":{"include_usage":true}`} {
					request := fmt.Sprintf(`{"prompt":%s,"max_tokens":6%s}`, prompts(100*round+len(more), n), more)
					_, want, _ := post(t, alone.web.URL, request)
					status, got, h := post(t, x.url, request)
					g, w := choicesOf(t, got), choicesOf(t, want)
					if status != 200 || !slices.Equal(g.Texts, w.Texts) || g.usage != w.usage || len(g.ids) != 1 || h.Get("X-Request-Id") == "" {
						t.Errorf("%d prompts%s: %d %s\nwant %s", n, more, status, got, want)
					}
					asked += int64(n)
					x.idle()
				}
			}
			if done := x.p[0].Stats().Finished + x.p[1].Stats().Finished; done != asked {
				t.Errorf("P computed %d prompts, want %d", done, asked)
			}
			if s := x.proxy.Stats(); s.Requests["ok"] != 9 || s.Spared["sequences"] != 0 || x.proxy.Taken() != "" {
				t.Errorf("%+v", s)
			}
		})
	}
}

// With NIXL each prompt of a list has a request id and block ids of its own.
func TestListsOfNIXL(t *testing.T) {
	var ps, ds legs
	p := mock(t, func(w http.ResponseWriter, r *http.Request) {
		m := ps.note(r)
		fmt.Fprintf(w, `{"choices":[],"kv_transfer_params":{"blocks_of":%q}}`, m["prompt"])
	})
	d := mock(t, func(w http.ResponseWriter, r *http.Request) {
		m := ds.note(r)
		if m["prompt"] != m["kv_transfer_params"].(map[string]any)["blocks_of"] {
			t.Errorf("D has blocks of another prompt: %v", m)
		}
		fmt.Fprintf(w, `{"id":"cmpl-%s-0","choices":[{"index":0,"text":"to %s"}],"usage":{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":1}}}`, r.Header.Get("X-Request-Id"), m["prompt"])
	})
	url, _ := startProxy(t, proxy.Options{Dialect: proxy.NIXL, Prefill: []proxy.Prefill{{URL: p}}, Decode: []string{d}, HealthInterval: 20 * time.Millisecond})
	reach(t, url)
	status, text, _ := post(t, url, `{"prompt":["a","b","c"]}`)
	if j := choicesOf(t, text); status != 200 || !slices.Equal(j.Texts, []string{"to a", "to b", "to c"}) || j.usage.Prompt != 9 {
		t.Errorf("%d %s", status, text)
	}
	ids := map[string]bool{}
	_, heads := ps.all()
	for _, h := range heads {
		ids[h.Get("X-Request-Id")] = true
	}
	if len(ids) != 3 {
		t.Errorf("P has the ids %v", ids)
	}
}

// A list of more prompts than --max-prompts is 400 with P and D, and passes to engines that do both. A list that cannot be split goes to
// D alone, and the client gets D's answer.
func TestListsThatAreNotSplit(t *testing.T) {
	for _, dialect := range []proxy.Dialect{proxy.Mooncake, proxy.Mooncake013} {
		t.Run(fmt.Sprint(dialect), func(t *testing.T) { testListsThatAreNotSplit(t, dialect) })
	}
}

func testListsThatAreNotSplit(t *testing.T, dialect proxy.Dialect) {
	x := &deployment{t: t}
	x.stopAll()
	o := proxy.Options{HealthInterval: 50 * time.Millisecond}
	x.pair(t, pair{model: "m", dialect: dialect, p: 1, d: 1}, &o, 0)
	x.start(o)
	alone := serve(t, "", "", 0)
	defer alone.stop(t)
	f := func(request string) {
		t.Helper()
		wantStatus, want, _ := post(t, alone.web.URL, request)
		status, got, _ := post(t, x.url, request)
		if status != wantStatus || status == 200 && !slices.Equal(choicesOf(t, got).Texts, choicesOf(t, want).Texts) || status != 200 && got != want {
			t.Errorf("%.200s: %d %.300s\nwant %d %.300s", request, status, got, wantStatus, want)
		}
		x.idle()
	}
	long := `["a` + strings.Repeat(`","a`, 999) + `"]`
	if status, text, _ := post(t, x.url, `{"prompt":`+long+`,"max_tokens":1}`); status != 400 || !strings.Contains(text, "at most 128") {
		t.Errorf("%d %s", status, text)
	}
	for _, prompt := range []string{`["a",""]`, `[[1],[]]`, `[[[1]],[[2]]]`, `["a",[1]]`, `[]`, `[[1,"x"],[2]]`, `["a",null]`, `[["a"],["b"]]`} {
		f(`{"prompt":` + prompt + `,"max_tokens":2}`)
		f(`{"prompt":` + prompt + `,"max_tokens":2,"stream":true}`)
	}
	for _, n := range []string{"0", "3", `"3"`, "129", "-1", "2.5", `"x"`, "16385"} {
		f(`{"prompt":"a b c","max_tokens":2,"n":` + n + `}`)
		f(`{"prompt":["a b c","d e"],"max_tokens":2,"n":` + n + `}`)
	}
	f(`{"prompt":["a","b"],"max_tokens":2,"use_beam_search":true}`)
	if n := x.p[0].Stats().Finished; n != 0 {
		t.Errorf("P has computed %d prompts", n)
	}
	url, _ := startProxy(t, proxy.Options{Engines: []string{alone.web.URL}, HealthInterval: 50 * time.Millisecond})
	reach(t, url)
	if status, text, _ := post(t, url, `{"prompt":`+long+`,"max_tokens":1}`); status != 200 || len(choicesOf(t, text).Texts) != 1000 {
		t.Errorf("%d %.200s", status, text)
	}
}

// A prompt that an engine refuses ends the whole list with that one answer, before anything is streamed; the other prompts leave
// no block behind.
func TestOnePromptOfAListIsRefused(t *testing.T) {
	for _, dialect := range []proxy.Dialect{proxy.Mooncake, proxy.Mooncake013} {
		x := &deployment{t: t}
		x.stopAll()
		o := proxy.Options{HealthInterval: 50 * time.Millisecond}
		x.pair(t, pair{model: "m", dialect: dialect, p: 1, d: 1}, &o, time.Millisecond)
		x.start(o)
		long := strings.Repeat("word ", 3000) // more than the model takes
		for _, more := range []string{"", `,"stream":true`} {
			request := fmt.Sprintf(`{"prompt":["one","two",%q,"four"],"max_tokens":200%s}`, long, more)
			_, want, _ := post(t, x.d[0].web.URL, fmt.Sprintf(`{"prompt":%q,"max_tokens":200}`, long))
			if status, got, _ := post(t, x.url, request); status != 400 || got != want {
				t.Errorf("%v%s: %d %s\nwant %s", dialect, more, status, got, want)
			}
			x.idle()
			testkit.Eventually(t, "no place is taken", func() bool { return x.proxy.Taken() == "" && x.proxy.Stats().InFlight == 0 })
		}
	}
}

// The prompts of a list wait for each other where engines have no room, and the request counts once for its key.
func TestListsTakeTheirTurns(t *testing.T) {
	x := &deployment{t: t, registry: startRegistry(t)}
	x.stopAll()
	x.p = append(x.p, serve(t, "", producer(x.registry, "p0"), 0))
	x.d = append(x.d, serve(t, "", consumer, time.Millisecond))
	x.start(proxy.Options{
		Prefill: []proxy.Prefill{{URL: x.p[0].web.URL, Registry: x.registry}}, Decode: []string{x.d[0].web.URL}, HealthInterval: 50 * time.Millisecond,
		MaxPerEngine: 2, MaxQueue: 2, QueueTimeout: 20 * time.Millisecond, Keys: keyFile(t, keyLine("ada", "s", "concurrent=1")),
	})
	for _, more := range []string{"", `,"stream":true`} {
		status, text, _ := do(t, http.MethodPost, x.url+"/v1/completions", "s", fmt.Sprintf(`{"prompt":%s,"max_tokens":60%s}`, prompts(len(more), 12), more))
		if j := choicesOf(t, text); status != 200 || len(j.Texts) != 12 || slices.Contains(j.Texts, "") {
			t.Errorf("%d %s", status, text)
		}
		x.idle()
	}
	if s := x.proxy.Stats(); s.Requests["ok"] != 2 || s.TTFT["m"].Sum == 0 || x.proxy.Taken() != "" {
		t.Errorf("%+v", s)
	}
}

// A client that leaves ends all prompts of its list, at both engines.
func TestClientLeavesAList(t *testing.T) {
	x := deploy(t, 2, 10*time.Millisecond)
	for _, more := range []string{"", `,"stream":true`} {
		ctx, cancel := context.WithCancel(t.Context())
		r, _ := http.NewRequestWithContext(ctx, http.MethodPost, x.url+"/v1/completions", strings.NewReader(fmt.Sprintf(`{"prompt":%s,"max_tokens":900%s}`, prompts(0, 6), more)))
		var wg sync.WaitGroup
		wg.Go(func() {
			if resp, err := http.DefaultClient.Do(r); err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
		})
		testkit.Eventually(t, "the prompts run", func() bool { return x.d[0].Stats().Running+x.d[1].Stats().Running == 6 })
		cancel()
		wg.Wait()
		x.idle()
	}
	testkit.Eventually(t, "both have left", func() bool { return x.proxy.Stats().Requests["client_left"] == 2 && x.proxy.Taken() == "" })
}

// When an engine dies in the middle of a list, the answer ends with an error, so no client takes the part for the whole.
func TestEngineDiesInAList(t *testing.T) {
	t.Parallel() // D asks for KV that P does not have any more, which takes a while
	x := deploy(t, 1, 10*time.Millisecond)
	for _, stream := range []bool{false, true} {
		var wg sync.WaitGroup
		wg.Go(func() {
			resp, err := http.Post(x.url+"/v1/completions", "application/json", strings.NewReader(fmt.Sprintf(`{"prompt":%s,"max_tokens":900,"stream":%v}`, prompts(0, 3), stream)))
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			text, err := io.ReadAll(resp.Body)
			if stream && !strings.Contains(string(text), `{"error":`) || !stream && resp.StatusCode != 503 {
				t.Errorf("%d %.300s, %v", resp.StatusCode, text, err)
			}
		})
		testkit.Eventually(t, "the prompts run", func() bool { return x.d[0].Stats().Running == 3 && x.d[0].Stats().Generated > 30 })
		addr := x.d[0].web.Listener.Addr().String()
		x.d[0].stop(t)
		wg.Wait()
		x.d[0] = serve(t, addr, consumer, 10*time.Millisecond)
		testkit.Eventually(t, "D is found again", func() bool { return x.proxy.Stats().Well[x.d[0].web.URL] == 1 })
		x.idle()
	}
}

// A stream may begin with a byte order mark: its first event is data, also of a list, whose parts lost it.
func TestStreamsWithAByteOrderMark(t *testing.T) {
	p := mock(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"kv_transfer_params":{"a":1}}`) })
	d := streaming(t, func(write func(string), _ *http.Request) { write("\ufeff" + token + done) })
	url, s := startProxy(t, proxy.Options{Dialect: proxy.NIXL, Prefill: []proxy.Prefill{{URL: p}}, Decode: []string{d}, HealthInterval: time.Hour})
	reach(t, url)
	for _, more := range []string{"", `,"stream_options":{"include_usage":true}`} {
		for prompt, answers := range map[string]int{`"a"`: 1, `["a","b"]`: 2} {
			status, text, err := postAndRead(t, url+"/v1/completions", `{"stream":true`+more+`,"prompt":`+prompt+`}`)
			if status != 200 || err != nil || strings.Count(text, `"text":"a"`) != answers || !strings.HasSuffix(text, done) {
				t.Errorf("%s%s: %d %q %v", prompt, more, status, text, err)
			}
		}
	}
	if n := s.Stats(); n.Requests["ok"] != 4 {
		t.Errorf("%+v", n)
	}
}

// A stream whose last event has no empty line behind it, or another mark at an end of line, is whole for a list as for one prompt.
func TestListsOfStreamsWithoutALastLine(t *testing.T) {
	for _, end := range []string{done, "data: [DONE]\n", "data: [DONE]", "data:[DONE]", "data: [DONE]\r\n\r\n", "data: [DONE]\r\n", "\n: bye\n\ndata: [DONE]"} {
		for _, more := range []string{"", `,"stream_options":{"include_usage":true}`} {
			p := mock(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"kv_transfer_params":{"a":1}}`) })
			d := streaming(t, func(write func(string), _ *http.Request) { write(token + end) })
			url, s := startProxy(t, proxy.Options{Dialect: proxy.NIXL, Prefill: []proxy.Prefill{{URL: p}}, Decode: []string{d}, HealthInterval: time.Hour})
			reach(t, url)
			for _, prompt := range []string{`"a"`, `["a","b"]`} {
				status, text, err := postAndRead(t, url+"/v1/completions", `{"stream":true`+more+`,"prompt":`+prompt+`}`)
				if answers := strings.Count(text, `"text":"a"`); status != 200 || err != nil || answers != strings.Count(prompt, `"`)/2 || !strings.Contains(text, "[DONE]") || strings.Contains(text, "error") {
					t.Errorf("%q%s %s: %d %q %v", end, more, prompt, status, text, err)
				}
			}
			if n := s.Stats().Requests; n["ok"] != 2 {
				t.Errorf("%q%s: %v", end, more, n)
			}
		}
	}
}
