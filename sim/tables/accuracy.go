// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/kvasir-kv/kvasir/sim/costmodel"
)

// The lines between which WriteAccuracy writes its part of docs/measured/accuracy-tables.md.
const (
	accuracyBegin = "<!-- tables: begin -->\n"
	accuracyEnd   = "<!-- tables: end -->\n"
)

// ErrMarkers means that a document lacks the lines that mark the place for the tables.
var ErrMarkers = errors.New("tables: a document needs the lines " + strings.TrimSpace(accuracyBegin) + " and " + strings.TrimSpace(accuracyEnd))

// WriteAccuracy returns the document with the tables between its markers computed anew.
func WriteAccuracy(ctx context.Context, document []byte) ([]byte, error) {
	head, rest, ok := bytes.Cut(document, []byte(accuracyBegin))
	_, tail, ended := bytes.Cut(rest, []byte(accuracyEnd))
	if !ok || !ended {
		return nil, ErrMarkers
	}
	var b bytes.Buffer
	b.Write(head)
	b.WriteString(accuracyBegin)
	if err := Accuracy(ctx, &b); err != nil {
		return nil, err
	}
	b.WriteString(accuracyEnd)
	b.Write(tail)
	return b.Bytes(), nil
}

// accuracySeeds is the number of generated workloads for the document.
const accuracySeeds = 50

// Accuracy plays all tables, with spreads and ranges, and prints each part as Markdown as soon as it is played.
func Accuracy(ctx context.Context, w io.Writer) error {
	refit := NewRefit()
	t, err := Play(ctx, Options{Seeds: accuracySeeds})
	if err != nil {
		return err
	}
	if t.Sensitivity, err = Sensitivity(ctx, refit); err != nil {
		return err
	}
	var b strings.Builder
	if err := markdownConstants(&b); err != nil {
		return err
	}
	t.markdown(&b)
	if _, err := io.WriteString(w, b.String()); err != nil {
		return err
	}
	for _, name := range []string{"T6", "T1", "T5", "T3"} {
		o := CheckOptions{Ranges: Assumed, Refit: refit}
		if name == "T3" {
			o.Ranges = nil // its rows are only printed, without limits
		}
		c, err := RunCheck(ctx, name, o)
		if err != nil {
			return err
		}
		b.Reset()
		c.markdown(&b)
		if _, err := io.WriteString(w, b.String()); err != nil {
			return err
		}
	}
	return nil
}

func markdownConstants(b *strings.Builder) error {
	fmt.Fprint(b, "\n### Constants\n\n| constant | value | from |\n| --- | --- | --- |\n")
	a10, err := costmodel.Get(costmodel.A10Qwen)
	if err != nil {
		return err
	}
	p := a10.NCCL()
	for _, term := range costmodel.Terms {
		value, err := p.Constants.Get(term.Name)
		if err != nil {
			return err
		}
		from := ""
		if figure, ok := p.Calibrated[term.Name]; ok {
			from = "calibrated: " + figure
		} else if term.High > 0 {
			from = fmt.Sprintf("assumed, %v to %v: %s", term.Low, term.High, term.What)
		} else {
			continue
		}
		fmt.Fprintf(b, "| `%s` | %.4g %s | %s |\n", term.Name, value, term.Unit, from)
	}
	fmt.Fprint(b, "\n| profile | its own calibrated constants |\n| --- | --- |\n")
	for _, name := range costmodel.Names {
		q, err := costmodel.Get(name)
		if err != nil {
			return err
		}
		var own []string
		for _, term := range costmodel.Terms {
			if figure, ok := q.Calibrated[term.Name]; ok && figure != a10.Calibrated[term.Name] {
				value, err := q.Constants.Get(term.Name)
				if err != nil {
					return err
				}
				own = append(own, fmt.Sprintf("`%s` %.4g %s: %s", term.Name, value, term.Unit, figure))
			}
		}
		if len(own) > 0 {
			fmt.Fprintf(b, "| `%s` | %s |\n", name, strings.Join(own, "; "))
		}
	}
	return nil
}

// Lines returns the table as lines of Markdown: both rows, and their difference.
func (t *Table) Lines() (out []string) {
	at := func(rows []Row, row, figure string) (r Row) {
		for _, r = range rows {
			if r.Row == row && r.Figure == figure {
				return r
			}
		}
		return Row{}
	}
	for _, figure := range figureOrder {
		if tokenTotals(figure) {
			continue
		}
		first, second, d := at(t.Rows, Mooncake, figure), at(t.Rows, P2pNccl, figure), at(t.Differences, "difference", figure)
		note := ""
		if first.Use == "calibrated" {
			note = " (calibrated)"
		}
		out = append(out, fmt.Sprintf("| %s%s | %.2f | %.2f | %+.1f %% | %.2f | %.2f | %+.1f %% | %+.2f | %+.2f |", figure, note, first.Original, first.Ours, 100*first.Error,
			second.Original, second.Ours, 100*second.Error, d.Original, d.Ours))
	}
	return out
}

