// SPDX-License-Identifier: Apache-2.0

package status

import (
	"fmt"
	"math"
	"strings"

	"github.com/kvasir-kv/kvasir/server/explain"
)

// step is one row of a waterfall: something that a request waited for.
type step struct {
	name     string
	from, ms float64 // milliseconds; from counts from the beginning of the request
}

// stepsOf returns the steps of a request in their order. Between a prepare and its commit it adds the copy by the engine, which no
// server sees.
func stepsOf(r *explain.Timeline) []step {
	var out []step
	for i, s := range r.Spans {
		if what, ok := strings.CutPrefix(s.Operation, "commit_"); ok {
			for j := i - 1; j >= 0 && r.Spans[j].Operation != s.Operation; j-- {
				if p := &r.Spans[j]; p.Operation == "prepare_"+what {
					from := p.FromMS + p.MS
					out = append(out, step{"the engine copies", from, max(0, s.FromMS-from)})
					break
				}
			}
		}
		name := s.Operation
		if name == explain.WaitSpan {
			name = "waits for tiers or checksums"
		}
		if s.Count > 1 {
			name += fmt.Sprintf(" x %d", s.Count)
		}
		out = append(out, step{name, s.FromMS, s.MS})
	}
	return out
}

// lengthOf returns how long a request took in milliseconds.
func lengthOf(r *explain.Timeline) (ms float64) {
	for _, s := range r.Spans {
		ms = max(ms, s.FromMS+s.MS)
	}
	return ms
}

// requestLine says what a request is and what it found.
func requestLine(r *explain.Timeline) string {
	of := "no lookup"
	if r.Model != "" {
		of = r.Model
	}
	if r.Salt != "" {
		of += fmt.Sprintf(" (salt %q)", r.Salt)
	}
	out := fmt.Sprintf("%s  %s", r.Request, of)
	if r.AskedTokens > 0 {
		out += fmt.Sprintf("  %d of %d tokens hit", r.HitTokens, r.AskedTokens)
	}
	if r.BelowTokens > 0 {
		out += fmt.Sprintf(", %d of them from tiers", r.BelowTokens)
	}
	return out
}

// barWidth is the least width of a bar in columns. Narrower bars would say nothing.
const barWidth = 10

// The columns before the bars: the name, when the step began, and how long it took.
const stepName, stepHead = 28, 2 + stepName + 10 + 10 + 2

// waterfall draws a request as rows of at most width columns: a title, and a bar for each step. If there is no room for bars, the rows
// have only the figures.
func waterfall(r *explain.Timeline, width int) []string {
	all := lengthOf(r)
	room := width - stepHead
	title := fmt.Sprintf("  %s %9s %9s", column("what", stepName), "at ms", "ms")
	if room >= barWidth {
		title += fmt.Sprintf("  0 to %.1f ms", all)
	}
	out := []string{strings.TrimRight(title, " ")}
	for _, s := range stepsOf(r) {
		line := fmt.Sprintf("  %s %9.2f %9.2f", column(s.name, stepName), s.from, s.ms)
		if room >= barWidth {
			line += "  " + span(s.from, s.from+s.ms, all, room)
		}
		out = append(out, line)
	}
	if r.More > 0 {
		out = append(out, fmt.Sprintf("  and %d more", r.More))
	}
	return out
}

// span draws the time between `from` and `to` as a bar on a line of width columns that stands for the time from 0 to `all`. The bar has at
// least one column.
func span(from, to, all float64, width int) string {
	if !(all > 0) || math.IsInf(all, 1) {
		return ""
	}
	at := func(v float64) int { return int(math.Round(min(1, max(0, v/all)) * float64(width))) }
	begin := min(at(from), width-1)
	return strings.Repeat(" ", begin) + strings.Repeat("█", max(1, at(to)-begin))
}
