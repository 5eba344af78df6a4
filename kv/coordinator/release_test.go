// SPDX-License-Identifier: Apache-2.0

package coordinator_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/kv/coordinator"
)

// hitOf returns "tokens masks" of a hit; stored has one string per group, P for
// a stored block and . for none, blocks beyond it absent.
func hitOf(t *testing.T, c *coordinator.Coordinator, q coordinator.Query, stored ...string) string {
	t.Helper()
	var r coordinator.Result
	if err := c.Hit(&r, storedAs(c, stored...), q); err != nil {
		return err.Error()
	}
	if r.Reason != nil {
		return fmt.Sprintf("%d, %v", r.Tokens, r.Reason)
	}
	return fmt.Sprintf("%d %s", r.Tokens, draw(r.Masks))
}

func storedAs(c *coordinator.Coordinator, stored ...string) *coordinator.Runs {
	runs := coordinator.NewRuns(c)
	for g, text := range stored {
		for i, b := range text {
			if b == 'P' {
				runs.Add(g, i, i+1)
			}
		}
	}
	return runs
}

// draw shows masks as 0 and 1, groups apart by spaces, "all" for the sentinel
// and - for an empty mask.
func draw(masks []coordinator.Mask) string {
	var out []string
	for i := range masks {
		var b strings.Builder
		for _, set := range masks[i].AppendBools(nil) {
			b.WriteByte("01"[map[bool]int{true: 1}[set]])
		}
		switch {
		case masks[i].All():
			out = append(out, "all")
		case b.Len() == 0:
			out = append(out, "-")
		default:
			out = append(out, b.String())
		}
	}
	return strings.Join(out, " ")
}

// The worked examples of docs/how/hybrid-hits.md.
func TestWorkedExamples(t *testing.T) {
	both := []coordinator.Release{0, coordinator.VLLM033, coordinator.VLLM023}
	f := func(layout string, units, limit int, stored, want string, releases ...coordinator.Release) {
		t.Helper()
		for _, d := range releases {
			c := mustNew(t, layout, coordinator.Options{Release: d})
			got := hitOf(t, c, coordinator.Query{Units: units, MaxTokens: limit}, strings.Fields(stored)...)
			if got != want {
				t.Errorf("%s, %s: %s: got %s, want %s", d, layout, stored, got, want)
			}
		}
	}
	const window = "full,bs=16 swa,bs=16,win=33"
	f(window, 6, 96, "PPPPPP ....PP", "96 111111 000011", both...)
	f(window, 6, 96, "PPPPPP ..PP.P", "64 1111 0011", both...)
	f(window, 6, 96, "PPPPPP P.....", "16 1 1", both...)
	f(window, 6, 96, "PPPPPP .P....", "0 - -", both...)
	const unequal = "full,bs=64 swa,bs=16,win=17 hash=16"
	f(unequal, 9, 128, "PP ...P..PP", "128 11 00000001", both...)
	f(unequal, 9, 128, "PP ...P..P.", "64 1 0001", both...)
	f(unequal, 9, 128, "PP .......P", "128 11 00000001", both...)
	f(unequal, 9, 128, "PP ......P.", "0 - -", both...)
	const eagle = "full,bs=16,eagle swa,bs=16,win=17,eagle eagle"
	f(eagle, 6, 96, "PPPPPP PPPPPP", "80 11111 00001", both...)
	f(eagle, 6, 80, "PPPPPP PPPPPP", "64 1111 0001", coordinator.VLLM023)
	f(eagle, 6, 80, "PPPPPP PPPPPP", "80 11111 00001", coordinator.VLLM033, 0)
	f("full,bs=32 mamba,bs=32 hash=16", 8, 128, "PPPP P.P.", "96 111 001", both...)
	f("chunk,bs=16,chunk=64", 7, 112, "", "64 0000", both...)
	f("full,bs=16 swa,bs=16,win=33 cross,bs=16", 4, 64, "PPPP PPPP", "CrossAttentionManager does not support caching", coordinator.VLLM033, coordinator.VLLM023)
	f("full,bs=16 swa,bs=16,win=33 cross,bs=16", 4, 64, "PPPP PPPP", "0, CrossAttentionManager does not support caching", 0)
}