func (t *Table) markdown(b *strings.Builder) {
	fmt.Fprint(b, "\n### The original's table\n\n| figure | Mooncake | ours | error | P2pNccl | ours | error | difference | ours |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n")
	for _, line := range t.Lines() {
		fmt.Fprintln(b, line)
	}
	for _, m := range t.MAPE {
		fmt.Fprintf(b, "\n%s: mean absolute error %.1f %%, largest %s.\n", headings[m.Row], 100*m.MAPE, m.Worst)
	}
	fmt.Fprintf(b, "\n### %d generated workloads\n\nP5 / median / P95, and the error of the median; first those whose longest output is %d to %d tokens, then any.\n\n", t.Seeds, longestLow, longestHigh)
	fmt.Fprint(b, "| figure | Mooncake | error | P2pNccl | error | Mooncake, any | error |\n| --- | --- | --- | --- | --- | --- | --- |\n")
	for _, figure := range figureOrder {
		if tokenTotals(figure) {
			continue
		}
		fmt.Fprintf(b, "| %s |", figure)
		for _, k := range []struct {
			row       string
			condition bool
		}{{Mooncake, true}, {P2pNccl, true}, {Mooncake, false}} {
			for _, s := range t.Spread {
				if s.Row == k.row && s.Condition == k.condition && s.Figure == figure {
					fmt.Fprintf(b, " %.2f / %.2f / %.2f | %+.1f %% |", s.P5, s.Median, s.P95, 100*s.Error)
				}
			}
		}
		fmt.Fprintln(b)
	}
	fmt.Fprint(b, "\n### Moved constants\n\nMean absolute error of the Mooncake row, fixed list.\n\n| moved | as it is | calibrated ones fitted anew |\n| --- | --- | --- |\n")
	for i, m := range t.Sensitivity {
		if m.Refit {
			continue
		}
		again := ""
		if i+1 < len(t.Sensitivity) && t.Sensitivity[i+1].Refit {
			again = fmt.Sprintf("%.1f %%", 100*t.Sensitivity[i+1].MAPE)
		}
		fmt.Fprintf(b, "| %s | %.1f %% | %s |\n", m.What, 100*m.MAPE, again)
	}
}

func (c *Check) markdown(b *strings.Builder) {
	fmt.Fprintf(b, "\n### %s\n\n%s.\n\n| row | figure | original | ours | error | |\n| --- | --- | --- | --- | --- | --- |\n", c.Table, c.Source)
	for _, r := range c.Rows {
		note := r.Use
		if note == "judged" {
			note = ""
		}
		fmt.Fprintf(b, "| %s | %s | %.2f | %.2f | %+.1f %% | %s |\n", r.Row, r.Figure, r.Original, r.Ours, 100*r.Error, note)
	}
	fmt.Fprint(b, "\n| asked | limit | reached | |\n| --- | --- | --- | --- |\n")
	for _, l := range c.Limits {
		value, limit, verdict := l.texts()
		fmt.Fprintf(b, "| %s | %s | %s | %s |\n", l.What, limit, value, verdict)
	}
	if len(c.Terms) > 0 {
		fmt.Fprint(b, "\nWhat the TTFT consists of, ms; rest is what the original has more.\n\n| tokens | hops | host | linear | attention | weights, KV | all-reduce | transfer | rest |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n")
		for _, m := range c.Terms {
			fmt.Fprintf(b, "| %d | %.1f | %.1f | %.1f | %.1f | %.1f | %.1f | %.1f | %+.1f |\n", m.Tokens, m.Hops, m.Host, m.Linear, m.Attention, m.Weights, m.AllReduce, m.Transfer, m.Rest)
		}
	}
	if len(c.Ranges) > 0 {
		fmt.Fprint(b, "\n| assumed | mean absolute error of what is judged, low end | high end |\n| --- | --- | --- |\n")
		for i := 0; i+1 < len(c.Ranges); i += 2 {
			low, high := c.Ranges[i], c.Ranges[i+1]
			fmt.Fprintf(b, "| `%s` %v to %v | %s | %s |\n", low.Constant, low.Value, high.Value, low.text(), high.text())
		}
	}
	for _, n := range c.Notes {
		fmt.Fprintf(b, "\n%s\n", n)
	}
}

func (r *Range) text() string {
	if r.Problem != "" {
		return "cannot be: " + r.Problem
	}
	return fmt.Sprintf("%.1f %%", 100*r.MAPE)
}

func (l *Limit) texts() (value, limit, verdict string) {
	if verdict = "kept"; !l.Kept {
		verdict = "MISSED"
	}
	if l.Limit == 0 {
		return fmt.Sprint(l.Value), "0", verdict
	}
	return fmt.Sprintf("%.1f %%", 100*l.Value), fmt.Sprintf("%.0f %%", 100*l.Limit), verdict
}
