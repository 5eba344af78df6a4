// SPDX-License-Identifier: Apache-2.0

package coordinator_test

import (
	"slices"
	"testing"

	"github.com/kvasir-kv/kvasir/kv/coordinator"
	"pgregory.net/rapid"
)

// world is a random model, prompt and store.
type world struct {
	l     coordinator.Layout
	units int
	held  map[[2]int]bool // group, hash unit
}

func (w *world) has(g, u int) bool { return u < w.units && w.held[[2]int{g, u}] }

type worldKind struct{ eagle, partial, chunked bool }

func drawWorld(t *rapid.T, k worldKind) *world {
	w := &world{held: map[[2]int]bool{}}
	h := rapid.SampledFrom([]int{1, 2, 4, 16}).Draw(t, "hash unit")
	kinds := []coordinator.Kind{
		coordinator.Full, coordinator.MLA, coordinator.SlidingWindow, coordinator.SlidingWindow,
		coordinator.SlidingWindowMLA, coordinator.Mamba,
	}
	same := k.chunked || rapid.Bool().Draw(t, "equal blocks")
	if k.chunked {
		kinds = append(kinds, coordinator.ChunkedLocal, coordinator.ChunkedLocal)
	}
	first := rapid.SampledFrom([]int{1, 2, 4}).Draw(t, "block")
	sched := 1
	for range rapid.IntRange(1, 4).Draw(t, "groups") {
		mult := first
		if !same {
			mult = rapid.SampledFrom([]int{1, 2, 4, 3}).Draw(t, "block")
		}
		g := coordinator.Group{Kind: rapid.SampledFrom(kinds).Draw(t, "kind"), Block: h * mult}
		switch g.Kind {
		case coordinator.SlidingWindow, coordinator.SlidingWindowMLA:
			g.Window = rapid.IntRange(1, 6*g.Block).Draw(t, "window")
		case coordinator.ChunkedLocal:
			g.Chunk = rapid.IntRange(1, 6*g.Block).Draw(t, "chunk")
		}
		g.Eagle = k.eagle && rapid.Bool().Draw(t, "eagle group")
		w.l.Groups = append(w.l.Groups, g)
		sched = lcm(sched, g.Block)
	}
	if !k.chunked && rapid.IntRange(0, 9).Draw(t, "double") == 0 {
		sched *= 2
	}
	w.l.HashUnit, w.l.Scheduler = h, sched
	w.l.Eagle = k.eagle && rapid.Bool().Draw(t, "eagle")
	w.l.Partial = k.partial
	w.units = rapid.IntRange(0, 60).Draw(t, "units")
	for g, group := range w.l.Groups {
		step := group.Block / h
		if k.partial {
			step = 1
		}
		holes := rapid.IntRange(0, 9).Draw(t, "holes")
		for u := step - 1; u < w.units; u += step {
			if rapid.IntRange(0, 9).Draw(t, "hole") >= holes {
				w.held[[2]int{g, u}] = true
			}
		}
	}
	return w
}

func lcm(a, b int) int {
	x, y := a, b
	for y != 0 {
		x, y = y, x%y
	}
	return a / x * b
}

func (w *world) hit(t *rapid.T, o coordinator.Options, q coordinator.Query) coordinator.Result {
	c, err := coordinator.New(w.l, o)
	if err != nil {
		t.Fatal(err)
	}
	var want coordinator.Result
	for i, p := range w.presences(c) {
		var r coordinator.Result
		if err := c.Hit(&r, p, q); err != nil {
			t.Fatal(err)
		}
		if i > 0 && (r.Tokens != want.Tokens || !slices.Equal(r.Masks, want.Masks)) {
			t.Fatalf("set %d: %d %v, others %d %v", i, r.Tokens, runLengths(r.Masks), want.Tokens, runLengths(want.Masks))
		}
		want = r
	}
	return want
}

func (w *world) presences(c *coordinator.Coordinator) []coordinator.Presence {
	runs := coordinator.NewRuns(c)
	for at := range w.held {
		runs.AddUnits(at[0], at[1], at[1]+1)
	}
	remote := coordinator.NewRemote(c, coordinator.RemoteOptions{Batch: 3})
	remote.Reset(&fakeStore{has: w.has})
	return []coordinator.Presence{coordinator.Scan(w.has), runs, remote}
}

func (w *world) drawMax(t *rapid.T) int {
	return rapid.IntRange(0, w.units*w.l.HashUnit).Draw(t, "max tokens")
}