// With the option Release the package repeats the errors of that release, and without it it does not.
func TestDeparturesOfHits(t *testing.T) {
	f := func(what, layout string, d coordinator.Release, q coordinator.Query, stored, want, ours string) {
		t.Helper()
		for _, o := range []coordinator.Options{{Release: d}, {}} {
			if got := hitOf(t, mustNew(t, layout, o), q, strings.Fields(stored)...); got != want {
				t.Errorf("%s, %v: got %s, want %s", what, o.Release, got, want)
			}
			want = ours
		}
	}
	q := func(units, limit int) coordinator.Query { return coordinator.Query{Units: units, MaxTokens: limit} }
	f("look-ahead bounded by the request", "full,bs=16 swa,bs=16,win=17 eagle", coordinator.VLLM023, q(6, 80),
		"PPPPPP PPPPPP", "64 1111 0001", "80 11111 00001")
	f("Mamba looks ahead", "full,bs=16 mamba,bs=16 eagle", coordinator.VLLM023, q(6, 96),
		"PPPPPP PPPPPP", "96 11111 000001", "80 11111 00001")
	f("second full group left long", "full,bs=16 mla,bs=16 swa,bs=16,win=17", coordinator.VLLM023, q(6, 96),
		"PPPPPP PPPPPP .P..", "32 11 111111 01", "32 11 11 01")
	f("single group off the scheduler block", "full,bs=16 sched=32", coordinator.VLLM023, q(6, 96),
		"PPP", "48 111", "32 11")
	f("chunk off the block grid", "full,bs=16 chunk,bs=16,chunk=24", coordinator.VLLM033, q(4, 32),
		"PP ..", "16 1 0", "0 - -")
	f("window of one token under EAGLE", "swa,bs=16,win=1 eagle", coordinator.VLLM033, q(4, 64),
		".P..", "16 0", "0 -")
	f("short prompt loses two segments", "full,bs=16 swa,bs=48,win=128 eagle sched=96 hash=16", coordinator.VLLM033, q(12, 192),
		"PPPPPPPPPPPP PPPP", "0 - -", "96 111111 11")
	const twoWindows = "full,bs=16 swa,bs=16,win=17,eagle swa,bs=16,win=33,eagle"
	f("EAGLE verified once", twoWindows, coordinator.VLLM033, q(4, 64), "PPPP P.PP PP..", "16 1 1 1", "0 - - -")
	f("and a block more costs the hit", twoWindows, coordinator.VLLM033, q(4, 64), "PPPP P.PP PPP.", "0 - - -", "0 - - -")
	f("nothing cacheable", "", coordinator.VLLM033, q(4, 64), "", "64 ", "0 ")
}

// Store masks of 0.23 under EAGLE lose the dropped block; a window of one
// token is never stored although its lookup asks for a block.
func TestDeparturesOfStores(t *testing.T) {
	f := func(layout string, d coordinator.Release, tokens int, want, ours string) {
		t.Helper()
		for _, o := range []coordinator.Options{{Release: d}, {}} {
			masks, err := mustNew(t, layout, o).StoreMask(nil, coordinator.StoreQuery{Tokens: tokens})
			if err != nil {
				t.Fatal(err)
			}
			if got := draw(masks); got != want {
				t.Errorf("%s, %v: got %s, want %s", layout, o.Release, got, want)
			}
			want = ours
		}
	}
	const eagle = "full,bs=64 swa,bs=16,win=17 eagle"
	f(eagle, coordinator.VLLM023, 128, "- -", "all 00011001")
	f(eagle, coordinator.VLLM033, 128, "all 00011001", "all 00011001")
	f("full,bs=64 swa,bs=16,win=17", coordinator.VLLM023, 128, "11 00010001", "all 00010001")
	f("full,bs=64 swa,bs=16,win=17", coordinator.VLLM033, 128, "all 00010001", "all 00010001")
	f("full,bs=64 swa,bs=16,win=1", coordinator.VLLM033, 128, "all 00000000", "all 00010001")
	f("full,bs=64 mamba,bs=16", coordinator.VLLM023, 128, "11 00010001", "all 00000000")
	f("full,bs=64 mamba,bs=16 eagle", coordinator.VLLM023, 128, "- -", "all 00000000")
}

