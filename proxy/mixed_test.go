// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
	"github.com/kvasir-kv/kvasir/sim/engine"
	"github.com/kvasir-kv/kvasir/sim/kvmem"
)

// mixedRequest is a request of one of many shapes. Of each seed there is one.
type mixedRequest struct {
	path, body string
	refused    bool // by any engine
}

func mixed(seed int) mixedRequest {
	r := rand.New(rand.NewPCG(uint64(seed), 1))
	words := func() string {
		return fmt.Sprintf("request %d of %d ", r.IntN(40), r.IntN(3)) + strings.Repeat("tell me more ", r.IntN(60))
	}
	quoted := func() string { b, _ := json.Marshal(words()); return string(b) }
	tokens, stream := 1+r.IntN(12), r.IntN(2) == 0
	tail := fmt.Sprintf(`,"max_tokens":%d,"stream":%v}`, tokens, stream)
	chat := `{"messages":[{"role":"user","content":` + quoted() + `}]`
	switch r.IntN(12) {
	case 0, 1:
		return mixedRequest{"/v1/completions", `{"prompt":` + quoted() + tail, false}
	case 2, 3:
		list := []string{}
		for range 1 + r.IntN(8) {
			list = append(list, quoted())
		}
		return mixedRequest{"/v1/completions", `{"prompt":[` + strings.Join(list, ",") + `]` + tail, false}
	case 4:
		return mixedRequest{"/v1/completions", `{"prompt":[[1,2,3],[4,5,6,7]],"n":2` + tail, false}
	case 5:
		return mixedRequest{"/v1/chat/completions", chat + `,"n":3` + tail, false}
	case 6:
		return mixedRequest{"/v1/chat/completions", chat + `,"logprobs":true,"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"auto"` + tail, false}
	case 7:
		return mixedRequest{"/v1/responses", fmt.Sprintf(`{"input":%s,"max_output_tokens":%d,"stream":%v}`, quoted(), tokens, stream), false}
	case 8:
		return mixedRequest{"/v1/messages", chat + tail, false}
	case 9:
		return mixedRequest{"/inference/v1/generate", fmt.Sprintf(`{"token_ids":[%d,2,3],"sampling_params":{"max_tokens":%d}}`, r.IntN(99), tokens), false}
	case 10:
		bad := []string{`,"max_tokens":0}`, `,"max_tokens":9999}`, `,"n":0}`, `,"logprobs":-1}`, `,"min_tokens":9,"max_tokens":8}`}
		return mixedRequest{"/v1/completions", `{"prompt":` + quoted() + bad[r.IntN(len(bad))], true}
	}
	return mixedRequest{"/v1/chat/completions/batch", fmt.Sprintf(`{"messages":[[{"role":"user","content":%s}],[{"role":"user","content":%s}]],"max_tokens":%d}`, quoted(), quoted(), tokens), false}
}

// essence returns the part in which two answers to one request must agree: the generated tokens, in the order of the choices.
func essence(t testing.TB, path, answer string) string {
	if strings.Contains(path, "completions") {
		var c strings.Builder
		for i, text := range mixedChoices(t, answer) {
			fmt.Fprintf(&c, "%d %s;", i, text)
		}
		return c.String()
	}
	return texts(answer)
}

func mixedChoices(t testing.TB, answer string) (out []string) {
	for line := range strings.Lines(answer) {
		line = strings.TrimPrefix(strings.TrimSpace(line), "data: ")
		if line == "" || line == "[DONE]" {
			continue
		}
		var c struct {
			Choices []struct {
				Index          int
				Text           string
				Message, Delta struct{ Content string }
			}
		}
		if err := json.Unmarshal([]byte(line), &c); err != nil {
			t.Errorf("%q: %v", line, err)
		}
		for _, x := range c.Choices {
			for len(out) <= x.Index {
				out = append(out, "")
			}
			out[x.Index] += x.Text + x.Message.Content + x.Delta.Content
		}
	}
	return out
}

