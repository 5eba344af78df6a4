// SPDX-License-Identifier: Apache-2.0

package costmodel

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// List prints the profiles, one per line.
func List(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, name := range Names {
		p, err := Get(name)
		if err != nil {
			return err
		}
		fmt.Fprintf(t, "%s\t%d x %s\t%s\t%d KV blocks of %d tokens\n", name, p.TP, p.GPU.Name, p.Model.Name, p.KVBlocks(), p.BlockTokens)
	}
	return t.Flush()
}

// Print prints the profile's constants with their sources, and the arithmetic of capacity, steps and transfers.
func (p *Profile) Print(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	m, g := &p.Model, &p.GPU
	line := func(name, format string, args ...any) { fmt.Fprintf(t, "%s\t%s\n", name, fmt.Sprintf(format, args...)) }
	line("profile", "%s: %s on %d x %s", p.Name, m.Name, p.TP, g.Name)
	line("GPU", "%.0f GB/s, %.0f TFLOPS in bf16, %.1f GiB", g.Bandwidth/1e9, g.FLOPS/1e12, g.MemoryGiB)
	line("steps", "%d tokens and %d sequences at most, blocks of %d tokens", p.TokenBudget, p.MaxSeqs, p.BlockTokens)
	fmt.Fprintf(t, "\nconstant\tvalue\tfrom\n")
	for _, term := range Terms {
		from := term.What
		if figure, ok := p.Calibrated[term.Name]; ok {
			from = "calibrated: " + figure
		} else if term.High > 0 {
			from = fmt.Sprintf("assumed, %v to %v: %s", term.Low, term.High, term.What)
		}
		fmt.Fprintf(t, "%s\t%.5g %s\t%s\n", term.Name, *term.at(&p.Constants), term.Unit, from)
	}
	fmt.Fprintf(t, "\narithmetic\t\t\n")
	c, tp := &p.Constants, float64(p.TP)
	const gb, gib = 1e9, 1 << 30
	line("weights in memory", "%.2f GB", m.WeightBytes()/gb)
	line("weights that a step reads", "%.2f GB: layers and head", m.StepBytes()/gb)
	line("KV of a token", "2 x %d layers x %d KV heads x %d x 2 B = %.0f B", m.Layers, m.KVHeads, m.HeadDim, m.KVBytes())
	line("KV blocks", "(%.1f GiB x %.2f - %.1f) x %d - %.2f GiB of weights = %.2f GiB, / %.0f KiB = %d blocks, %d tokens", g.MemoryGiB, c.MemoryUtilization,
		c.ActivationGiB, p.TP, m.WeightBytes()/gib, p.kvBytes()/gib, p.blockBytes()/1024, p.KVBlocks(), p.KVBlocks()*p.BlockTokens)
	line("a prompt token", "2 x %.3f G parameters = %.2f GFLOP, and %.0f for each token before it", m.LayerParameters/1e9, m.LinearFLOPs()/1e9, m.AttentionFLOPs())
	var one, many, full Work
	one.Add(1000, 1, true)
	for range 64 {
		many.Add(1000, 1, true)
	}
	full.Add(0, p.TokenBudget, true)
	for _, s := range []struct {
		name string
		w    Work
	}{{"decode of 1 sequence, 1,000 tokens", one}, {"decode of 64", many}, {fmt.Sprintf("prefill of %d tokens", p.TokenBudget), full}} {
		d := p.Cost(s.w)
		line("step: "+s.name, "host %.2f + linear %.2f + attention %.2f + head %.2f + weights %.2f + KV %.2f + all-reduce %.2f = %.2f ms", d.Host*1e3, d.Linear*1e3,
			d.Attention*1e3, d.Head*1e3, d.Weights*1e3, d.KV*1e3, d.AllReduce*1e3, d.Total().Seconds()*1e3)
	}
	line("floor of a decode step", "%.2f GB / (%.0f GB/s x %d) = %.2f ms at peak", m.StepBytes()/gb, g.Bandwidth/gb, p.TP, m.StepBytes()/(g.Bandwidth*tp)*1e3)
	blocks := (1000 + p.BlockTokens - 1) / p.BlockTokens
	link, wait := p.Transfer(blocks, 1)
	line("transfer of 1,000 tokens", "%d pieces, %.1f MB: %.2f ms of the network and %.2f ms besides", 2*m.Layers, float64(p.TransferBytes(blocks))/1e6, link.Seconds()*1e3, wait.Seconds()*1e3)
	return t.Flush()
}
