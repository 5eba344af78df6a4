// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"context"
	"encoding/hex"
	"fmt"
	"io"

	"github.com/kvasir-kv/kvasir/kv/coordinator"
)

// Present asks a store which blocks of a prompt it has. It returns, for each group, the runs of hash units whose blocks every rank has
// stored.
func (s *Scheduler) Present(ctx context.Context, d Directory, p *Prompt) ([][]coordinator.Run, error) {
	out := make([][]coordinator.Run, s.c.Groups())
	q := &querier{ctx: ctx, s: s, d: d, p: p}
	for g := range out {
		n := s.c.Blocks(g, p.Units())
		for from := 0; from < n; from += s.o.Batch {
			var probes []coordinator.Probe
			for i := from; i < min(from+s.o.Batch, n); i++ {
				probes = append(probes, coordinator.Probe{Group: g, Block: i, Unit: s.c.Units(g, i).End - 1})
			}
			present := make([]bool, len(probes))
			if err := q.Exists(probes, present); err != nil {
				return nil, err
			}
			for i, there := range present {
				u := s.c.Units(g, from+i)
				last := len(out[g]) - 1
				switch {
				case !there:
				case last >= 0 && out[g][last].End == u.Start:
					out[g][last].End = u.End
				default:
					out[g] = append(out[g], u)
				}
			}
		}
	}
	return out, nil
}

// Alone returns how many leading tokens, of at most `most`, the group g could load if it were the only group. stored is the result of
// Present.
func (s *Scheduler) Alone(g int, stored [][]coordinator.Run, units, most int) (int, error) {
	l := s.c.Layout()
	l.Groups = []coordinator.Group{s.c.Group(g)}
	c, err := coordinator.New(l, coordinator.Options{Release: s.o.Release})
	if err != nil {
		return 0, err
	}
	have := coordinator.NewRuns(c)
	for _, r := range stored[g] {
		have.AddUnits(0, r.Start, r.End)
	}
	var hit coordinator.Result
	err = c.Hit(&hit, have, coordinator.Query{Units: units, MaxTokens: max(most, 0)})
	return hit.Tokens, err
}

// Explain writes to w what a store has of a prompt, how many tokens each group and all groups together could load, what a load would
// move, and how many questions an engine would ask.
func (s *Scheduler) Explain(ctx context.Context, w io.Writer, d Directory, p *Prompt, ascii bool) error {
	stored, err := s.Present(ctx, d, p)
	if err != nil {
		return err
	}
	if err := coordinator.Explain(w, coordinator.Explanation{
		Layout: s.c.Layout(), Options: coordinator.Options{Release: s.o.Release}, Prompt: p.Tokens, Units: p.Units(), Stored: stored, ASCII: ascii,
	}); err != nil {
		return err
	}
	fmt.Fprintln(w)
	for g := range stored {
		n, err := s.Alone(g, stored, p.Units(), p.Tokens-1)
		if err != nil {
			return err
		}
		fmt.Fprintf(w, "group %d alone could continue from %d tokens; its keys are %sHASH\n", g, n, s.prefixes[g][0])
	}
	hit, err := s.Lookup(ctx, d, p, p.Tokens-1)
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "an engine asks for %d keys in %d questions, and finds %d tokens\n", hit.Keys, hit.Batches, hit.Tokens)
	return nil
}

// maxDigest is the largest length of a digest, in bytes; ParseDigests returns an error for a longer one.
const maxDigest = 64

// ParseDigests makes a Prompt from the hashes of its hash units: hexadecimal words, as vLLM's KV events have them.
func ParseDigests(words []string) (p Prompt, err error) {
	for i, word := range words {
		b, err := hex.DecodeString(word)
		switch {
		case err != nil:
			return Prompt{}, fmt.Errorf("hash %d, %.80q: %w", i+1, word, err)
		case len(b) == 0 || len(b) > maxDigest || i > 0 && len(b) != p.Size:
			return Prompt{}, fmt.Errorf("hash %d has %d bytes: all hashes must be equally long, from 1 to %d bytes", i+1, len(b), maxDigest)
		}
		p.Size = len(b)
		p.Digests = append(p.Digests, b...)
	}
	return p, nil
}
