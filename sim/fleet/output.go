// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"encoding/csv"
	"fmt"
	"io"
	"strconv"
	"text/tabwriter"

	"github.com/kvasir-kv/kvasir/internal/plot"
)

// Print prints the points as a table, and from which number of nodes on the store's bandwidth binds.
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

// WriteCSV writes the points as CSV, with a first line of column names.
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

// curve is one line of a panel.
type curve struct {
	name string
	of   func(*Point) float64
}

// WriteSVG draws, by the number of nodes, the shares of hits, and what passes between fleet and store.
func WriteSVG(w io.Writer, points []Point) error {
	return plot.Write(w,
		panel("hits, % of the prompts' blocks", points, []curve{
			{"RAM and store", func(p *Point) float64 { return 100 * p.Hit }},
			{"without the store", func(p *Point) float64 { return 100 * p.Alone }},
			{"RAM of the node", func(p *Point) float64 { return 100 * p.of(p.RAMBlocks) }},
			{"room for all", func(p *Point) float64 { return 100 * p.Ceiling }},
		}),
		panel("between fleet and store, GB/s", points, []curve{
			{"read", func(p *Point) float64 { return p.ReadGBps }},
			{"written", func(p *Point) float64 { return p.WriteGBps }},
		}))
}

func panel(title string, points []Point, curves []curve) plot.Panel {
	p := plot.Panel{Title: title, XLabel: "nodes"}
	for _, c := range curves {
		l := plot.Line{Name: c.name}
		for i := range points {
			l.X, l.Y = append(l.X, float64(points[i].Nodes)), append(l.Y, c.of(&points[i]))
		}
		p.Lines = append(p.Lines, l)
	}
	return p
}
