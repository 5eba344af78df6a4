// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"fmt"
	"io"
	"text/tabwriter"
)

var headings = map[string]string{
	Mooncake:     "MooncakeConnector",
	P2pNccl:      "P2pNcclConnector",
	"difference": "P2pNccl less Mooncake",
}

func printRows(w io.Writer, rows []Row) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	last := ""
	for _, r := range rows {
		if r.Row != last {
			if last != "" {
				fmt.Fprintln(t, "\t\t\t\t")
			}
			fmt.Fprintf(t, "%s\toriginal\tours\terror\t\n", headings[r.Row])
			last = r.Row
		}
		note := r.Use
		if note == "predicted" {
			note = ""
		}
		fmt.Fprintf(t, "%s\t%.2f\t%.2f\t%+.1f %%\t%s\n", r.Figure, r.Original, r.Ours, 100*r.Error, note)
	}
	return t.Flush()
}

// Print prints the table as text.
func (t *Table) Print(w io.Writer) error {
	fmt.Fprintf(w, "%s\n\n", t.Source)
	if err := printRows(w, t.Rows); err != nil {
		return err
	}
	fmt.Fprintln(w)
	if err := printRows(w, t.Differences); err != nil {
		return err
	}
	fmt.Fprintln(w)
	for _, m := range t.MAPE {
		fmt.Fprintf(w, "%s: mean absolute error %.1f %%, largest %s\n", headings[m.Row], 100*m.MAPE, m.Worst)
	}
	out := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	if len(t.Sensitivity) > 0 {
		fmt.Fprintf(out, "\n%s with\tmean absolute error\tlargest\t\n", headings[Mooncake])
		for _, m := range t.Sensitivity {
			note := ""
			if m.Refit {
				note = "others fitted anew"
			}
			fmt.Fprintf(out, "%s\t%.1f %%\t%s\t%s\n", m.What, 100*m.MAPE, m.Worst, note)
		}
	}
	last := ""
	for _, s := range t.Spread {
		title := fmt.Sprintf("%s, %d generated workloads", headings[s.Row], s.Seeds)
		if s.Condition {
			title += fmt.Sprintf(" whose longest output is %d to %d tokens", longestLow, longestHigh)
		}
		if title != last {
			fmt.Fprintf(out, "\t\t\t\t\t\n%s\toriginal\tP5\tmedian\tP95\terror of the median\n", title)
			last = title
		}
		fmt.Fprintf(out, "%s\t%.2f\t%.2f\t%.2f\t%.2f\t%+.1f %%\n", s.Figure, s.Original, s.P5, s.Median, s.P95, 100*s.Error)
	}
	return out.Flush()
}

// PrintShort prints both rows beside those of the original, one line per figure.
func (t *Table) PrintShort(w io.Writer) error {
	out := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(out, "\t%s\tours\t%s\tours\n", headings[Mooncake], headings[P2pNccl])
	by := make(map[string]Row, len(t.Rows))
	for _, r := range t.Rows {
		by[r.Row+r.Figure] = r
	}
	for _, figure := range figureOrder {
		first, second := by[Mooncake+figure], by[P2pNccl+figure]
		fmt.Fprintf(out, "%s\t%.2f\t%.2f\t%.2f\t%.2f\n", figure, first.Original, first.Ours, second.Original, second.Ours)
	}
	return out.Flush()
}

// PrintCalibrated prints derived constants beside those of the profiles.
func PrintCalibrated(w io.Writer, list []Calibrated) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "calibration\tconstant\tvalue\tin the profile\tfrom the figure\twanted\tgot")
	for _, c := range list {
		fmt.Fprintf(t, "%s\t%s\t%.5g\t%.5g\t%s\t%.6g\t%.6g\n", c.Calibration, c.Constant, c.Value, c.Stored, c.Figure, c.Want, c.Got)
	}
	return t.Flush()
}

// Print prints a held-out table as text.
func (c *Check) Print(w io.Writer) error {
	fmt.Fprintf(w, "%s: %s\n\n", c.Table, c.Source)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "row\tfigure\toriginal\tours\terror\t")
	for _, r := range c.Rows {
		note := r.Use
		if note == "judged" {
			note = ""
		}
		fmt.Fprintf(t, "%s\t%s\t%.2f\t%.2f\t%+.1f %%\t%s\n", r.Row, r.Figure, r.Original, r.Ours, 100*r.Error, note)
	}
	if len(c.Terms) > 0 {
		fmt.Fprintln(t, "\nTTFT of\thops\thost\tlinear\tattention\tweights, KV\tall-reduce\ttransfer\trest of the original, ms")
		for _, m := range c.Terms {
			fmt.Fprintf(t, "%d tokens\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t%+.1f\n", m.Tokens, m.Hops, m.Host, m.Linear, m.Attention, m.Weights, m.AllReduce, m.Transfer, m.Rest)
		}
	}
	if len(c.Limits) > 0 {
		fmt.Fprintln(t)
	}
	for _, l := range c.Limits {
		value, limit, verdict := l.texts()
		fmt.Fprintf(t, "%s\t%s\tlimit %s\t%s\n", l.What, value, limit, verdict)
	}
	if len(c.Ranges) > 0 {
		fmt.Fprintln(t, "\nassumed\tvalue\tmean absolute error of what is judged\tworst")
		for _, r := range c.Ranges {
			if r.Problem != "" {
				fmt.Fprintf(t, "%s\t%v\tcannot be: %s\n", r.Constant, r.Value, r.Problem)
				continue
			}
			fmt.Fprintf(t, "%s\t%v\t%.1f %%\t%s\n", r.Constant, r.Value, 100*r.MAPE, r.Worst)
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, n := range c.Notes {
		fmt.Fprintf(w, "%s\n", n)
	}
	return nil
}