// Every hit, mask and kind of set agrees with a walk over blocks, as both
// releases, with and without EAGLE and partial hits.
func TestHitIsNaive(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		release := rapid.SampledFrom([]coordinator.Release{coordinator.VLLM033, coordinator.VLLM023}).Draw(t, "release")
		w := drawWorld(t, worldKind{
			eagle:   rapid.Bool().Draw(t, "eagle"),
			partial: release != coordinator.VLLM023 && rapid.Bool().Draw(t, "partial"),
		})
		q := coordinator.Query{Units: w.units, MaxTokens: w.drawMax(t), NoEagle: rapid.Bool().Draw(t, "no eagle")}
		got := w.hit(t, coordinator.Options{Release: release}, q)
		tokens, lists := newNaive(w.l, release, w.units, w.has).find(q.MaxTokens, !q.NoEagle)
		if got.Tokens != tokens {
			t.Fatalf("hit %d, naive %d; %+v", got.Tokens, tokens, w.l)
		}
		for g := range lists {
			if m := got.Masks[g].AppendBools(nil); !slices.Equal(m, lists[g]) {
				t.Fatalf("group %d: mask %v, naive %v", g, m, lists[g])
			}
		}
	})
}

// A hit is the longest length at which every group can continue. With EAGLE each flagged group must also
// have the block behind it, which it drops. Each block of the hit's masks is stored, and a second query
// with the hit as its limit gives the same hit.
func TestHitIsMaximal(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		eagle := rapid.Bool().Draw(t, "eagle")
		w := drawWorld(t, worldKind{eagle: eagle, chunked: !eagle && rapid.Bool().Draw(t, "chunked")})
		o := coordinator.Options{}
		limit := w.drawMax(t)
		got := w.hit(t, o, coordinator.Query{Units: w.units, MaxTokens: limit})
		n := newNaive(w.l, o.Release, w.units, w.has)
		want := limit / w.l.Scheduler * w.l.Scheduler
		for !n.canAllEnd(want) || eagle && !n.canDrop(want, limit) {
			want -= w.l.Scheduler
		}
		if got.Tokens != want {
			t.Fatalf("hit %d, longest %d; %+v", got.Tokens, want, w.l)
		}
		w.checkMasks(t, got)
		again := w.hit(t, o, coordinator.Query{Units: w.units, MaxTokens: got.Tokens, NoEagle: true})
		if again.Tokens != got.Tokens || !slices.Equal(again.Masks, got.Masks) {
			t.Fatalf("asked again below %d: %d", got.Tokens, again.Tokens)
		}
	})
}

func (n *naive) canAllEnd(tokens int) bool {
	for g := range n.l.Groups {
		if !n.canEnd(g, tokens) {
			return false
		}
	}
	return true
}

// canDrop reports whether the groups that EAGLE flags have a block beyond the
// hit, which they match and drop. If there is only one spec group, that block must lie
// within the limit of the query.
func (n *naive) canDrop(tokens, limit int) bool {
	for i := range n.sets {
		s := &n.sets[i]
		b := s.g.Block
		next := tokens/b + 1
		limit := limit
		if len(n.sets) > 1 {
			limit = n.units * n.l.HashUnit
		}
		if tokens > 0 && s.eagle && s.g.Kind != coordinator.Mamba && (next*b > limit || !n.block(s, next-1)) {
			return false
		}
	}
	return true
}

// checkMasks checks that a hit's masks name only stored blocks, and end at it.
func (w *world) checkMasks(t *rapid.T, r coordinator.Result) {
	for g := range r.Masks {
		m, b := &r.Masks[g], w.l.Groups[g].Block
		if want := (r.Tokens + b - 1) / b; m.Len() != want {
			t.Fatalf("group %d: a mask of %d blocks for a hit of %d tokens", g, m.Len(), r.Tokens)
		}
		for run := range m.Runs() {
			for i := run.Start; i < run.End; i++ {
				if u := (i+1)*(b/w.l.HashUnit) - 1; !w.has(g, u) {
					t.Fatalf("group %d: block %d is to be loaded but not stored (hit %d)", g, i, r.Tokens)
				}
			}
		}
	}
}

// With EAGLE, too, the masks of a corrected hit name only stored blocks and equal LoadMask's for
// its length, and every group can continue at the hit.
func TestEagleHitLoads(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := drawWorld(t, worldKind{eagle: true})
		o := coordinator.Options{}
		q := coordinator.Query{Units: w.units, MaxTokens: w.drawMax(t)}
		got := w.hit(t, o, q)
		w.checkMasks(t, got)
		c, err := coordinator.New(w.l, o)
		if err != nil {
			t.Fatal(err)
		}
		load, err := c.LoadMask(nil, w.units, got.Tokens)
		if err != nil || !slices.Equal(load, got.Masks) {
			t.Fatalf("load masks %v, hit's %v, error %v", runLengths(load), runLengths(got.Masks), err)
		}
		if !newNaive(w.l, o.Release, w.units, w.has).canAllEnd(got.Tokens) {
			t.Fatalf("a group cannot continue at %d", got.Tokens)
		}
	})
}

