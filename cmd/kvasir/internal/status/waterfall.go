// SPDX-License-Identifier: Apache-2.0

package status

import (
	"fmt"
	"math"
	"strings"

	"github.com/kvasir-kv/kvasir/server/explain"
)

// step is a row of a waterfall: something that a request waited for.
type step struct {
	name     string
	from, ms float64 // since the request began
}

// stepsOf returns what a request asked for, in its order, and between a prepare and its commit the
// engine's own copy, which no server sees.
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

// lengthOf is how long a request took, milliseconds.
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

// barWidth is the least width of the bars, columns: less says nothing.
const barWidth = 10

// Columns before the bars: name, when it began, how long it took.
const stepName, stepHead = 28, 2 + stepName + 10 + 10 + 2

// waterfall draws a request as rows of at most width columns: a title, and a bar for each step. Where there
// is no room for bars there are the figures.
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

// span draws from and to on a line from 0 to all, one column at least.
func span(from, to, all float64, width int) string {
	if !(all > 0) || math.IsInf(all, 1) {
		return ""
	}
	at := func(v float64) int { return int(math.Round(min(1, max(0, v/all)) * float64(width))) }
	begin := min(at(from), width-1)
	return strings.Repeat(" ", begin) + strings.Repeat("█", max(1, at(to)-begin))
}
