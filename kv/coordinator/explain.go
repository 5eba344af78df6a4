// SPDX-License-Identifier: Apache-2.0

package coordinator

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"iter"
	"slices"
	"strings"
	"text/tabwriter"
)

// Explanation is a model, a prompt and a store to show to a person.
type Explanation struct {
	Layout  Layout
	Options Options
	Prompt  int // tokens, at most 4 Mi
	Units   int // hash units; default those of Prompt

	// Stored is what the store has, by group: runs of hash units. nil means the blocks that StoreMask keeps of this prompt.
	Stored [][]Run

	// Remote also shows how many batches of keys a lookup would send to a store that answers over a network.
	Remote bool

	Cells int  // width of the picture; default 64, at most 1024
	ASCII bool // no block characters
}

const (
	maxExplained = 4 << 20 // tokens, and hash units, of a prompt; an Explanation with more is refused
	maxCells     = 1024    // cells of a picture; a request for more is refused
)

// Explain writes, per group, which tokens of the prompt are stored, loaded and skipped: a
// table, then a picture in which all groups share one scale of tokens.
func Explain(w io.Writer, e Explanation) error {
	v, err := e.decide()
	if err != nil {
		return err
	}
	var b bytes.Buffer
	v.table(&b)
	v.verdict(&b)
	if e.Remote {
		if err := v.remote(&b); err != nil {
			return err
		}
	}
	v.picture(&b)
	_, err = w.Write(b.Bytes())
	return err
}

// view is an Explanation and the hit that it shows.
type view struct {
	Explanation
	c      *Coordinator
	stored *Runs
	handed bool // store() added Mamba states, which StoreMask does not keep
	hit    Result
	limit  int // Query.MaxTokens of the hit
}

func (e Explanation) decide() (*view, error) {
	if e.Prompt < 0 || e.Prompt > maxExplained || e.Units < 0 || e.Units > maxExplained {
		return nil, limitf("a prompt of %d tokens: between 0 and %d can be shown", e.Prompt, maxExplained)
	}
	if e.Cells < 0 || e.Cells > maxCells {
		return nil, limitf("%d cells: at most %d can be shown", e.Cells, maxCells)
	}
	e.Cells = cmp.Or(e.Cells, 64)
	c, err := New(e.Layout, e.Options)
	if err != nil {
		return nil, err
	}
	e.Units = cmp.Or(e.Units, e.Prompt/e.Layout.HashUnit)
	v := &view{Explanation: e, c: c, stored: NewRuns(c)}
	if e.Stored == nil {
		err = v.store()
	} else {
		for g, runs := range e.Stored[:min(len(e.Stored), c.Groups())] {
			for _, run := range runs {
				v.stored.AddUnits(g, run.Start, run.End)
			}
		}
	}
	if err != nil {
		return nil, err
	}
	// The engine computes at least the last token itself.
	v.limit = min(c.AlignLookupLength(e.Prompt-1), e.Units*e.Layout.HashUnit)
	err = c.Hit(&v.hit, v.stored, Query{Units: e.Units, MaxTokens: v.limit})
	if refusal(err) { // a picture shows it
		v.hit.Reason, err = err, nil
	}
	return v, err
}

// store fills v.stored with what StoreMask keeps of the prompt. StoreMask keeps no Mamba
// states, because engines store them by another path. store adds them at the lengths at
// which a repeat of the prompt can resume.
func (v *view) store() error {
	l := &v.Layout
	aligned := v.Units * l.HashUnit / l.Scheduler * l.Scheduler
	q := StoreQuery{Tokens: aligned}
	if !v.c.follows(repeatsMasks) {
		q.Prompt, q.HasPrompt = v.Prompt, true
	}
	masks, err := v.c.StoreMask(nil, q)
	if err != nil {
		return err
	}
	for g := range masks {
		if l.Groups[g].Kind.isScratch() {
			continue
		}
		for r := range masks[g].Runs() {
			v.stored.Add(g, r.Start, r.End)
		}
		if l.Groups[g].Kind == Mamba && !v.c.follows(repeatsMasks) {
			v.handed = true
			for _, end := range [...]int{aligned, v.c.AlignLookupLength(v.Prompt - 1), aligned - l.Scheduler} {
				if i := end / l.Groups[g].Block; i > 0 {
					v.stored.Add(g, i-1, i)
				}
			}
		}
	}
	return nil
}

// describe names a group as a person would.
func (g *Group) describe() string {
	s := g.Kind.String()
	switch {
	case g.Kind.isWindow():
		s = fmt.Sprintf("%s, window %d", s, g.Window)
		if g.Extra > 0 {
			s += fmt.Sprintf("+%d", g.Extra)
		}
	case g.Kind == ChunkedLocal:
		s = fmt.Sprintf("%s of %d", s, g.Chunk)
	case g.Kind == Mamba:
		s = fmt.Sprintf("%s, %v", s, g.Mode)
	}
	if g.Uniform {
		s += ", uniform"
	}
	if g.Eagle {
		s += ", eagle"
	}
	return s
}

