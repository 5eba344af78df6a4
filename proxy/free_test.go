// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
)

// P's KV of a request that D refuses is freed. Many requests ask for more tokens than the model has, in each dialect, API and form:
// afterwards all blocks are free, and each client got D's refusal.
func TestPIsFreedWhenDRefuses(t *testing.T) {
	for _, dialect := range []proxy.Dialect{proxy.Mooncake, proxy.Mooncake013} {
		x := &deployment{t: t}
		x.stopAll()
		o := proxy.Options{HealthInterval: 50 * time.Millisecond}
		x.pair(t, pair{model: "m", dialect: dialect, p: 1, d: 1}, &o, time.Millisecond)
		x.start(o)
		const requests = 100 // more than are freed at a time
		var wg sync.WaitGroup
		for i := range requests {
			wg.Go(func() {
				words := strings.Repeat(fmt.Sprint("word", i, " "), 60)
				chat := `"max_tokens":5000,"messages":[{"role":"user","content":"` + words + `"}]`
				path, prompt := "/v1/completions", `"max_tokens":5000,"prompt":"`+words+`"`
				switch i % 5 {
				case 0:
					path, prompt = "/v1/chat/completions", chat
				case 1:
					path, prompt = "/v1/messages", `"system":"be kind",`+chat
				case 2:
					path, prompt = "/v1/responses", `"instructions":"be kind","max_output_tokens":5000,"input":"`+words+`"`
				case 3:
					path, prompt = "/inference/v1/generate", fmt.Sprintf(`"sampling_params":{"max_tokens":5000},"token_ids":[%d%s]`, i, strings.Repeat(",7", 60))
				}
				stream := fmt.Sprint(path != "/inference/v1/generate" && i%3 == 0)
				r, err := http.Post(x.url+path, "application/json", strings.NewReader("{"+prompt+`,"stream":`+stream+"}"))
				if err != nil {
					t.Error(err)
					return
				}
				defer r.Body.Close()
				if text, _ := io.ReadAll(r.Body); r.StatusCode != 400 || !strings.Contains(string(text), "maximum context length") {
					t.Errorf("%d %s", r.StatusCode, text)
				}
			})
		}
		wg.Wait()
		x.idle()
		testkit.Eventually(t, "no place is taken", func() bool { return x.proxy.Taken() == "" })
		if s := x.proxy.Stats(); s.Requests["bad_request"] != requests {
			t.Errorf("%v: %+v", dialect, s)
		}
	}
}

// Every answer of D that is no success frees P's KV, with a request that repeats nothing of the client's: D would refuse it again.
func TestFreeingRepeatsNothingOfTheClients(t *testing.T) {
	f := func(dialect proxy.Dialect, status int, text string) {
		t.Helper()
		var freed legs
		var asked atomic.Int64
		p := mock(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, `{"kv_transfer_params":{"a":1}}`) })
		computed := make(chan struct{})
		d := mock(t, func(w http.ResponseWriter, r *http.Request) {
			if asked.Add(1) > 1 {
				freed.note(r)
				fmt.Fprint(w, `{}`)
				return
			}
			if dialect == proxy.Mooncake {
				<-computed
			}
			w.Header().Set("Content-Type", "text/event-stream")
			w.WriteHeader(status)
			fmt.Fprint(w, text)
		})
		prefill := proxy.Prefill{URL: p}
		if dialect == proxy.Mooncake {
			prefill.Registry = mockRegistry(t, oneRank)
		}
		url, s := startProxy(t, proxy.Options{Dialect: dialect, Prefill: []proxy.Prefill{prefill}, Decode: []string{d}, Attempts: 1, HealthInterval: 10 * time.Millisecond})
		reach(t, url)
		time.AfterFunc(50*time.Millisecond, func() { close(computed) })
		post(t, url, `{"prompt":"a b c","bad":"field","logit_bias":{"x":1}}`)
		testkit.Eventually(t, "P is freed", func() bool { return s.Stats().Freed == 1 && s.Taken() == "" })
		bodies, _ := freed.all()
		if m := bodies[0]; m["bad"] != nil || m["logit_bias"] != nil || m["kv_transfer_params"] == nil || m["max_tokens"] != 1.0 || fmt.Sprint(m["prompt"]) != "[1]" {
			t.Errorf("%v, %d: D was asked for %v", dialect, status, m)
		}
	}
	for _, dialect := range []proxy.Dialect{proxy.Mooncake, proxy.NIXL, proxy.Mooncake013} {
		f(dialect, 400, `{"error":{}}`)
		f(dialect, 307, "elsewhere")
		f(dialect, 404, "")
		f(dialect, 422, `{"detail":[]}`)
		f(dialect, 500, "no")
		f(dialect, 200, "")
		f(dialect, 200, "data: {\"error\":{\"code\":500}}\n\n")
	}
}