// A retention interval keeps one tail per interval and those of the prompt's end.
func TestRetention(t *testing.T) {
	f := func(layout string, q coordinator.StoreQuery, want string) {
		t.Helper()
		masks, err := mustNew(t, layout, coordinator.Options{}).StoreMask(nil, q)
		if err != nil {
			t.Fatal(err)
		}
		if got := draw(masks); got != want {
			t.Errorf("%s %+v: got %s, want %s", layout, q, got, want)
		}
	}
	const layout = "full,bs=16 swa,bs=16,win=17 "
	f(layout, coordinator.StoreQuery{Tokens: 128}, "all all")
	f(layout+"ret=0", coordinator.StoreQuery{Tokens: 128}, "all 00000000")
	f(layout+"ret=0", coordinator.StoreQuery{Tokens: 128, Prompt: 130, HasPrompt: true}, "all 00000001")
	f(layout+"ret=0", coordinator.StoreQuery{Tokens: 128, Prompt: 128, HasPrompt: true}, "all 00000010")
	f(layout+"ret=64", coordinator.StoreQuery{Tokens: 128, Prompt: 100, HasPrompt: true}, "all 00010101")
	f(layout+"ret=64", coordinator.StoreQuery{Tokens: 128, Start: 33}, "all 10001")
	f(layout+"ret=0 eagle", coordinator.StoreQuery{Tokens: 128, Prompt: 128, HasPrompt: true}, "all 00000111")
	f(layout+"ret=64", coordinator.StoreQuery{Tokens: 64, Start: 1000}, "all -")
}

// Where a release raises an exception at a lookup, the hit is empty and the error says why.
func TestReasons(t *testing.T) {
	f := func(layout string, want *coordinator.Error) {
		t.Helper()
		q := coordinator.Query{Units: 4, MaxTokens: 64}
		for _, d := range []coordinator.Release{coordinator.VLLM033, coordinator.VLLM023} {
			var r coordinator.Result
			c := mustNew(t, layout, coordinator.Options{Release: d})
			if err := c.Hit(&r, storedAs(c, "PPPP", "PPPP"), q); !errors.Is(err, want) || r.Tokens != 0 {
				t.Errorf("%s, %s: %d, %v", layout, d, r.Tokens, err)
			}
			c = mustNew(t, layout, coordinator.Options{})
			if err := c.Hit(&r, storedAs(c, "PPPP", "PPPP"), q); err != nil || r.Tokens != 0 || !errors.Is(r.Reason, want) {
				t.Errorf("%s, ours: %d, %v, %v", layout, r.Tokens, err, r.Reason)
			}
			for i := range r.Masks {
				if r.Masks[i].Len() != 0 {
					t.Errorf("%s: mask of a refused hit is not empty", layout)
				}
			}
		}
	}
	f("full,bs=16 cross,bs=16", coordinator.ErrCross)
	f("full,bs=16 chunk,bs=16,chunk=32 eagle", coordinator.ErrChunkEagle)
	f("full,bs=32 chunk,bs=16,chunk=32", coordinator.ErrChunkAlign)
}

func wantError(t *testing.T, what string, err error, code coordinator.Code, text string) {
	t.Helper()
	e, ok := errors.AsType[*coordinator.Error](err)
	if !ok || e.Code != code || !strings.Contains(e.Text, text) {
		t.Errorf("%s: %v, want %q", what, err, text)
	}
}