func (v *view) table(b *bytes.Buffer) {
	fmt.Fprintf(b, "rules of %v; prompt %d tokens; hash unit %d; hits in steps of %d tokens\n\n",
		v.Options.Release, v.Prompt, v.Layout.HashUnit, v.c.align)
	t := tabwriter.NewWriter(b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "group\tkind\tblock\tblocks\tstored\tloaded\tskipped")
	for g := range v.Layout.Groups {
		group := &v.Layout.Groups[g]
		loaded := v.hit.Masks[g].Count()
		stored := 0
		for r := range v.storedRuns(g) {
			stored += r.End - r.Start
		}
		fmt.Fprintf(t, "%d\t%s\t%d\t%d\t%d\t%d\t%d\n", g, group.describe(), group.Block,
			v.c.Blocks(g, v.Units), stored, loaded, max(v.hitBlocks(g)-loaded, 0))
	}
	t.Flush()
}

// hitBlocks returns how many blocks of group g lie in the hit, the last one perhaps in part.
func (v *view) hitBlocks(g int) int {
	if v.c.bySet[g] < 0 {
		return 0
	}
	return ceilDiv(v.hit.Tokens, v.Layout.Groups[g].Block)
}

// storedRuns yields the stored blocks of the prompt.
func (v *view) storedRuns(g int) iter.Seq[Run] {
	n := v.c.Blocks(g, v.Units)
	return func(yield func(Run) bool) {
		for _, r := range v.stored.Blocks(g) {
			if r.End = min(r.End, n); r.Start < r.End && !yield(r) {
				return
			}
		}
	}
}

func (v *view) verdict(b *bytes.Buffer) {
	fmt.Fprintf(b, "\nhit: %d of %d tokens", v.hit.Tokens, v.Prompt)
	if v.hit.Reason != nil {
		fmt.Fprintf(b, " (%v)", v.hit.Reason)
	} else {
		fmt.Fprintf(b, "; %d are left to compute", max(v.Prompt-v.hit.Tokens, 0))
	}
	b.WriteByte('\n')
	if v.handed {
		b.WriteString("Mamba states reach the store when the engine hands them over; those at the prompt's end are shown.\n")
	}
}

// remote repeats the lookup over a Remote and writes how many batches and keys it needed.
func (v *view) remote(b *bytes.Buffer) error {
	r := NewRemote(v.c, RemoteOptions{})
	r.Reset(asked{v.stored})
	var hit Result
	err := v.c.Hit(&hit, r, Query{Units: v.Units, MaxTokens: v.limit})
	if err != nil && !refusal(err) {
		return err
	}
	all := 0
	for g := range v.Layout.Groups {
		all += v.c.Blocks(g, v.Units)
	}
	batches, keys := r.Asked()
	fmt.Fprintf(b, "over a network: %d questions for %d keys of %d blocks find a hit of %d tokens\n", batches, keys, all, hit.Tokens)
	return nil
}

// asked makes a Querier of a Runs.
type asked struct{ r *Runs }

// Exists implements Querier.
func (a asked) Exists(probes []Probe, present []bool) error {
	for i, p := range probes {
		runs, at := a.r.blocks[p.Group], p.Block
		if p.Block < 0 {
			runs, at = a.r.inside[p.Group], p.Unit
		}
		j := before(runs, at+1)
		present[i] = j >= 0 && runs[j].End > at
	}
	return nil
}

// picture draws each group twice on one scale of tokens.
func (v *view) picture(b *bytes.Buffer) {
	tokens := max(v.Units*v.Layout.HashUnit, v.hit.Tokens)
	if tokens == 0 || len(v.Layout.Groups) == 0 {
		return
	}
	cell := ceilDiv(tokens, v.Cells)
	glyphs := [3]string{"·", "▒", "█"}
	if v.ASCII {
		glyphs = [3]string{".", "+", "#"}
	}
	cells := ceilDiv(tokens, cell)
	b.WriteByte('\n')
	for g := range v.Layout.Groups {
		group := &v.Layout.Groups[g]
		fmt.Fprintf(b, "group %d, %s\n", g, group.describe())
		drawCells(b, "  stored ", v.storedRuns(g), group.Block, cell, tokens, cells, glyphs)
		drawCells(b, "  loaded ", v.hit.Masks[g].Runs(), group.Block, cell, v.hit.Tokens, cells, glyphs)
	}
	if at := ceilDiv(v.hit.Tokens, cell); at > 0 {
		fmt.Fprintf(b, "%s^ hit ends\n", strings.Repeat(" ", len("  stored |")+at-1))
	}
	fmt.Fprintf(b, "one cell is %d tokens: %s all, %s some, %s none\n", cell, glyphs[2], glyphs[1], glyphs[0])
}

// drawCells draws one row of `cells` cells, each of which stands for `cell` tokens, after its label. A cell gets the first glyph if the
// runs, of blocks of `block` tokens, cover none of its tokens, the second if they cover some, and the third if they cover all. Cells beyond
// the first `tokens` tokens stay blank.
func drawCells(b *bytes.Buffer, label string, runs iter.Seq[Run], block, cell, tokens, cells int, glyphs [3]string) {
	covered := slices.Repeat([]int{0}, cells)
	for r := range runs {
		lo, hi := r.Start*block, min(r.End*block, tokens)
		for lo < hi {
			i := lo / cell
			next := min((i+1)*cell, hi)
			covered[i] += next - lo
			lo = next
		}
	}
	fmt.Fprintf(b, "%s|", label)
	for i, n := range covered {
		size := min((i+1)*cell, tokens) - i*cell
		switch {
		case size <= 0:
			b.WriteByte(' ')
		case n == 0:
			b.WriteString(glyphs[0])
		case n < size:
			b.WriteString(glyphs[1])
		default:
			b.WriteString(glyphs[2])
		}
	}
	b.WriteString("|\n")
}