// A D that had the whole request when the client left frees P's KV by itself, unless it ends before: then another D frees it.
func TestDEndsAfterTheClientHasLeft(t *testing.T) {
	f := func(dialect proxy.Dialect, ends, refused bool) {
		t.Helper()
		p := mock(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, `{"kv_transfer_params":{"a":1}}`) })
		asked := make(chan struct{}, 10)
		var offers, checks atomic.Int64
		d := func() string {
			var ending atomic.Bool
			mux := http.NewServeMux()
			mux.HandleFunc("/health", func(w http.ResponseWriter, _ *http.Request) {
				if checks.Add(1); ending.Load() {
					w.WriteHeader(http.StatusServiceUnavailable)
				}
			})
			mux.HandleFunc("POST /v1/completions", func(w http.ResponseWriter, r *http.Request) {
				if text, _ := io.ReadAll(r.Body); strings.Contains(string(text), `"prompt":[1]`) {
					if offers.Add(1); refused {
						w.WriteHeader(http.StatusInternalServerError)
					}
					fmt.Fprint(w, `{}`)
					return
				}
				ending.Store(ends)
				asked <- struct{}{}
				<-r.Context().Done()
			})
			return serveMux(t, mux)
		}
		o := proxy.Options{Dialect: dialect, Prefill: []proxy.Prefill{{URL: p}}, Decode: []string{d(), d()}, HealthInterval: 10 * time.Millisecond}
		if dialect == proxy.Mooncake {
			o.Prefill[0].Registry = mockRegistry(t, oneRank)
		}
		url, s := startProxy(t, o)
		reach(t, url)
		ctx, leave := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			r, _ := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", strings.NewReader(`{"prompt":"a b c"}`))
			if resp, err := http.DefaultClient.Do(r); err == nil {
				resp.Body.Close()
			}
		})
		<-asked
		testkit.Eventually(t, "P has computed", func() bool { return s.Taken() != "" && !strings.Contains(s.Taken(), p) })
		leave()
		wg.Wait()
		testkit.Eventually(t, "the request has ended", func() bool { return s.Stats().Requests["client_left"] == 1 })
		if ends && !refused {
			testkit.Eventually(t, "P is freed", func() bool { return s.Stats().Freed == 1 && s.Taken() == "" })
			return
		}
		if refused {
			testkit.Eventually(t, "P's KV is offered", func() bool { return offers.Load() > 0 })
		}
		before := checks.Load()
		testkit.Eventually(t, "many health checks have ended", func() bool { return checks.Load() >= before+30 })
		if got := s.Stats().Freed; got != 0 || offers.Load() > 1 || !refused && offers.Load() > 0 {
			t.Errorf("%v, ends %v, refused %v: P was freed %d times, and offered %d times", dialect, ends, refused, got, offers.Load())
		}
	}
	for _, dialect := range []proxy.Dialect{proxy.Mooncake, proxy.NIXL, proxy.Mooncake013} {
		f(dialect, true, false)
		f(dialect, true, true) // P does not know the transfer any more, so one D is asked, once
		f(dialect, false, false)
	}
}

// Frees beyond those that run at a time wait; none is dropped.
func TestNoFreeIsDropped(t *testing.T) {
	const requests = 150
	var asked, running, most, freed atomic.Int64
	begin := make(chan struct{})
	p := mock(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, `{"kv_transfer_params":{"a":1}}`) })
	d := mock(t, func(w http.ResponseWriter, r *http.Request) {
		if asked.Add(1); strings.Contains(r.Header.Get("X-Client"), "yes") {
			http.Error(w, "{}", 400)
			return
		}
		most.Store(max(most.Load(), running.Add(1)))
		<-begin
		running.Add(-1)
		freed.Add(1)
		fmt.Fprint(w, `{}`)
	})
	url, s := startProxy(t, proxy.Options{Dialect: proxy.NIXL, Prefill: []proxy.Prefill{{URL: p}}, Decode: []string{d}, HealthInterval: time.Hour})
	reach(t, url)
	for range requests {
		r, _ := http.NewRequest(http.MethodPost, url+"/v1/completions", strings.NewReader(`{"prompt":"a"}`))
		r.Header.Set("X-Client", "yes")
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
	}
	testkit.Eventually(t, "frees run", func() bool { return running.Load() == 64 })
	close(begin)
	testkit.Eventually(t, "all are freed", func() bool { return freed.Load() == requests && s.Stats().Freed == requests })
	if most.Load() > 64 {
		t.Errorf("%d at a time", most.Load())
	}
}

