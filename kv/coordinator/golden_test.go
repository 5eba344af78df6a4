// SPDX-License-Identifier: Apache-2.0

package coordinator_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv/coordinator"
)

var vectorFiles = []string{
	"coordinator-v0230-0.json", "coordinator-v0230-1.json",
	"coordinator-v0330-0.json", "coordinator-v0330-1.json",
}

// want is what the original answered in a case.
type want struct {
	ID   string            `json:"id"`
	Init *refused          `json:"init"`
	Find []json.RawMessage `json:"find"`
	Load []maskCase        `json:"load"`
	// Store and Lookup differ in their arguments only.
	Store  []maskCase `json:"store"`
	Lookup []maskCase `json:"lookup"`
	Align  [][2]int   `json:"align"`
}

type refused struct {
	Class string `json:"err"`
	Text  string `json:"msg"`
}

type findCase struct {
	refused
	Max   int     `json:"max"`
	Eagle int     `json:"ae"`
	Len   int     `json:"len"`
	Masks [][]int `json:"m"`
}

type maskCase struct {
	Tokens int             `json:"tok"`
	Start  int             `json:"start_token"`
	Prompt *int            `json:"num_prompt_tokens"`
	R      json.RawMessage `json:"r"`
}

// readVectors returns the cases of a file and what the original answered them.
func readVectors(t testing.TB, name string) (*recordedFile, []want) {
	t.Helper()
	data := testkit.Vector(t, "coordinator/"+name)
	v, err := parseVectors(data)
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Cases []want `json:"cases"`
	}
	if err := json.Unmarshal(data, &file); err != nil {
		t.Fatal(err)
	}
	if len(v.Cases) == 0 || len(v.Cases) != len(file.Cases) {
		t.Fatalf("%s: %d cases parsed, %d recorded", name, len(v.Cases), len(file.Cases))
	}
	return v, file.Cases
}

// The package makes each recorded decision of the originals again, with every kind
// of set.
func TestVectors(t *testing.T) {
	for _, name := range vectorFiles {
		t.Run(name, func(t *testing.T) {
			v, wants := readVectors(t, name)
			k := checker{t: t, release: v.Release}
			for i := range v.Cases {
				k.run(&v.Cases[i], &wants[i])
			}
			t.Logf("%d cases", k.cases)
			t.Logf("release %s: %d construction refusals, %d finds (each over 4 kinds of set), %d load, %d store, %d lookup masks, %d alignments",
				v.VLLM, k.inits, k.finds, k.loads, k.stores, k.lookups, k.aligns)
			if k.cases != len(wants) {
				t.Fatalf("%d of %d cases ran", k.cases, len(wants))
			}
		})
	}
}

type checker struct {
	t       *testing.T
	release coordinator.Release
	id      string

	cases, inits, finds, loads, stores, lookups, aligns int
}

func (k *checker) run(v *recordedCase, w *want) {
	k.cases++
	k.id = v.ID
	c, err := coordinator.New(v.Layout, coordinator.Options{Release: k.release})
	if w.Init != nil {
		k.inits++
		k.refusal("init", err, *w.Init)
		return
	}
	if err != nil {
		k.t.Errorf("%s: New: %v", k.id, err)
		return
	}
	sets := presences(c, v)
	for _, raw := range w.Find {
		var f findCase
		if err := json.Unmarshal(raw, &f); err != nil {
			k.t.Fatal(err)
		}
		k.finds++
		for name, p := range sets {
			k.find(c, name, p, v.Units, &f)
		}
	}
	for _, m := range w.Load {
		k.loads++
		got, err := c.LoadMask(nil, v.Units, m.Tokens)
		k.masks("load", got, err, &m)
	}
	for _, m := range w.Store {
		k.stores++
		q := coordinator.StoreQuery{Tokens: m.Tokens, Start: m.Start}
		if m.Prompt != nil {
			q.Prompt, q.HasPrompt = *m.Prompt, true
		}
		got, err := c.StoreMask(nil, q)
		k.masks("store", got, err, &m)
	}
	for _, m := range w.Lookup {
		k.lookups++
		got, err := c.LookupMask(nil, m.Tokens)
		k.masks("lookup", got, err, &m)
	}
	for _, a := range w.Align {
		k.aligns++
		if got := c.AlignLookupLength(a[0]); got != a[1] {
			k.t.Errorf("%s: AlignLookupLength(%d) = %d, want %d", k.id, a[0], got, a[1])
		}
	}
}

