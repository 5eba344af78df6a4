// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Answers of real engines are compared by tokens and log-probabilities: what rounding explains is no difference, everything else is one.
func TestDiffer(t *testing.T) {
	want := []chosen{{"a", -1}, {"b", -2}, {"c", -3}}
	for _, c := range []struct {
		name string
		got  []chosen
		what string
	}{
		{"the same", []chosen{{"a", -1.001}, {"b", -2}, {"c", -3}}, ""},
		{"two tokens that are equally likely, and another rest", []chosen{{"a", -1}, {"x", -2.001}, {"y", -9}}, ""},
		{"another token", []chosen{{"a", -1}, {"x", -2.5}, {"c", -3}}, `token 1 is "x"`},
		{"the same token, far less likely", []chosen{{"a", -1}, {"b", -2.5}, {"c", -3}}, "token 1, \"b\", has"},
		{"too few", want[:2], "2 tokens, want 3"},
		{"none", nil, "0 tokens, want 3"},
	} {
		if got := differ(c.got, want); c.what == "" && got != "" || !strings.Contains(got, c.what) {
			t.Errorf("%s: %q, want %q", c.name, got, c.what)
		}
	}
}

// The tokens of an answer, and those of a stream's events, are gathered by choice.
func TestTokensOfAnswers(t *testing.T) {
	one := judge(http.StatusOK, []byte(`{"choices":[{"text":"ab","logprobs":{"tokens":["a","b"],"token_logprobs":[-1,-2]}}]}`))
	stream := readStream(strings.NewReader(`data: {"choices":[{"text":"a","logprobs":{"tokens":["a"],"token_logprobs":[-1]}}]}
data: {"choices":[{"text":"b","logprobs":{"tokens":["b"],"token_logprobs":[-2]}}]}
data: {"choices":[],"usage":{"prompt_tokens":7}}
data: [DONE]
`))
	for _, o := range []outcome{one, stream} {
		if what := differ(o.tokens[0], []chosen{{"a", -1}, {"b", -2}}); o.kind != "ok" || o.texts[0] != "ab" || what != "" || len(o.tokens[0]) != 2 {
			t.Errorf("%+v: %s", o, what)
		}
	}
	if stream.usage.Prompt != 7 {
		t.Errorf("a stream of %d prompt tokens", stream.usage.Prompt)
	}
}

// Where engines are real, faults whose failures would be theirs are left out, and one that has just started is not ended again.
func TestSpared(t *testing.T) {
	o := options{real: "python", redis: none, store: none, master: none}
	s := soak{o: &o, variant: variant{"real", 1, 1, false}}
	s.parts = makeParts(&o, s.variant)
	started, rested := s.part("p1"), s.part("d1")
	started.mu.began, rested.mu.began = time.Now(), time.Now().Add(-realRest)
	for _, c := range []struct {
		p      *part
		f      fault
		spared bool
	}{
		{nil, fault{Kind: "late", Target: "h1"}, true},
		{nil, fault{Kind: "slow", Target: "h2"}, true},
		{nil, fault{Kind: "slow", Target: "r"}, false},
		{nil, fault{Kind: "leave", Target: "clients"}, true},
		{nil, fault{Kind: "cut", Target: "h1"}, false},
		{started, fault{Kind: "kill", Target: "p1"}, true},
		{started, fault{Kind: "stop", Target: "p1"}, false},
		{rested, fault{Kind: "kill", Target: "d1"}, false},
		{rested, fault{Kind: "swap", Target: "d1"}, true},
		{s.part("node1"), fault{Kind: "kill", Target: "node1"}, false},
		{s.part("relay"), fault{Kind: "clock", Target: "relay"}, false},
	} {
		if err := s.spared(c.p, c.f); (err != nil) != c.spared {
			t.Errorf("%v: %v, want that it is left out: %v", c.f, err, c.spared)
		}
		o.real = ""
		if err := s.spared(c.p, c.f); err != nil {
			t.Errorf("%v is left out with simulated engines: %v", c.f, err)
		}
		o.real = "python"
	}
}

// A real engine is asked by HTTP whether it is well, and its log is its own.
func TestRealEngineIsAnotherProgram(t *testing.T) {
	well := true
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if !well {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	defer server.Close()
	p := realPart(&options{real: "python", dir: t.TempDir()}, "p1", "p", "h1", pPort, "{}")
	p.health, p.log = server.URL, filepath.Join(t.TempDir(), "log")
	if err := os.WriteFile(p.log, []byte("fatal error: of a library\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := p.well(t.Context()); err != nil {
		t.Error(err)
	}
	well = false
	if err := p.well(t.Context()); err == nil {
		t.Error("an engine that answers 503 is well")
	}
	if err := p.scan(); err != nil {
		t.Error(err)
	}
}

// The load's tokens become words of the real model's vocabulary, different ones mostly different.
func TestVocabulary(t *testing.T) {
	got := vocabulary([]uint32{0, 1, realTokens - 1, realTokens, 1 << 31})
	for i, token := range got {
		if token < realTokenFirst || token >= realTokenFirst+realTokens {
			t.Errorf("token %d is %d", i, token)
		}
	}
	if got[0] == got[1] || got[0] == got[2] {
		t.Errorf("%v", got)
	}
}