// Bad input is a typed error with the original's text, if it has one.
func TestRefusals(t *testing.T) {
	full := coordinator.Group{Kind: coordinator.Full, Block: 16}
	swa := coordinator.Group{Kind: coordinator.SlidingWindow, Block: 16, Window: 33}
	build := func(code coordinator.Code, text string, sched, hash int, groups ...coordinator.Group) {
		t.Helper()
		for _, d := range []coordinator.Release{coordinator.VLLM033, coordinator.VLLM023} {
			_, err := coordinator.New(coordinator.Layout{Groups: groups, Scheduler: sched, HashUnit: hash}, coordinator.Options{Release: d})
			wantError(t, fmt.Sprint(sched, hash, groups), err, code, text)
		}
	}
	with := func(change func(g *coordinator.Group)) coordinator.Group {
		g := swa
		change(&g)
		return g
	}
	build(coordinator.CodeZero, "integer modulo by zero", 16, 0, full)
	build(coordinator.CodeZero, "integer modulo by zero", 0, 16, full)
	build(coordinator.CodeZero, "integer modulo by zero", 16, 16, coordinator.Group{Kind: coordinator.Full})
	build(coordinator.CodeLimit, "hash_block_size (-16)", 16, -16, full)
	build(coordinator.CodeLimit, "scheduler_block_size (-16)", -16, 16, full)
	build(coordinator.CodeLimit, "block_size (-16)", 16, 16, with(func(g *coordinator.Group) { g.Block = -16 }))
	build(coordinator.CodeLimit, "sliding_window (0)", 16, 16, with(func(g *coordinator.Group) { g.Window = 0 }))
	build(coordinator.CodeLimit, "sliding_window (-1)", 16, 16, with(func(g *coordinator.Group) { g.Window = -1 }))
	build(coordinator.CodeLimit, "extra_retained_tokens (-1)", 16, 16, with(func(g *coordinator.Group) { g.Extra = -1 }))
	build(coordinator.CodeLimit, "attention_chunk_size (0)", 16, 16, coordinator.Group{Kind: coordinator.ChunkedLocal, Block: 16})
	build(coordinator.CodeLimit, "num_kv_heads (-1)", 16, 16, coordinator.Group{Kind: coordinator.Full, Block: 16, Heads: -1})
	build(coordinator.CodeLimit, "1025 groups", 16, 16, make([]coordinator.Group, 1025)...)
	build(coordinator.CodeHashUnit, "block_size must be divisible by hash_block_size", 17, 12, full)
	build(coordinator.CodeScheduler, "scheduler_block_size (17) must be a multiple of hash_block_size (16)", 17, 16, full)
	build(coordinator.CodeSchedulerGroup, "scheduler_block_size must be a multiple of each group's block_size", 24, 8, full)
	build(coordinator.CodeNoManager, "No manager registered for KVCacheSpec", 16, 16, coordinator.Group{Kind: 77, Block: 16})
}

// Lookups and masks of impossible lengths.
func TestRefusedLengths(t *testing.T) {
	for _, d := range []coordinator.Release{coordinator.VLLM033, coordinator.VLLM023} {
		c := mustNew(t, "swa,bs=16,win=33", coordinator.Options{Release: d})
		ask := func(units, limit int, code coordinator.Code, text string) {
			t.Helper()
			var r coordinator.Result
			wantError(t, "hit", c.Hit(&r, coordinator.NewRuns(c), coordinator.Query{Units: units, MaxTokens: limit}), code, text)
			_, err := c.LoadMask(nil, units, limit)
			wantError(t, "load", err, code, text)
		}
		ask(-1, 16, coordinator.CodeNegative, "a negative number of hash units")
		ask(4, -16, coordinator.CodeNegative, "a negative length")
		ask(1, 1<<60, coordinator.CodeLimit, "a prompt of more than")
		ask(1<<60, 16, coordinator.CodeLimit, "a prompt of more than")
		ask(1, 64, coordinator.CodeIndex, "list index out of range")
		_, err := c.StoreMask(nil, coordinator.StoreQuery{Tokens: -15})
		wantError(t, "store", err, coordinator.CodeUnaligned, "aligned_token_len (-15) must be a multiple of ")
		_, err = c.StoreMask(nil, coordinator.StoreQuery{Tokens: -16})
		wantError(t, "store", err, coordinator.CodeNegative, "a negative length (-16)")
		_, err = c.StoreMask(nil, coordinator.StoreQuery{Tokens: 1 << 60})
		wantError(t, "store", err, coordinator.CodeLimit, "a prompt of more than")
	}
	c := mustNew(t, "chunk,bs=16,chunk=64", coordinator.Options{})
	var r coordinator.Result
	wantError(t, "chunk", c.Hit(&r, storedAs(c, "P"), coordinator.Query{Units: 1, MaxTokens: 48}), coordinator.CodeIndex, "list index out of range")
	c = mustNew(t, "full,bs=16", coordinator.Options{Release: coordinator.VLLM023})
	_, err := c.LookupMask(nil, 16)
	wantError(t, "lookup", err, coordinator.CodeRelease, "no lookup mask")
	_, err = c.StoreMask(nil, coordinator.StoreQuery{Tokens: 16, Start: 16})
	wantError(t, "store", err, coordinator.CodeRelease, "no lookup mask")
}