func (k *checker) find(c *coordinator.Coordinator, name string, p coordinator.Presence, units int, f *findCase) {
	var r coordinator.Result
	err := c.Hit(&r, p, coordinator.Query{Units: units, MaxTokens: f.Max, NoEagle: f.Eagle == 0})
	if f.Class != "" {
		k.refusal("find over "+name, err, f.refused)
		return
	}
	if err != nil {
		k.t.Errorf("%s: find over %s: %v", k.id, name, err)
		return
	}
	if got := runLengths(r.Masks); r.Tokens != f.Len || !slices.EqualFunc(got, f.Masks, slices.Equal) {
		k.t.Errorf("%s: find over %s, max %d, eagle %d: %d %v, want %d %v",
			k.id, name, f.Max, f.Eagle, r.Tokens, got, f.Len, f.Masks)
	}
}

func (k *checker) masks(what string, got []coordinator.Mask, err error, m *maskCase) {
	if bytes.HasPrefix(m.R, []byte{'{'}) {
		var w refused
		if err := json.Unmarshal(m.R, &w); err != nil {
			k.t.Fatal(err)
		}
		k.refusal(what, err, w)
		return
	}
	if err != nil {
		k.t.Errorf("%s: %s %d: %v", k.id, what, m.Tokens, err)
		return
	}
	text, err := json.Marshal(sentinels(got))
	if err != nil {
		k.t.Fatal(err)
	}
	if !bytes.Equal(text, m.R) {
		k.t.Errorf("%s: %s %d: %s, want %s", k.id, what, m.Tokens, text, m.R)
	}
}

func (k *checker) refusal(what string, err error, w refused) {
	k.t.Helper()
	e, ok := errors.AsType[*coordinator.Error](err)
	if !ok {
		k.t.Errorf("%s: %s: %v, want %s: %s", k.id, what, err, w.Class, w.Text)
		return
	}
	// The recorder cut long messages.
	text := e.Text[:min(len(e.Text), max(len(w.Text), 150))]
	if e.Class != w.Class || text != w.Text || len(w.Text) < 150 && e.Text != w.Text {
		k.t.Errorf("%s: %s: %s: %s, want %s: %s", k.id, what, e.Class, e.Text, w.Class, w.Text)
	}
}

func runLengths(masks []coordinator.Mask) [][]int {
	out := [][]int{}
	for i := range masks {
		out = append(out, masks[i].AppendRunLengths([]int{}))
	}
	return out
}

// sentinels is runLengths with nil for masks that are the "all" sentinel.
func sentinels(masks []coordinator.Mask) [][]int {
	out := runLengths(masks)
	for i := range masks {
		if masks[i].All() {
			out[i] = nil
		}
	}
	return out
}

// presences are the sets of this package, filled with what a case stores.
func presences(c *coordinator.Coordinator, v *recordedCase) map[string]coordinator.Presence {
	runs := coordinator.NewRuns(c)
	v.presence(runs)
	held := map[[2]int]bool{}
	for g, list := range v.Stored {
		for _, r := range list {
			for u := r.Start; u < r.End; u++ {
				held[[2]int{g, u}] = true
			}
		}
	}
	has := func(g, u int) bool { return held[[2]int{g, u}] }
	remote := coordinator.NewRemote(c, coordinator.RemoteOptions{Batch: 8})
	remote.Reset(&fakeStore{has: has})
	return map[string]coordinator.Presence{
		"runs": runs, "scan": coordinator.Scan(has), "remote": remote,
	}
}

// The kinds and releases print as the layout JSON and the release notes do.
func TestNames(t *testing.T) {
	f := func(got fmt.Stringer, want string) {
		t.Helper()
		if got.String() != want {
			t.Errorf("String() = %q, want %q", got, want)
		}
	}
	f(coordinator.Full, "full")
	f(coordinator.SlidingWindowMLA, "swamla")
	f(coordinator.Kind(0), "kind 0")
	f(coordinator.Kind(99), "kind 99")
	f(coordinator.MambaAll, "all")
	f(coordinator.MambaMode(9), "mode 9")
	f(coordinator.VLLM023, "vLLM 0.23.0")
	f(coordinator.VLLM033, "vLLM 0.33.0")
}
