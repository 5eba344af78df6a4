// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"bufio"
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
	"github.com/kvasir-kv/kvasir/sim/kvmem"
)

// The server's limits on reading a request and on writing to a client that does not read do not limit
// the length of a stream, nor the time of a client that waits for a whole answer.
func TestAnswersLongerThanTheServersTimeouts(t *testing.T) {
	e, err := engine.Open(t.Context(), engine.Options{
		MaxModel: 512, StepTime: 20 * time.Millisecond,
		KV: kvmem.Geometry{Layers: 1, Heads: 2, HeadBytes: 8, BlockTokens: 16, Blocks: 200},
	})
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(api.New(e, api.Options{}))
	s.Config.ReadTimeout, s.Config.WriteTimeout = 300*time.Millisecond, 400*time.Millisecond
	s.Start()
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		s.Close()
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	last := time.Now() // when the server's limits began to run
	f := func(stream bool) {
		t.Helper()
		for range 2 { // the second on the same connection
			var r *http.Response
			testkit.Eventually(t, "the request is read in time", func() bool { // on a busy machine it may be late for ReadTimeout
				r, err = http.Post(s.URL+"/v1/completions", "application/json", strings.NewReader(fmt.Sprintf(`{"prompt":"a b","max_tokens":40,"stream":%v}`, stream)))
				if took := time.Since(last); err != nil && took < s.Config.ReadTimeout {
					t.Fatalf("stream %v: after %v: %v", stream, took, err)
				}
				last = time.Now()
				return err == nil
			})
			text, err := io.ReadAll(r.Body)
			r.Body.Close()
			if err != nil || !strings.Contains(string(text), `"finish_reason":"length"`) {
				t.Fatalf("stream %v: %d bytes, %v", stream, len(text), err)
			}
			last = time.Now()
		}
	}
	f(true)
	f(false)
	if s := e.Stats(); s.Finished != 4 || s.Aborted != 0 {
		t.Fatalf("%+v", s)
	}
}

// Numbers at the ends of their types are refused, and the error says what is allowed. None of them makes a
// request that never ends.
func TestNumbersAtTheEndsOfTheirTypes(t *testing.T) {
	e, url := serve(t, engine.Options{})
	for _, path := range []string{"/v1/completions", "/v1/chat/completions"} {
		for _, field := range []string{"max_tokens", "max_completion_tokens"} {
			for _, n := range []string{"9223372036854775807", "9223372036854775806", "9223372036854775808", "1e30", "-9223372036854775808", "0", "1.5", "false", `"0"`, `"1.5"`, `"4e0"`, `"x"`, "[]"} {
				body := fmt.Sprintf(`{"prompt":"a b c","messages":[{"role":"user","content":"a"}],%q:%s}`, field, n)
				if status, text := post(t, url+path, body); status != 400 {
					t.Errorf("%s %s %s: %d %.150s", path, field, n, status, text)
				}
			}
		}
	}
	for _, n := range []string{"4.0", "4e0", `"4"`, `" +4 "`, `"4.0"`} { // as vLLM 0.32 takes them
		for _, stream := range []string{"true", "1", "1.0", `"true"`, `"Yes"`, `"on"`, "false", "0", `"off"`, "null"} {
			status, text := post(t, url+"/v1/completions", fmt.Sprintf(`{"prompt":"a b c","max_tokens":%s,"stream":%s}`, n, stream))
			streams := slices.Contains([]string{"true", "1", "1.0", "Yes", "on"}, strings.Trim(stream, `"`))
			if status != 200 || strings.HasPrefix(string(text), "data: ") != streams {
				t.Errorf("max_tokens %s, stream %s: %d %.150s", n, stream, status, text)
			}
		}
	}
	for _, stream := range []string{"2", `"x"`, `" true"`, "[]", "1.5"} {
		if status, text := post(t, url+"/v1/completions", fmt.Sprintf(`{"prompt":"a b c","stream":%s}`, stream)); status != 400 {
			t.Errorf("stream %s: %d %.150s", stream, status, text)
		}
	}
	for _, prompt := range []string{"[null]", "[[1,null]]", "[[null]]", "[1,null,2]", "[-1]", "[4294967296]", "[1.5]", "[true]", "[[[1]]]", "{}", "null", "true", "1"} {
		if status, text := post(t, url+"/v1/completions", fmt.Sprintf(`{"prompt":%s,"max_tokens":1}`, prompt)); status != 400 {
			t.Errorf("prompt %s: %d %.150s", prompt, status, text)
		}
	}
	for _, messages := range []string{"[null]", "[{}]", `[{"role":null}]`, `[{"role":"user","content":7}]`, `[{"role":"user","content":[7]}]`, "null", "{}", `[[]]`} {
		if status, text := post(t, url+"/v1/chat/completions", fmt.Sprintf(`{"messages":%s,"max_tokens":1}`, messages)); status != 400 {
			t.Errorf("messages %s: %d %.150s", messages, status, text)
		}
	}
	for _, body := range []string{
		`{"prompt":"a","max_tokens":1,"kv_transfer_params":null,"stream_options":null,"n":null,"cache_salt":null,"request_id":null}`,
		"{\"prompt\":\"a\xff\xfe b\",\"max_tokens\":1}",
	} {
		if status, text := post(t, url+"/v1/completions", body); status != 200 {
			t.Errorf("%q: %d %.150s", body, status, text)
		}
	}
	if status, text := post(t, url+"/v1/chat/completions", `{"messages":[{"role":"user","content":null},{"role":"assistant"}],"max_tokens":1}`); status != 200 {
		t.Errorf("contents of null: %d %s", status, text)
	}
	if s := e.Stats(); s.Running+s.Waiting != 0 || s.Free != s.Blocks {
		t.Fatalf("%+v", s)
	}
}

// With ids that clients choose, the second request of an id is refused and the first continues.
func TestTwoRequestsOfOneID(t *testing.T) {
	for step := 10 * time.Millisecond; !secondOfOneIDIsRefused(t, step); step *= 2 {
	}
}

// secondOfOneIDIsRefused reports whether the second request came while the first one ran. It fails the test unless it was refused then.
func secondOfOneIDIsRefused(t *testing.T, step time.Duration) bool {
	t.Helper()
	e, err := engine.Open(t.Context(), engine.Options{
		MaxModel: 512, StepTime: step,
		KV: kvmem.Geometry{Layers: 1, Heads: 2, HeadBytes: 8, BlockTokens: 16, Blocks: 200},
	})
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewServer(api.New(e, api.Options{SameIDs: true}))
	defer func() {
		http.DefaultClient.CloseIdleConnections()
		s.Close()
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}()
	body := `{"prompt":"a b","max_tokens":60,"stream":true,"request_id":"one"}`
	first, err := http.Post(s.URL+"/v1/completions", "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer first.Body.Close()
	r := bufio.NewReader(first.Body)
	if line, err := r.ReadString('\n'); err != nil || !strings.HasPrefix(line, "data: ") {
		t.Fatal(line, err)
	}
	status, text := post(t, s.URL+"/v1/completions", body)
	if status == 200 && step < 160*time.Millisecond && e.Stats().Finished == 2 {
		return false // the first one had ended
	}
	if status != 400 || !strings.Contains(string(text), "already running") {
		t.Fatalf("%d %s", status, text)
	}
	rest, err := io.ReadAll(r)
	if err != nil || !strings.Contains(string(rest), `"finish_reason":"length"`) {
		t.Fatalf("%s, %v", rest, err)
	}
	return true
}
