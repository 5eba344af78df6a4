// SPDX-License-Identifier: Apache-2.0

package coordinator_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/kv/coordinator"
)

func wantExplained(t *testing.T, e coordinator.Explanation, layout, want string) {
	t.Helper()
	var err error
	if e.Layout, err = coordinator.ParseLayout(layout); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := coordinator.Explain(&b, e); err != nil {
		t.Fatal(err)
	}
	if got := b.String(); got != strings.TrimPrefix(want, "\n") {
		t.Errorf("%s:\n%s", layout, got)
	}
}

// The table and the picture are exactly these texts.
func TestExplain(t *testing.T) {
	wantExplained(t, coordinator.Explanation{Prompt: 1000, Cells: 16, ASCII: true}, "full,bs=64 swa,bs=16,win=33 hash=16", `
rules of Kvasir; prompt 1000 tokens; hash unit 16; hits in steps of 64 tokens

group  kind            block  blocks  stored  loaded  skipped
0      full            64     15      15      15      0
1      swa, window 33  16     62      30      2       58

hit: 960 of 1000 tokens; 40 are left to compute

group 0, full
  stored |###############+|
  loaded |################|
group 1, swa, window 33
  stored |++++++++++++++++|
  loaded |..............+#|
                         ^ hit ends
one cell is 62 tokens: # all, + some, . none
`)
	wantExplained(t, coordinator.Explanation{Prompt: 64, Cells: 4, ASCII: true}, "full,bs=16 cross,bs=16", `
rules of Kvasir; prompt 64 tokens; hash unit 16; hits in steps of 16 tokens

group  kind   block  blocks  stored  loaded  skipped
0      full   16     4       4       0       0
1      cross  16     4       4       0       0

hit: 0 of 64 tokens (CrossAttentionManager does not support caching)

group 0, full
  stored |####|
  loaded |    |
group 1, cross
  stored |####|
  loaded |    |
one cell is 16 tokens: # all, + some, . none
`)
	wantExplained(t, coordinator.Explanation{
		Prompt: 100, Cells: 6, ASCII: true, Options: coordinator.Options{Release: coordinator.VLLM023},
		Stored: [][]coordinator.Run{{{Start: 0, End: 6}}, {{Start: 2, End: 4}, {Start: 5, End: 6}}},
	}, "full,bs=16 swa,bs=16,win=33", `
rules of vLLM 0.23.0; prompt 100 tokens; hash unit 16; hits in steps of 16 tokens

group  kind            block  blocks  stored  loaded  skipped
0      full            16     6       6       4       0
1      swa, window 33  16     6       3       2       2

hit: 64 of 100 tokens; 36 are left to compute

group 0, full
  stored |######|
  loaded |####  |
group 1, swa, window 33
  stored |..##.#|
  loaded |..##  |
             ^ hit ends
one cell is 16 tokens: # all, + some, . none
`)
}

// Every recorded case can be drawn, or says why not.
func TestExplainCases(t *testing.T) {
	for _, name := range vectorFiles {
		v, wants := readVectors(t, name)
		drawn := 0
		for i := range v.Cases {
			var b bytes.Buffer
			err := v.Cases[i].explain(&b, v.Release, i%2 == 0)
			if (err != nil) != (wants[i].Init != nil) {
				t.Errorf("%s: %v", v.Cases[i].ID, err)
			}
			if err == nil {
				drawn++
			}
		}
		t.Logf("%s: %d cases drawn, %d refused at construction", name, drawn, len(v.Cases)-drawn)
	}
}

func TestExplainBounds(t *testing.T) {
	l, err := coordinator.ParseLayout("full,bs=16")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range []coordinator.Explanation{
		{Layout: l, Prompt: -1},
		{Layout: l, Prompt: 1 << 40},
		{Layout: l, Units: 1 << 40},
		{Layout: l, Units: -1},
		{Layout: l, Cells: -1},
		{Layout: l, Cells: 1 << 30},
		{},
	} {
		if err := coordinator.Explain(&bytes.Buffer{}, e); err == nil {
			t.Errorf("%+v: accepted", e)
		}
	}
}

// A store that is asked over a network finds the same hit, with few questions.
func TestExplainRemote(t *testing.T) {
	for _, layout := range []string{"full,bs=16", "full,bs=16 swa,bs=16,win=1024", "full,bs=64 swa,bs=16,win=33 hash=16", "full,bs=16 mamba,bs=32,mode=align"} {
		l, err := coordinator.ParseLayout(layout)
		if err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		if err := coordinator.Explain(&b, coordinator.Explanation{Layout: l, Prompt: 8192, Remote: true}); err != nil {
			t.Fatal(err)
		}
		var hit, of, left, batches, keys, blocks, remote int
		_, text, _ := strings.Cut(b.String(), "\nhit: ")
		if _, err := fmt.Sscanf(text, "%d of %d tokens; %d are left to compute\n", &hit, &of, &left); err != nil {
			t.Fatal(err, text)
		}
		_, text, _ = strings.Cut(text, "over a network: ")
		if _, err := fmt.Sscanf(text, "%d questions for %d keys of %d blocks find a hit of %d tokens", &batches, &keys, &blocks, &remote); err != nil {
			t.Fatal(err, text)
		}
		if remote != hit || hit == 0 || batches < 1 || batches > 20 || keys > blocks {
			t.Errorf("%s: hit %d, over a network %d with %d questions for %d of %d keys", layout, hit, remote, batches, keys, blocks)
		}
	}
}
