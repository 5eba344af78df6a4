// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
)

// severalPasses are the commands that read a trace several times.
func severalPasses(trace string) map[string]interface{ Run(e *Env) error } {
	f := fleetCmd{Profile: "h100-llama-3.1-8b", Trace: trace, Block: 512, Nodes: []int{1, 3}, Pool: 1, Rate: 2, Requests: 1, Route: "even"}
	f.JSON = "-"
	scheduled := replayCmd{Trace: trace, Block: 512, Scale: 1, HeadBytes: 8, Scheduled: true, Prefill: 1, Decode: 1, Profile: "h100-llama-3.1-8b"}
	withBytes := replayCmd{Trace: trace, Block: 512, Scale: 32, HeadBytes: 8, Bytes: true, Decode: 1, Profile: "a10-qwen2.5-7b", Capacity: 500, Requests: 300}
	swept := sweepCmd{Trace: trace, Requests: 400, Profile: "h100-llama-3.1-8b", PD: []string{"1:1", "0:2"}, Rate: []float64{0, 3}, Goodput: []string{"ttft:100"}}
	scheduled.JSON, withBytes.JSON, swept.JSON = "-", "-", "-"
	withBytes.Set = map[string]float64{"activation_gib": 5.4}
	return map[string]interface{ Run(e *Env) error }{"fleet": &f, "replay --scheduled": &scheduled, "replay --bytes": &withBytes, "sweep": &swept}
}

// took are the fields of a result that say how long a run took.
var took = regexp.MustCompile(`"(seconds|ratio)": [^,\n]*`)

// Commands that read a trace several times play a pipe as they play a file, and name the file and the line of a bad one.
func TestPassesOfCommands(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	play := func(name, trace string) (string, error) {
		var out bytes.Buffer
		err := severalPasses(trace)[name].Run(&Env{Ctx: t.Context(), Stdout: &out, Stderr: io.Discard})
		return took.ReplaceAllString(out.String(), ""), err
	}
	good := trace(t, 300)
	text, err := os.ReadFile(good)
	if err != nil {
		t.Fatal(err)
	}
	for name := range severalPasses("") {
		want, err := play(name, good)
		if err != nil || !strings.Contains(want, "{") {
			t.Fatalf("%s: %v: %s", name, err, want)
		}
		pipe := filepath.Join(t.TempDir(), "pipe")
		if err := syscall.Mkfifo(pipe, 0o600); err != nil {
			t.Skip("no named pipe can be made here:", err)
		}
		written := make(chan error, 1)
		go func() { written <- os.WriteFile(pipe, text, 0o600) }()
		if got, err := play(name, pipe); err != nil || got != want {
			t.Errorf("%s: %v: %s, want %s", name, err, got, want)
		}
		if err := <-written; err != nil {
			t.Error(err)
		}
		for _, bad := range []struct{ text, want string }{
			{"", "no requests"}, {string(text[:len(text)-20]), "line 300: "}, {string(text) + "{}\n", "line 301: input_length is missing"},
		} {
			file := filepath.Join(t.TempDir(), "bad.jsonl")
			if err := os.WriteFile(file, []byte(bad.text), 0o600); err != nil {
				t.Fatal(err)
			}
			var usage *UsageError
			if name == "replay --bytes" && strings.HasPrefix(bad.want, "line 301") {
				continue // it asks for 300
			}
			if _, err := play(name, file); !errors.As(err, &usage) || !strings.Contains(err.Error(), "bad.jsonl: workload: bad trace: "+bad.want) {
				t.Errorf("%s: %v, want %q", name, err, bad.want)
			}
		}
		if _, err := play(name, good+".absent"); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if left, err := os.ReadDir(os.Getenv("TMPDIR")); err != nil || len(left) != 0 {
		t.Errorf("files are left: %v, %v", left, err)
	}
}