// P's part keeps the fields that both engines refuse, so P refuses it and computes nothing.
func TestPRefusesWhatDRefuses(t *testing.T) {
	x := deploy(t, 1, 0)
	for _, more := range []string{`"max_tokens":0`, `"max_tokens":-1`, `"max_completion_tokens":0`, `"max_tokens":2,"min_tokens":3`, `"stream_options":{"include_usage":true}`, `"max_tokens":"x"`, `"stream":"x"`} {
		if status, text, _ := post(t, x.url, fmt.Sprintf(`{"prompt":%q,%s}`, strings.Repeat("word ", 100), more)); status != 400 {
			t.Errorf("%s: %d %s", more, status, text)
		}
	}
	x.idle()
	if n := x.p[0].Stats().Finished; n != 0 {
		t.Errorf("P has computed %d prompts", n)
	}
}

// The proxy asks D to free P's KV with the client's credentials where those are for the engines, and never with credentials that are for
// the proxy.
func TestFreeingHasTheClientsCredentials(t *testing.T) {
	f := func(dialect proxy.Dialect, o proxy.Options, want string) {
		t.Helper()
		var freed legs
		var asked atomic.Int64
		computed := make(chan struct{})
		p := mock(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, `{"kv_transfer_params":{"a":1}}`) })
		d := mock(t, func(w http.ResponseWriter, r *http.Request) {
			if asked.Add(1) > 1 {
				freed.note(r)
				return
			}
			if dialect == proxy.Mooncake {
				<-computed
			}
			http.Error(w, "{}", 400)
		})
		o.Dialect, o.Prefill, o.Decode, o.HealthInterval = dialect, []proxy.Prefill{{URL: p}}, []string{d}, 10*time.Millisecond
		if dialect == proxy.Mooncake {
			o.Prefill[0].Registry = mockRegistry(t, oneRank)
		}
		url, s := startProxy(t, o)
		reach(t, url)
		time.AfterFunc(50*time.Millisecond, func() { close(computed) })
		ask(t, url+"/v1/completions", `{"prompt":"a"}`, "Authorization", "Bearer s", "X-Api-Key", "s", "X-Other", "1")
		testkit.Eventually(t, "P is freed", func() bool { return s.Stats().Freed == 1 && s.Taken() == "" })
		_, heads := freed.all()
		if h := heads[0]; h.Get("Authorization")+" "+h.Get("X-Api-Key") != want || h.Get("X-Other") != "" {
			t.Errorf("%v %+v: D was asked with %v", dialect, o, h)
		}
	}
	for _, dialect := range []proxy.Dialect{proxy.Mooncake, proxy.NIXL, proxy.Mooncake013} {
		f(dialect, proxy.Options{}, "Bearer s s")
		f(dialect, proxy.Options{EngineKey: "engines"}, "Bearer engines ")
		f(dialect, proxy.Options{Keys: keyFile(t, keyLine("ada", "s", ""))}, " ")
		f(dialect, proxy.Options{Keys: keyFile(t, keyLine("ada", "s", "")), EngineKey: "engines"}, "Bearer engines ")
	}
}

// A P that answered 200 has computed the prompt: it is freed, also if its answer is too long, cut or no JSON.
func TestPIsFreedWhoseAnswerCannotBeRead(t *testing.T) {
	f := func(answer string, length int) {
		t.Helper()
		var freed, asked legs
		p := mock(t, func(w http.ResponseWriter, r *http.Request) {
			asked.note(r)
			if length > 0 {
				w.Header().Set("Content-Length", fmt.Sprint(length))
			}
			_, _ = io.WriteString(w, answer)
		})
		d := mock(t, func(w http.ResponseWriter, r *http.Request) {
			if m := (&legs{}).note(r); m["max_tokens"] == 1.0 {
				freed.Lock()
				freed.bodies = append(freed.bodies, m)
				freed.Unlock()
				return
			}
			<-r.Context().Done()
		})
		url, s := startProxy(t, proxy.Options{Prefill: []proxy.Prefill{{URL: p, Registry: mockRegistry(t, oneRank)}}, Decode: []string{d}, Attempts: 1, HealthInterval: time.Hour})
		reach(t, url)
		if status, text, _ := post(t, url, `{"prompt":"a","max_tokens":9}`); status != 503 {
			t.Errorf("%.20q: %d %s", answer, status, text)
		}
		testkit.Eventually(t, "P is freed", func() bool { return s.Stats().Freed == 1 && s.Taken() == "" })
		toP, _ := asked.all()
		toD, _ := freed.all()
		if transferOf(toP[0]) != transferOf(toD[0]) {
			t.Errorf("%.20q: P has %v, D took %v", answer, transferOf(toP[0]), transferOf(toD[0]))
		}
	}
	f("{", 0)
	f("[]", 0)
	f("", 0)
	f(`{"a":1}`, 100)
	f(`{"a":"`+strings.Repeat("x", 9<<20)+`"}`, 0)
}
