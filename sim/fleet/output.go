// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"encoding/csv"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"text/tabwriter"
)

// Print prints the points as a table, and from how many nodes on the store binds.
func Print(w io.Writer, points []Point) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "nodes\trequests\thits\tRAM\tstore\tlate\talone\tceiling\tread GB/s\twritten\tbusy\tkeys asked\tGETs\tPUTs a request\tTTFT mean\tP99 ms\tengines busy")
	for i := range points {
		p := &points[i]
		fmt.Fprintf(t, "%d\t%d\t%.1f %%\t%.1f %%\t%.1f %%\t%.1f %%\t%.1f %%\t%.1f %%\t%.2f\t%.2f\t%.0f %%, %.0f %%\t%.1f\t%.1f\t%.1f\t%.0f\t%.0f\t%.0f %%\n", p.Nodes, p.Requests, 100*p.Hit,
			100*p.of(p.RAMBlocks), 100*p.of(p.StoreBlocks), 100*p.of(p.LateBlocks), 100*p.Alone, 100*p.Ceiling, p.ReadGBps, p.WriteGBps, 100*p.ReadBusy, 100*p.WriteBusy,
			p.each(p.Stats), p.each(p.Gets), p.each(p.Puts), p.MeanTTFT, p.P99TTFT, 100*p.EngineBusy)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for i := range points {
		if p := &points[i]; p.Binds != "" {
			_, err := fmt.Fprintf(w, "the store's bandwidth binds from %d nodes on (%s)\n", p.Nodes, p.Binds)
			return err
		}
	}
	_, err := fmt.Fprintln(w, "the store's bandwidth does not bind")
	return err
}

func (p *Point) of(blocks int) float64 { return share(blocks, p.Blocks) }
func (p *Point) each(n int) float64    { return share(n, p.Requests) }

// WriteCSV writes the points with a line of names.
func WriteCSV(w io.Writer, points []Point) error {
	c := csv.NewWriter(w)
	rows := [][]string{{
		"nodes", "requests", "blocks", "virtual_seconds", "ram_blocks", "store_blocks", "late_blocks", "hit", "alone", "ceiling", "stats", "gets", "heads", "puts", "doubled",
		"skipped", "spared", "read_gbps", "write_gbps", "read_busy", "write_busy", "engine_busy", "mean_ttft_ms", "p99_ttft_ms", "binds",
	}}
	n := strconv.Itoa
	x := func(v float64) string { return strconv.FormatFloat(v, 'g', 8, 64) }
	for i := range points {
		p := &points[i]
		rows = append(rows, []string{
			n(p.Nodes), n(p.Requests), n(p.Blocks), x(p.Seconds), n(p.RAMBlocks), n(p.StoreBlocks), n(p.LateBlocks), x(p.Hit), x(p.Alone), x(p.Ceiling), n(p.Stats), n(p.Gets),
			n(p.Heads), n(p.Puts), n(p.Doubled), n(p.Skipped), n(p.Spared), x(p.ReadGBps), x(p.WriteGBps), x(p.ReadBusy), x(p.WriteBusy), x(p.EngineBusy), x(p.MeanTTFT),
			x(p.P99TTFT), p.Binds,
		})
	}
	return c.WriteAll(rows)
}

// Sizes of the plot, pixels.
const (
	panelWidth, panelHeight = 420.0, 260.0
	margin                  = 56.0
)

// curve is a line of a panel.
type curve struct {
	name, colour string
	of           func(*Point) float64
}

// WriteSVG draws shares of hits, and what passes between fleet and store, over the nodes.
func WriteSVG(w io.Writer, points []Point) error {
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %.0f %.0f" font-family="sans-serif" font-size="12"><rect width="100%%" height="100%%" fill="white"/>`+"\n",
		2*(panelWidth+margin)+margin, panelHeight+3.2*margin)
	draw(&b, margin, "hits, % of the prompts' blocks", points, []curve{
		{"RAM and store", "#1f77b4", func(p *Point) float64 { return 100 * p.Hit }},
		{"of these, RAM of the node", "#2ca02c", func(p *Point) float64 { return 100 * p.of(p.RAMBlocks) }},
		{"without the store", "#d62728", func(p *Point) float64 { return 100 * p.Alone }},
		{"room for all", "#7f7f7f", func(p *Point) float64 { return 100 * p.Ceiling }},
	})
	draw(&b, 2*margin+panelWidth, "between fleet and store, GB/s", points, []curve{
		{"read", "#1f77b4", func(p *Point) float64 { return p.ReadGBps }},
		{"written", "#ff7f0e", func(p *Point) float64 { return p.WriteGBps }},
	})
	b.WriteString("</svg>\n")
	_, err := io.WriteString(w, b.String())
	return err
}

// draw draws one panel; the nodes are on a logarithmic axis.
func draw(b *strings.Builder, left float64, title string, points []Point, curves []curve) {
	high, low, wide, top := 0.0, 0.0, 1.0, margin*0.7
	for i := range points {
		for _, c := range curves {
			high = max(high, c.of(&points[i]))
		}
	}
	if !(high > 0) {
		high = 1
	}
	if n := len(points); n > 0 {
		low = math.Log2(float64(points[0].Nodes))
		wide = max(1, math.Log2(float64(points[n-1].Nodes))-low)
	}
	atX := func(p *Point) float64 { return left + (math.Log2(float64(p.Nodes))-low)/wide*panelWidth }
	atY := func(v float64) float64 { return top + panelHeight*(1-v/high) }
	fmt.Fprintf(b, `<text x="%.0f" y="%.0f" font-weight="bold">%s</text><path d="M%.1f %.1fV%.1fH%.1f" fill="none" stroke="black"/>`+"\n", left, top-10, title, left, top, top+panelHeight, left+panelWidth)
	for i := range 5 {
		v := high * float64(i) / 4
		fmt.Fprintf(b, `<path d="M%.1f %.1fh%.0f" stroke="#ddd"/><text x="%.1f" y="%.1f" text-anchor="end">%.4g</text>`+"\n", left, atY(v), panelWidth, left-4, atY(v)+4, v)
	}
	for i := range points {
		fmt.Fprintf(b, `<text x="%.1f" y="%.1f" text-anchor="middle">%d</text>`+"\n", atX(&points[i]), top+panelHeight+16, points[i].Nodes)
	}
	fmt.Fprintf(b, `<text x="%.1f" y="%.1f" text-anchor="middle">nodes</text>`+"\n", left+panelWidth/2, top+panelHeight+32)
	for i, c := range curves {
		var line strings.Builder
		for k := range points {
			fmt.Fprintf(&line, "%.1f,%.1f ", atX(&points[k]), atY(c.of(&points[k])))
		}
		fmt.Fprintf(b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="2"/>`+"\n", strings.TrimSpace(line.String()), c.colour)
		y := top + panelHeight + 52 + 18*float64(i)
		fmt.Fprintf(b, `<rect x="%.0f" y="%.0f" width="14" height="4" fill="%s"/><text x="%.0f" y="%.0f">%s</text>`+"\n", left, y, c.colour, left+20, y+6, c.name)
	}
}