// A thousand requests of all shapes through two P and two D, some of whose clients leave, while P and D are killed and started again:
// each answer is that of one engine, or an error; no KV is wrong, no block and no place stays taken, and the key has all its places.
func TestMixedRequests(t *testing.T) {
	requests := max(200, testkit.Volume(1000))
	if testing.Short() {
		requests = 200
	}
	const atOnce = 16
	x := &deployment{t: t}
	x.stopAll()
	memory := kvmem.Geometry{Layers: 2, Heads: 2, HeadBytes: 8, BlockTokens: 16, Blocks: 3000}
	start := func(addr, config string) *served {
		return serveWith(t, addr, config, engine.Options{StepTime: time.Millisecond, KV: memory})
	}
	o := proxy.Options{HealthInterval: 50 * time.Millisecond, Keys: keyFile(t, keyLine("ada", "s", fmt.Sprint("concurrent=", atOnce)))}
	var configs []string // of P's
	for i := range 2 {
		registry := startRegistry(t)
		configs = append(configs, producer(registry, fmt.Sprint("p", i)))
		x.p = append(x.p, start("", configs[i]))
		o.Prefill = append(o.Prefill, proxy.Prefill{URL: x.p[i].web.URL, Registry: registry})
		x.d = append(x.d, start("", consumer))
		o.Decode = append(o.Decode, x.d[i].web.URL)
	}
	kill := func(i int) {
		engines, config := x.p, configs[i/2]
		if i%2 == 1 {
			engines, config = x.d, consumer
		}
		addr := engines[i/2].web.Listener.Addr().String()
		engines[i/2].stop(t)
		engines[i/2] = start(addr, config)
	}
	x.start(o)
	alone := serve(t, "", "", 0)
	defer alone.stop(t)
	var ok, failed, left atomic.Int64
	one := func(i int) {
		m := mixed(i)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		leaves := i%7 == 0
		if leaves {
			time.AfterFunc(time.Duration(i%40)*time.Millisecond, cancel)
		}
		r, _ := http.NewRequestWithContext(ctx, http.MethodPost, x.url+m.path, strings.NewReader(m.body))
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Authorization", "Bearer s")
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			if left.Add(1); !leaves {
				t.Errorf("%s %s: %v", m.path, m.body, err)
			}
			return
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		got := string(text)
		switch {
		case leaves && ctx.Err() != nil:
			left.Add(1)
		case resp.StatusCode == 400 && m.refused:
			ok.Add(1)
		case resp.StatusCode >= 500, err != nil, strings.Contains(got, `"error"`), strings.Contains(got, "response.failed"):
			failed.Add(1) // an engine was killed
		case resp.StatusCode != 200 || m.refused:
			t.Errorf("%s %s: %d %s", m.path, m.body, resp.StatusCode, got)
		default:
			_, want, _ := postAndRead(t, alone.web.URL+m.path, m.body)
			if essence(t, m.path, got) != essence(t, m.path, want) || essence(t, m.path, got) == "" {
				t.Errorf("%s %s: %s\nwant %s", m.path, m.body, got, want)
			}
			ok.Add(1)
		}
	}
	work := make(chan int)
	var wg sync.WaitGroup
	for range atOnce {
		wg.Go(func() {
			for i := range work {
				one(i)
			}
		})
	}
	for i := range requests {
		work <- i
		if i > 0 && i%(requests/5) == 0 {
			kill(i / (requests / 5) % 4)
		}
	}
	close(work)
	wg.Wait()
	t.Logf("%d right, %d errors, %d left", ok.Load(), failed.Load(), left.Load())
	testkit.Eventually(t, "no place is taken", func() bool { return x.proxy.Taken() == "" && x.proxy.Stats().InFlight == 0 })
	x.idle()
	if ok.Load() < int64(requests)*7/10 || left.Load() == 0 {
		t.Errorf("%d right, %d errors, %d left: %+v", ok.Load(), failed.Load(), left.Load(), x.proxy.Stats())
	}
	for i := range atOnce { // all places of the key are free: as many requests as it may have, at once
		wg.Go(func() {
			if status, text, _ := do(t, http.MethodPost, x.url+"/v1/completions", "s", body(i, 20, "")); status != 200 {
				t.Error(status, text)
			}
		})
	}
	wg.Wait()
}