// Scratch groups of a request have no hits and shorten none; the original has no
// manager for them.
func TestScratchGroups(t *testing.T) {
	l := coordinator.Layout{Scheduler: 16, HashUnit: 16, Groups: []coordinator.Group{
		{Kind: coordinator.Circular, Block: 7}, {Kind: coordinator.Full, Block: 16}, {Kind: coordinator.HiSparseHot, Block: 48},
	}}
	if _, err := coordinator.New(l, coordinator.Options{Release: coordinator.VLLM023}); err == nil {
		t.Error("the original accepts scratch groups")
	}
	c, err := coordinator.New(l, coordinator.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if got := hitOf(t, c, coordinator.Query{Units: 6, MaxTokens: 96}, "", "PPP"); got != "48 - 111 -" {
		t.Errorf("got %s", got)
	}
	masks, err := c.StoreMask(nil, coordinator.StoreQuery{Tokens: 96})
	if got := draw(masks); err != nil || got != "all all all" {
		t.Errorf("store %s, %v", got, err)
	}
	if n := c.Blocks(0, 6); n != 0 {
		t.Errorf("%d usable blocks of a scratch group", n)
	}
}

// Partial hits end inside a block.
func TestPartialHits(t *testing.T) {
	c := mustNew(t, "full,bs=64 mamba,bs=64 hash=16 partial", coordinator.Options{})
	runs := coordinator.NewRuns(c)
	runs.Add(0, 0, 1)
	runs.AddUnits(0, 5, 6) // the second block, filled to unit 5
	runs.AddUnits(1, 4, 5)
	var r coordinator.Result
	if err := c.Hit(&r, runs, coordinator.Query{Units: 9, MaxTokens: 144}); err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprintf("%d %s", r.Tokens, draw(r.Masks)); got != "80 11 01" {
		t.Errorf("got %s", got)
	}
	if got := c.AlignLookupLength(100); got != 96 {
		t.Errorf("AlignLookupLength(100) = %d", got)
	}
}

// Up to 0.23 a block's key is the digests of all its units; later releases use the last digest.
func TestKeys(t *testing.T) {
	digests := []byte("aabbccddee") // five units, two bytes each
	f := func(d coordinator.Release, g, i int, want string) {
		t.Helper()
		c := mustNew(t, "full,bs=32 swa,bs=16,win=17 hash=16", coordinator.Options{Release: d})
		got, ok := c.AppendKey([]byte("g:"), digests, 2, g, i)
		if string(got) != "g:"+want || ok != (want != "") {
			t.Errorf("%s: key of block %d of group %d: %q, %v", d, i, g, got, ok)
		}
	}
	f(coordinator.VLLM023, 0, 0, "aabb")
	f(coordinator.VLLM023, 0, 1, "ccdd")
	f(coordinator.VLLM033, 0, 0, "bb")
	f(coordinator.VLLM033, 0, 1, "dd")
	for _, d := range []coordinator.Release{coordinator.VLLM033, coordinator.VLLM023} {
		f(d, 1, 4, "ee")
		f(d, 0, 2, "") // the last unit is half a block
		f(d, 1, 5, "")
		f(d, 1, -1, "")
	}
	c := mustNew(t, "full,bs=32 hash=16", coordinator.Options{})
	if got, ok := c.AppendUnitKey(nil, digests, 2, 2); string(got) != "cc" || !ok {
		t.Errorf("unit key %q, %v", got, ok)
	}
	if _, ok := c.AppendUnitKey(nil, digests, 2, 5); ok {
		t.Error("a key beyond the prompt")
	}
	if u := c.Units(0, 1); u != (coordinator.Run{Start: 2, End: 4}) {
		t.Errorf("units %v", u)
	}
}
