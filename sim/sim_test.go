package sim_test

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/sim"
)

func TestReadTrace(t *testing.T) {
	const good = `{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [7, 8]}
{"timestamp": 3, "input_length": 1024, "output_length": 5, "hash_ids": [7, 9]}
`
	got, err := sim.ReadTrace(strings.NewReader(good), 0)
	if err != nil || len(got) != 2 || len(got[0].Tokens) != 700 || got[1].Arrival != 3 {
		t.Fatalf("%d requests, %v", len(got), err)
	}
	if !slices.Equal(got[0].Tokens[:512], got[1].Tokens[:512]) || slices.Equal(got[0].Tokens[512:700], got[1].Tokens[512:700]) {
		t.Error("equal blocks, and only those, have equal tokens")
	}
	if got, err := sim.ReadTrace(strings.NewReader(good), 1); err != nil || len(got) != 1 {
		t.Errorf("%d requests, %v, want 1", len(got), err)
	}
	f := func(line string) {
		t.Helper()
		if _, err := sim.ReadTrace(strings.NewReader(line), 0); !errors.Is(err, sim.ErrTrace) {
			t.Errorf("%q: %v", line, err)
		}
	}
	f("")
	f("not json")
	f(`{"input_length": 0, "hash_ids": []}`)
	f(`{"input_length": -5, "hash_ids": []}`)
	f(`{"input_length": 513, "hash_ids": [1]}`)
	f(`{"input_length": 1e12, "hash_ids": [1]}`)
	f(`{"input_length": 4000000000, "hash_ids": [1]}`)
}

// The production hour, where it is at hand.
func TestProductionTrace(t *testing.T) {
	f, err := os.Open("../../shared/traces/conversation_trace.jsonl")
	if err != nil {
		t.Skip("no production trace beside the repository")
	}
	defer f.Close()
	got, err := sim.ReadTrace(f, 100)
	if err != nil || len(got) != 100 {
		t.Fatalf("%d requests, %v", len(got), err)
	}
}

func FuzzReadTrace(f *testing.F) {
	f.Add(`{"timestamp": 0, "input_length": 700, "hash_ids": [7, 8]}`)
	f.Add("{}\n\n{}")
	f.Fuzz(func(t *testing.T, s string) {
		got, err := sim.ReadTrace(strings.NewReader(s), 4)
		if err == nil && (len(got) == 0 || len(got) > 4) {
			t.Fatalf("%d requests", len(got))
		}
	})
}

func TestChats(t *testing.T) {
	a, b := sim.Chats(50, 1), sim.Chats(50, 1)
	if len(a) != 50 {
		t.Fatalf("%d requests", len(a))
	}
	for i := range a {
		if !slices.Equal(a[i].Tokens, b[i].Tokens) {
			t.Fatal("the same seed gives another workload")
		}
	}
}
