// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/sim/replay"
)

// patience is a context that is canceled after left calls of Err.
type patience struct {
	context.Context
	left int
}

func (p *patience) Err() error {
	if p.left--; p.left < 0 {
		return context.Canceled
	}
	return nil
}

// trace writes n requests, ten a second, of 600 tokens and 100 to generate.
func trace(t *testing.T, n int) string {
	t.Helper()
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, `{"timestamp": %d, "input_length": 600, "output_length": 100, "hash_ids": [0, %d]}`+"\n", 100*i, i+1)
	}
	name := filepath.Join(t.TempDir(), "trace.jsonl")
	if err := os.WriteFile(name, []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// An interrupted replay shows its results so far. Requests that it did not reach do not count as failed.
func TestInterruptedReplay(t *testing.T) {
	c := replayCmd{Trace: trace(t, 700), Block: 512, Scale: 1, HeadBytes: 8, Scheduled: true, Prefill: 1, Decode: 1, Profile: "h100-llama-3.1-8b"}
	var out, show bytes.Buffer
	ended := 0
	e := &Env{
		Ctx: &patience{t.Context(), 2}, Stdout: &out, Stderr: &show, // asked by the replay, and twice by the run
		Progress: func(w io.Writer, of string) (func(int, int), func()) {
			return func(done, total int) { fmt.Fprintln(w, done, total, of) }, func() { ended++ }
		},
	}
	err := c.Run(e)
	if err == nil || err.Error() != "interrupted" {
		t.Errorf("%v", err)
	}
	for _, want := range []string{" 0 failed", "not finished", "completed"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in %s", want, out.String())
		}
	}
	if ended != 1 || !strings.Contains(show.String(), "700 requests") {
		t.Errorf("the line of progress was ended %d times: %s", ended, show.String())
	}
}

// Policies that were played before an interruption are shown.
func TestInterruptedEvict(t *testing.T) {
	var c evictCmd
	c.Trace, c.Block, c.Capacities, c.JSON = trace(t, 600), 512, []int{10, 20}, "-"
	var out bytes.Buffer
	err := c.Run(&Env{Ctx: &patience{t.Context(), 20}, Stdout: &out, Stderr: os.Stderr})
	if err == nil || err.Error() != "interrupted" {
		t.Errorf("%v", err)
	}
	var got struct{ Rows []replay.PolicyRow }
	if err := json.Unmarshal(out.Bytes(), &got); err != nil || len(got.Rows) == 0 || len(got.Rows) >= 12 {
		t.Errorf("%v: %s", err, out.String())
	}
}