// One more stored block never shortens a hit of this package, or of the releases without
// EAGLE. With EAGLE both releases verify a group's EAGLE block only once, although another
// group may shorten the hit afterwards. So one more block can cost a hit there.
func TestHitIsMonotone(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		release := rapid.SampledFrom([]coordinator.Release{0, coordinator.VLLM033, coordinator.VLLM023}).Draw(t, "release")
		k := worldKind{
			eagle:   rapid.Bool().Draw(t, "eagle"),
			partial: release != coordinator.VLLM023 && rapid.Bool().Draw(t, "partial"),
		}
		w := drawWorld(t, k)
		o := coordinator.Options{Release: release}
		if k.eagle {
			o.Release = 0
		}
		q := coordinator.Query{Units: w.units, MaxTokens: w.drawMax(t)}
		before := w.hit(t, o, q).Tokens
		if w.units == 0 {
			return
		}
		g := rapid.IntRange(0, len(w.l.Groups)-1).Draw(t, "group")
		u := rapid.IntRange(0, w.units-1).Draw(t, "unit")
		w.held[[2]int{g, u}] = true
		if after := w.hit(t, o, q).Tokens; after < before {
			t.Fatalf("group %d unit %d stored: hit %d, before %d; %+v", g, u, after, before, w.l)
		}
	})
}

// The blocks that StoreMask selects of a prompt are enough for a hit at its end, and LookupMask
// names every block on which such a hit ends. Mamba states are not moved by these masks.
func TestStoredMaskHits(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := drawWorld(t, worldKind{eagle: rapid.Bool().Draw(t, "eagle")})
		o := coordinator.Options{}
		c, err := coordinator.New(w.l, o)
		if err != nil {
			t.Fatal(err)
		}
		aligned := c.AlignLookupLength(w.units * w.l.HashUnit)
		masks, err := c.StoreMask(nil, coordinator.StoreQuery{Tokens: aligned})
		if err != nil {
			t.Fatal(err)
		}
		clear(w.held)
		for g := range masks {
			b := w.l.Groups[g].Block
			if masks[g].Len() != aligned/b {
				t.Fatalf("group %d: store mask of %d blocks, want %d", g, masks[g].Len(), aligned/b)
			}
			mamba := w.l.Groups[g].Kind == coordinator.Mamba
			for i := range masks[g].Len() {
				if masks[g].At(i) || mamba {
					w.held[[2]int{g, (i+1)*(b/w.l.HashUnit) - 1}] = true
				}
			}
		}
		want := aligned
		if hasEagle(&w.l) { // the last block is computed again
			want = max(0, aligned-w.l.Scheduler)
		}
		got := w.hit(t, o, coordinator.Query{Units: aligned / w.l.HashUnit, MaxTokens: aligned})
		if got.Tokens < want {
			t.Fatalf("hit %d of %d stored tokens; %+v", got.Tokens, aligned, w.l)
		}
		checkLookup(t, c, aligned, got, hasEagle(&w.l))
	})
}

func hasEagle(l *coordinator.Layout) bool {
	return l.Eagle || slices.ContainsFunc(l.Groups, func(g coordinator.Group) bool { return g.Eagle })
}

func checkLookup(t *rapid.T, c *coordinator.Coordinator, aligned int, hit coordinator.Result, eagle bool) {
	lookup, err := c.LookupMask(nil, aligned)
	if err != nil {
		t.Fatal(err)
	}
	for g := range lookup {
		m := &hit.Masks[g]
		for run := range m.Runs() {
			if !eagle && !lookup[g].At(run.End-1) {
				t.Fatalf("group %d: the hit ends on block %d, which is not looked up", g, run.End-1)
			}
		}
	}
}

// The ways to read a mask agree, wherever tails and boundaries touch.
func TestMaskReadings(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := drawWorld(t, worldKind{eagle: rapid.Bool().Draw(t, "eagle")})
		w.l.HasRetention = rapid.Bool().Draw(t, "sparse")
		w.l.Retention = rapid.IntRange(0, 4).Draw(t, "segments") * w.l.Scheduler
		c, err := coordinator.New(w.l, coordinator.Options{})
		if err != nil {
			t.Fatal(err)
		}
		q := coordinator.StoreQuery{
			Tokens: c.AlignLookupLength(w.units * w.l.HashUnit), Start: w.drawMax(t),
			Prompt: w.units * w.l.HashUnit, HasPrompt: rapid.Bool().Draw(t, "prompt"),
		}
		masks, err := c.StoreMask(nil, q)
		if err != nil {
			t.Fatal(err)
		}
		for g := range masks {
			checkMask(t, &masks[g])
		}
	})
}

func checkMask(t *rapid.T, m *coordinator.Mask) {
	bools := m.AppendBools(nil)
	count, runs := 0, 0
	for i, set := range bools {
		if set != m.At(i) {
			t.Fatalf("block %d: At says %v", i, !set)
		}
		if set {
			count++
			if i == 0 || !bools[i-1] {
				runs++
			}
		}
	}
	for range m.Runs() {
		runs--
	}
	total := 0
	for _, n := range m.AppendRunLengths(nil) {
		total += n
	}
	if len(bools) != m.Len() || total != m.Len() || count != m.Count() || runs != 0 || m.At(-1) || m.At(m.Len()) {
		t.Fatalf("%d blocks, %d bools, %d in run lengths; %d set, Count %d", m.Len(), len(bools), total, count, m.Count())
	}
}
