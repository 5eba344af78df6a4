// SPDX-License-Identifier: Apache-2.0

package workload_test

import (
	"errors"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
)

func TestReadTrace(t *testing.T) {
	const good = `{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [7, 8]}

{"timestamp": 3, "input_length": 1024, "hash_ids": [7, 9]}
`
	if got, err := workload.ReadTrace(strings.NewReader("\r\n \t\n"+strings.ReplaceAll(good, "\n", " \r\n")+"  "), workload.TraceOptions{}); err != nil || len(got) != 2 {
		t.Errorf("lines of blanks: %d requests, %v", len(got), err)
	}
	got, err := workload.ReadTrace(strings.NewReader(good), workload.TraceOptions{})
	if err != nil || len(got) != 2 || got[0].Output != 5 || got[1].Arrival != 3*time.Millisecond || got[1].Conversation != 1 {
		t.Fatalf("%+v, %v", got, err)
	}
	a, b := got[0].Tokens(), got[1].Tokens()
	if len(a) != 700 || len(b) != 1024 || !slices.Equal(a[:512], b[:512]) || slices.Equal(a[512:700], b[512:700]) {
		t.Error("equal blocks, and only those, have equal tokens")
	}
	if got, err := workload.ReadTrace(strings.NewReader(good), workload.TraceOptions{Max: 1}); err != nil || len(got) != 1 {
		t.Errorf("%d requests, %v, want 1", len(got), err)
	}
	labelled := `{"t": 1.5, "in": 20, "out": 3, "h": [1, 2]}`
	got, err = workload.ReadTrace(strings.NewReader(labelled), workload.TraceOptions{
		BlockTokens: 16, Seconds: 1, Timestamp: "t", InputLength: "in", OutputLength: "out", HashIDs: "h",
	})
	if err != nil || got[0].Arrival != 1500*time.Millisecond || len(got[0].Tokens()) != 20 || got[0].Output != 3 {
		t.Fatalf("%+v, %v", got, err)
	}
	f := func(line, names string) {
		t.Helper()
		_, err := workload.ReadTrace(strings.NewReader(good+line), workload.TraceOptions{})
		if !errors.Is(err, workload.ErrTrace) || !strings.Contains(err.Error(), "line 4") || !strings.Contains(err.Error(), names) {
			t.Errorf("%.100q: %v", line, err)
		}
		if text := err.Error(); strings.Contains(text, "Go ") || strings.Contains(text, "json:") || len(text) > 200 {
			t.Errorf("%.100q: %.300v: in words of Go, or too long", line, err)
		}
	}
	f("not json", "not json is no JSON object")
	f("[1]", "no JSON object")
	f("null", "no JSON object")
	f(strings.Repeat("x", 5000), "no JSON object")
	f(`{"input_length": "512", "hash_ids": [1]}`, `input_length is "512", a whole number is expected`)
	f(`{"input_length": 1.5, "hash_ids": [1]}`, "input_length is 1.5, a whole number is expected")
	f(`{"input_length": null, "hash_ids": [1]}`, "input_length is null, a whole number is expected")
	f(`{"input_length": 1, "hash_ids": 1}`, "hash_ids is 1, a list of whole numbers is expected")
	f(`{"input_length": 1, "hash_ids": ["a"]}`, `hash_ids is ["a"], a list of whole numbers is expected`)
	f(`{"input_length": 1, "hash_ids": [1], "timestamp": "noon"}`, `timestamp is "noon", a number is expected`)
	f(`{"input_length": 1, "hash_ids": [1], "output_length": {}}`, "output_length is {}, a whole number is expected")
	f("{}", "input_length is missing")
	f(`{"input_length": 0, "hash_ids": []}`, "input_length 0")
	f(`{"input_length": -5, "hash_ids": []}`, "input_length -5")
	f(`{"input_length": 513, "hash_ids": [1]}`, "1 hash_ids for input_length 513: 2 of 512 tokens are expected")
	f(`{"input_length": 1e12, "hash_ids": [1]}`, "input_length")
	f(`{"input_length": 4000000000, "hash_ids": [1]}`, "")
	f(`{"input_length": 1, "hash_ids": [1], "timestamp": -1}`, "timestamp")
	f(`{"input_length": 1, "hash_ids": [1], "output_length": -1}`, "output_length")
	f(strings.Repeat("x", 5<<20), "is longer than")
	if _, err := workload.ReadTrace(strings.NewReader(""), workload.TraceOptions{}); !errors.Is(err, workload.ErrTrace) {
		t.Error(err)
	}
}

// The production hour, where it is at hand.
func TestProductionTrace(t *testing.T) {
	f, err := os.Open("../../../shared/traces/conversation_trace.jsonl")
	if err != nil {
		t.Skip("no production trace beside the repository")
	}
	defer f.Close()
	got, err := workload.ReadTrace(f, workload.TraceOptions{})
	if err != nil || len(got) != 12031 {
		t.Fatalf("%d requests, %v", len(got), err)
	}
}

