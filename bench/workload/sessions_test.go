// SPDX-License-Identifier: Apache-2.0

package workload_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
)

// aiperfVector is what interop/bench/sessions.py records.
type aiperfVector struct {
	AIPerf string
	Block  int `json:"block_tokens"`
	Turns  []struct {
		Session   string
		Turn      int
		Timestamp *float64
		Delay     *float64
		Output    int
		Mode      string
		Input     int
		Blocks    []int
	}
	Refused []bool
}

func readVector(t *testing.T) (v aiperfVector) {
	t.Helper()
	raw, err := os.ReadFile("testdata/aiperf/vector.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(raw, &v); err != nil || v.AIPerf != "0.13.0" || len(v.Turns) == 0 {
		t.Fatalf("%+v, %v", v, err)
	}
	return v
}

// Sessions become the same prompts as in AIPerf's own loader: with as many tokens, equal blocks where AIPerf has equal blocks, and the same times.
func TestSessionsAreAIPerfs(t *testing.T) {
	v := readVector(t)
	file, err := os.ReadFile("testdata/aiperf/sessions.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	list, err := workload.ReadTrace(bytes.NewReader(file), workload.TraceOptions{BlockTokens: v.Block, Format: workload.FormatAIPerf})
	if err != nil || len(list) != len(v.Turns) {
		t.Fatalf("%d requests of %d, %v", len(list), len(v.Turns), err)
	}
	type turn struct {
		session string
		number  int
	}
	byTurn, alone := make(map[turn]*workload.Request), 0
	for i, line := range strings.Split(strings.TrimSpace(string(file)), "\n") {
		var s struct {
			Session string `json:"session_id"`
		}
		if err := json.Unmarshal([]byte(line), &s); err != nil {
			t.Fatal(err)
		}
		if s.Session == "" {
			byTurn[turn{"", alone}] = &list[i]
			alone++
			continue
		}
		byTurn[turn{s.Session, list[i].Turn}] = &list[i]
	}
	type link struct {
		before int
		name   int64
	}
	ours, theirs, last, alone := make(map[link]int), make(map[int]int), map[string]*workload.Request{}, 0
	for _, want := range v.Turns {
		at := turn{want.Session, want.Turn}
		if want.Session == "" {
			at.number = alone
			alone++
		}
		q := byTurn[at]
		if q == nil {
			t.Fatalf("%+v is missing", at)
		}
		if before := last[want.Session]; before != nil && want.Session != "" && q.Conversation != before.Conversation {
			t.Errorf("%+v is of another conversation", at)
		}
		last[want.Session] = q
		if want.Timestamp != nil && q.Arrival != time.Duration(*want.Timestamp*1e6) {
			t.Errorf("%+v comes at %v, AIPerf's at %v ms", at, q.Arrival, *want.Timestamp)
		}
		if delay := want.Delay; delay != nil && q.Pause != time.Duration(*delay*1e6) {
			t.Errorf("%+v comes %v after the turn before it, AIPerf's %v ms", at, q.Pause, *delay)
		}
		if q.Output != want.Output {
			t.Errorf("%+v: %d tokens to generate, AIPerf has %d", at, q.Output, want.Output)
		}
		if want.Mode != "" {
			continue
		}
		if q.Input != want.Input || len(q.Blocks) != len(want.Blocks) {
			t.Errorf("%+v: %d tokens in %d blocks, AIPerf has %d in %d", at, q.Input, len(q.Blocks), want.Input, len(want.Blocks))
			continue
		}
		node := 0
		for i, name := range q.Blocks {
			l := link{node, name}
			if ours[l] == 0 {
				ours[l] = len(ours) + 1
			}
			node = ours[l]
			if theirs[want.Blocks[i]] == 0 {
				theirs[want.Blocks[i]] = node
			}
			if theirs[want.Blocks[i]] != node {
				t.Errorf("%+v, block %d: equal to another one for AIPerf only", at, i)
			}
		}
	}
	if len(ours) != len(theirs) {
		t.Errorf("%d different blocks, AIPerf has %d", len(ours), len(theirs))
	}
}

// Messages and payloads are whole prompts: a turn begins with the turn before it as far as their texts are equal.
func TestSessionsOfWholePrompts(t *testing.T) {
	file, err := os.ReadFile("testdata/aiperf/sessions.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	list, err := workload.ReadTrace(bytes.NewReader(file), workload.TraceOptions{BlockTokens: 16, Format: workload.FormatAIPerf})
	if err != nil {
		t.Fatal(err)
	}
	m, p := list[11:13], list[13:15]
	for _, turns := range [][]workload.Request{m, p} {
		full := turns[0].Input / 16
		if full < 1 || turns[1].Input <= turns[0].Input || !slices.Equal(turns[0].Blocks[:full], turns[1].Blocks[:full]) || turns[1].Turn != 1 {
			t.Errorf("%+v", turns)
		}
	}
	if want := 17; p[0].Input != want { // 67 bytes of text
		t.Errorf("a prompt of %d tokens, want %d", p[0].Input, want)
	}
}

// Lines that AIPerf's loader refuses are refused here, with the line number and a reason; so are turns that cannot be played.
func TestSessionsThatAreRefused(t *testing.T) {
	v := readVector(t)
	file, err := os.ReadFile("testdata/aiperf/bad.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	read := func(text string) error {
		_, err := workload.ReadTrace(strings.NewReader(text), workload.TraceOptions{BlockTokens: 16, Format: workload.FormatAIPerf})
		return err
	}
	for i, line := range strings.Split(strings.TrimSpace(string(file)), "\n") {
		number := "line 1: "
		if strings.HasPrefix(line, "[") {
			var lines []json.RawMessage
			if err := json.Unmarshal([]byte(line), &lines); err != nil {
				t.Fatal(err)
			}
			line, number = string(lines[0])+"\n"+string(lines[1]), "line 2: "
		}
		switch err := read(line); {
		case !v.Refused[i]:
			t.Errorf("AIPerf takes %s", line)
		case !errors.Is(err, workload.ErrTrace) || !strings.Contains(err.Error(), number) || strings.Contains(err.Error(), "json:") || len(err.Error()) > 200:
			t.Errorf("%s: %v", line, err)
		}
	}
	f := func(line, want string) {
		t.Helper()
		if err := read(line); !errors.Is(err, workload.ErrTrace) || !strings.Contains(err.Error(), "line 1: ") || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", line, err)
		}
	}
	f(`{"session_id": "x", "input_length": 3, "delay": -1}`, "delay -1 is no time")
	f(`{"session_id": "x", "input_length": 3, "timestamp": -1}`, "timestamp -1 is no time")
	f(`{"session_id": "x", "input_length": 3, "output_length": -1}`, "output_length -1 is outside")
	f(`{"session_id": "x", "input_length": 3000000}`, "input_length 3000000 is outside")
	f(`{"session_id": "x", "text_input": ""}`, "a prompt of 0 tokens")
	f(`{"session_id": "x"}`, "0 of input_length, text_input, messages and payload")
}

// A turn arrives at its timestamp, or its pause after the estimated end of the turn before it.
func TestSessionsTakeTime(t *testing.T) {
	const lines = `{"session_id": "a", "timestamp": 1000, "input_length": 5, "output_length": 50}
{"session_id": "a", "delay": 500, "input_length": 5}
{"session_id": "a", "timestamp": 100, "input_length": 5}
{"session_id": "a", "timestamp": 9000, "delay": 7, "input_length": 5}
`
	f := func(token time.Duration, want ...time.Duration) {
		t.Helper()
		list, err := workload.ReadTrace(strings.NewReader(lines), workload.TraceOptions{TokenTime: token})
		if err != nil {
			t.Fatal(err)
		}
		for i, at := range want {
			if list[i].Arrival != at*time.Millisecond {
				t.Errorf("turn %d comes at %v, want %d ms", i, list[i].Arrival, at)
			}
		}
	}
	f(0, 1000, 1500, 1500, 9000)
	f(20*time.Millisecond, 1000, 2500, 2500, 9000)
	f(math.MaxInt64, 1000)
}

// vLLM's timed traces: a prompt ends with its last hash id, and all keys are needed.
func TestTimedTrace(t *testing.T) {
	o := workload.TraceOptions{Format: workload.FormatTimed, BlockTokens: 16, Seconds: 1}
	read := func(line string) ([]workload.Request, error) { return workload.ReadTrace(strings.NewReader(line), o) }
	got, err := read(`{"timestamp": 1.5, "input_length": 100, "output_length": 3, "hash_ids": [1, 2]}`)
	if err != nil || got[0].Input != 32 || len(got[0].Tokens()) != 32 || got[0].Arrival != 1500*time.Millisecond {
		t.Errorf("%+v, %v", got, err)
	}
	if got, err = read(`{"timestamp": 1.5, "input_length": 20, "output_length": 3, "hash_ids": [1, 2]}`); err != nil || got[0].Input != 20 {
		t.Errorf("%+v, %v", got, err)
	}
	f := func(line, want string) {
		t.Helper()
		if _, err := read(line); !errors.Is(err, workload.ErrTrace) || !strings.Contains(err.Error(), "line 1: "+want) {
			t.Errorf("%s: %v", line, err)
		}
	}
	f(`{"input_length": 20, "output_length": 3, "hash_ids": [1, 2]}`, "timestamp is missing")
	f(`{"timestamp": null, "input_length": 20, "output_length": 3, "hash_ids": [1, 2]}`, "timestamp is null")
	f(`{"timestamp": 1, "input_length": 20, "hash_ids": [1, 2]}`, "output_length is missing")
	f(`{"timestamp": 1, "input_length": 20, "output_length": 3, "hash_ids": []}`, "0 hash_ids for input_length 20")
	f(`{"timestamp": 1, "input_length": 20, "output_length": 3, "hash_ids": [1, 2, 3]}`, "3 hash_ids for input_length 20")
	if _, err := workload.ReadTrace(strings.NewReader("{}"), workload.TraceOptions{Format: "csv"}); !errors.Is(err, workload.ErrTrace) || !strings.Contains(err.Error(), `the format "csv" is unknown`) {
		t.Error(err)
	}
}

// Whatever the lines, prompts have the blocks that their tokens need, and turns of a conversation come one after another.
func FuzzReadSessions(f *testing.F) {
	for _, name := range []string{"sessions", "bad"} {
		file, err := os.ReadFile("testdata/aiperf/" + name + ".jsonl")
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(file))
	}
	f.Add(`{"session_id": "a", "text_input": "x"}` + "\n" + `{"session_id": "a", "delay": 1e18, "input_length": 3, "output_length": 2000000}`)
	f.Fuzz(func(t *testing.T, s string) {
		list, err := workload.ReadTrace(strings.NewReader(s), workload.TraceOptions{BlockTokens: 16, Format: workload.FormatAIPerf, TokenTime: time.Second})
		if err != nil {
			if !errors.Is(err, workload.ErrTrace) {
				t.Fatal(err)
			}
			return
		}
		turns := make(map[int]*workload.Request)
		for i := range list {
			q := &list[i]
			if q.Input < 1 || len(q.Blocks) != (q.Input+15)/16 || q.Arrival < 0 || q.Pause < 0 {
				t.Fatalf("%+v", q)
			}
			if before := turns[q.Conversation]; before != nil && (q.Turn != before.Turn+1 || q.Arrival < before.Arrival) || before == nil && q.Turn != 0 {
				t.Fatalf("%+v after %+v", q, before)
			}
			turns[q.Conversation] = q
		}
	})
}
