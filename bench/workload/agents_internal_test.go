// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// Sessions of agents: each step has the full blocks of the step before it, sessions pause between steps, a sub-agent runs while its
// session waits, and requests come in the order of their times.
func TestAgents(t *testing.T) {
	f := func(n int, o AgentOptions) {
		t.Helper()
		list := Agents(n, o)
		if len(list) != n {
			t.Fatalf("%d requests, want %d", len(list), n)
		}
		o.defaults()
		last, most := map[int]*Request{}, 0
		for i := range list {
			q := &list[i]
			if q.Input < 1 || q.Input > o.MaxTokens || q.Output < 1 || len(q.Blocks) != (q.Input+o.Block-1)/o.Block || q.BlockTokens != o.Block {
				t.Fatalf("request %d: %d tokens, %d blocks of %d", i, q.Input, len(q.Blocks), q.BlockTokens)
			}
			if i > 0 && q.Arrival < list[i-1].Arrival {
				t.Fatalf("request %d comes at %v, the one before it at %v", i, q.Arrival, list[i-1].Arrival)
			}
			before := last[q.Conversation]
			last[q.Conversation] = q
			if most = max(most, q.Turn+1); before == nil {
				if q.Turn != 0 {
					t.Fatalf("request %d begins its session with turn %d", i, q.Turn)
				}
				continue
			}
			full := before.Input / o.Block
			if q.Turn != before.Turn+1 || q.Input <= before.Input || q.Arrival <= before.Arrival || !slices.Equal(q.Blocks[:full], before.Blocks[:full]) {
				t.Fatalf("request %d, turn %d of %d tokens, follows turn %d of %d tokens", i, q.Turn, q.Input, before.Turn, before.Input)
			}
		}
		if most > o.Steps {
			t.Errorf("a session of %d steps, %d are the most", most, o.Steps)
		}
	}
	f(3000, AgentOptions{})
	f(3000, AgentOptions{Seed: 1, SubAgents: -1, Spread: 0.05})
	f(500, AgentOptions{Block: 16, Open: 1, SubAgents: 0.5})
	f(500, AgentOptions{Block: 512, MaxTokens: 1000, Steps: 1, Pause: time.Nanosecond})
	f(0, AgentOptions{})
	if a, b := Agents(50, AgentOptions{Seed: 1}), Agents(50, AgentOptions{Seed: 2}); slices.EqualFunc(a, b, func(a, b Request) bool { return a.Arrival == b.Arrival }) {
		t.Error("two seeds make the same requests")
	}
}

// Load plays a trace in the order of its timestamps, makes agents by name, and refuses a trace that memory cannot hold.
func TestLoad(t *testing.T) {
	file := filepath.Join(t.TempDir(), "trace.jsonl")
	const lines = `{"timestamp": 9000, "input_length": 700, "hash_ids": [7, 8]}

{"timestamp": 3, "input_length": 4, "hash_ids": [9]}
`
	if err := os.WriteFile(file, []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	list, err := Load(file, TraceOptions{})
	if err != nil || len(list) != 2 || list[0].Blocks[0] != 9 || list[1].Arrival != 9*time.Second {
		t.Errorf("%+v, %v", list, err)
	}
	if list, err = Load(Agentic, TraceOptions{Max: 30, BlockTokens: 64}); err != nil || len(list) != 30 || list[0].BlockTokens != 64 {
		t.Errorf("%d requests, %v", len(list), err)
	}
	refused := func(want, name string, o TraceOptions) {
		t.Helper()
		if list, err := Load(name, o); !errors.Is(err, ErrTrace) || !strings.Contains(err.Error(), want) {
			t.Errorf("%d requests, %v; want %q", len(list), err, want)
		}
	}
	refused("trace.jsonl: workload: bad trace: line 3: the trace has more than 2 hash_ids", file, TraceOptions{maxBlocks: 2})
	refused("blocks of 15 tokens", Agentic, TraceOptions{BlockTokens: 15})
	refused("524289 requests", Agentic, TraceOptions{Max: 1<<19 + 1})
	if _, err := Load(file+".absent", TraceOptions{}); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}