func TestReadShareGPT(t *testing.T) {
	text := `[{"id":"a","conversations":[{"from":"human","value":"How do I bake bread at home?"},{"from":"gpt","value":"Take flour, water, salt."}]},
		{"conversations":[{"from":"human","value":"alone, without an answer"}]},
		{"conversations":[{"from":"human","value":"hi"},{"from":"gpt","value":"too short a question"}]}]`
	got, err := workload.ReadShareGPT(strings.NewReader(text), 0, nil)
	if err != nil || len(got) != 1 || got[0].Input != 7 || got[0].Output != 6 || !strings.HasPrefix(got[0].Text, "How do I") {
		t.Fatalf("%+v, %v", got, err)
	}
	for _, bad := range []string{"", "{}", "[]", `[{"conversations":3}]`, `[{"conversations":[{"value":3}]}]`} {
		if _, err := workload.ReadShareGPT(strings.NewReader(bad), 0, nil); !errors.Is(err, workload.ErrTrace) || strings.Contains(err.Error(), "Go ") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// One seed, one workload; another seed, another one.
func TestSeeds(t *testing.T) {
	a, b, c := workload.Chats(50, workload.ChatOptions{Seed: 1}), workload.Chats(50, workload.ChatOptions{Seed: 1}), workload.Chats(50, workload.ChatOptions{Seed: 2})
	same := 0
	for i := range a {
		if !slices.Equal(a[i].Tokens(), b[i].Tokens()) || a[i].Output != b[i].Output {
			t.Fatal("the same seed gives another workload")
		}
		if slices.Equal(a[i].Blocks, c[i].Blocks) {
			same++
		}
	}
	if len(a) != 50 || same == len(a) {
		t.Fatalf("%d requests, %d as with another seed", len(a), same)
	}
	r, err := workload.Random(100, 1000, 50, 0.5, 3)
	if err != nil {
		t.Fatal(err)
	}
	low, high := 1000, 0
	for i := range r {
		low, high = min(low, r[i].Input), max(high, r[i].Input)
		if len(r[i].Tokens()) != r[i].Input || r[i].Output < 25 || r[i].Output > 75 {
			t.Fatalf("%+v", r[i])
		}
	}
	if low < 500 || high > 1500 || high-low < 500 || slices.Equal(r[0].Tokens()[:100], r[1].Tokens()[:100]) {
		t.Fatalf("prompts of %d to %d tokens", low, high)
	}
	if _, err := workload.Random(1, 0, 0, 0, 1); err == nil {
		t.Fatal("empty prompts")
	}
}

// A later turn begins with the whole turn before it.
func TestChatsGrow(t *testing.T) {
	last := map[int]workload.Request{}
	turns := 0
	for _, r := range workload.Chats(200, workload.ChatOptions{}) {
		if p, ok := last[r.Conversation]; ok {
			turns++
			if r.Turn != p.Turn+1 || len(r.Blocks) <= len(p.Blocks) || !slices.Equal(r.Blocks[:len(p.Blocks)], p.Blocks) {
				t.Fatalf("%+v after %+v", r, p)
			}
		}
		last[r.Conversation] = r
	}
	if turns < 50 {
		t.Fatalf("%d later turns", turns)
	}
}

// The gaps have the asked mean; a small burstiness makes them uneven.
func TestArrive(t *testing.T) {
	f := func(rate, burstiness, wantVariation float64) {
		t.Helper()
		r, err := workload.Random(20000, 10, 0, 0, 1)
		if err != nil {
			t.Fatal(err)
		}
		if err := workload.Arrive(r, rate, burstiness, 5); err != nil {
			t.Fatal(err)
		}
		var sum, squares, before float64
		for i := range r {
			gap := r[i].Arrival.Seconds() - before
			before = r[i].Arrival.Seconds()
			sum, squares = sum+gap, squares+gap*gap
		}
		mean := sum / float64(len(r))
		variation := math.Sqrt(squares/float64(len(r))-mean*mean) / mean
		if math.Abs(mean*rate-1) > 0.05 || math.Abs(variation/wantVariation-1) > 0.1 {
			t.Errorf("rate %v, burstiness %v: mean gap %v s, variation %v", rate, burstiness, mean, variation)
		}
	}
	f(10, 1, 1)
	f(4, 0.25, 2)
	f(100, 100, 0.1)
	r := make([]workload.Request, 3)
	if err := workload.Arrive(r, math.Inf(1), 1, 1); err != nil || r[2].Arrival != 0 {
		t.Error(r, err)
	}
	for _, bad := range [][2]float64{{0, 1}, {-1, 1}, {1, 0}, {math.NaN(), 1}, {1e-300, 1}} {
		if workload.Arrive(r, bad[0], bad[1], 1) == nil {
			t.Errorf("%v is accepted", bad)
		}
	}
}

func FuzzReadTrace(f *testing.F) {
	f.Add(`{"timestamp": 0, "input_length": 700, "hash_ids": [7, 8]}`)
	f.Add("{}\n\n{}")
	f.Fuzz(func(t *testing.T, s string) {
		got, err := workload.ReadTrace(strings.NewReader(s), workload.TraceOptions{Max: 4})
		if err == nil && (len(got) == 0 || len(got) > 4) {
			t.Fatalf("%d requests", len(got))
		}
	})
}

func FuzzReadShareGPT(f *testing.F) {
	f.Add(`[{"conversations":[{"from":"human","value":"How do I bake bread?"},{"from":"gpt","value":"Take flour, water."}]}]`)
	f.Fuzz(func(t *testing.T, s string) {
		got, err := workload.ReadShareGPT(strings.NewReader(s), 4, nil)
		if err == nil && (len(got) == 0 || len(got) > 4) {
			t.Fatalf("%d requests", len(got))
		}
	})
}
