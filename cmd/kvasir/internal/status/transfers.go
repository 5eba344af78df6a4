// SPDX-License-Identifier: Apache-2.0

package status

import (
	"fmt"
	"slices"
	"strings"

	"github.com/kvasir-kv/kvasir/internal/transferlog"
	"github.com/kvasir-kv/kvasir/kv"
)

// stateWords are the words for the states of a transfer, each at most 7 columns wide.
var stateWords = map[transferlog.State]string{
	transferlog.Computing: "at P", transferlog.Waiting: "waits D", transferlog.Sending: "sending", transferlog.Done: "done", transferlog.Failed: "failed", transferlog.Expired: "expired",
}

// The characters of a transfer's bar, and the columns of its row.
const (
	barComputing, barWaiting, barSending = "░", "▒", "█"

	transferHead  = 80  // columns before the bar, unless the model is shown
	transferModel = 110 // the width of the screen from which on the model is shown
)

// singleTransfers returns the blocks with the last transfers from P to D, one row for each, and the engines of P.
func (s *Screen) singleTransfers(width int) []block {
	pd := &s.now.Live.PD
	registry := s.engines()
	switch {
	case s.now.Status.Parts == nil:
		return nil
	case s.now.Live.AtMillis == 0 || pd.Seen == nil:
		return nil // a server of an earlier release
	case len(pd.Seen) == 0 && pd.Engines != nil:
		return []block{{title: "single transfers", least: 2, rows: []string{"  the registry alone sees none: P sends straight to D; a relay or proxy in this", "  process would show them"}}, registry}
	}
	title := fmt.Sprintf("last    %s %s %9s %8s %7s %5s", column("transfer", 14), column("P → D", 22), "size", "at P, ms", "then", "GB/s")
	room := width - transferHead - 2
	model := width >= transferModel
	if model {
		room -= 21
		title += "  " + column("model", 19)
	}
	if room >= barWidth {
		title += "  its time: " + barComputing + " P computes " + barWaiting + " waits for D " + barSending + " sends"
	}
	out := block{title: strings.TrimRight(title, " "), least: 5}
	if len(pd.Last) == 0 {
		out.rows = []string{"  none came"}
	}
	for i := range pd.Last {
		t := &pd.Last[i]
		id := t.ID
		if id == "" {
			id = t.Request
		}
		line := fmt.Sprintf("  %s %s %s", column(stateWords[t.State], 7), column(id, 14), column(t.From+" → "+withoutScheme(t.To), 22))
		if t.Why != "" {
			out.rows = append(out.rows, s.red(line+" "+text(t.Why)))
			continue
		}
		atP, toD := 0.0, 0.0
		for _, step := range t.Steps {
			if step.State == transferlog.Computing {
				atP += step.MS
			} else {
				toD += step.MS
			}
		}
		size, rate := "-", "-"
		if t.Bytes > 0 {
			size = kv.FormatBytes(t.Bytes)
		}
		if last := t.Steps; t.State == transferlog.Sending && t.Bytes > 0 && len(last) > 0 {
			rate = fmt.Sprintf("%.0f %%", 100*float64(last[len(last)-1].Bytes)/float64(t.Bytes))
		} else if t.Rate > 0 {
			rate = fmt.Sprintf("%.2f", t.Rate)
		}
		line += fmt.Sprintf(" %9s %8.1f %7.1f %5s", size, atP, toD, rate)
		if model {
			line += "  " + column(t.Model, 19)
		}
		if room >= barWidth {
			line += "  " + stepBar(t, room)
		}
		out.rows = append(out.rows, strings.TrimRight(line, " "))
	}
	if pd.Engines == nil {
		return []block{out}
	}
	return []block{out, registry}
}

func withoutScheme(address string) string { return strings.TrimPrefix(address, "http://") }

// stepBar draws the steps of a transfer as a bar of width columns, which stands for the whole time of this transfer.
func stepBar(t *transferlog.Transfer, width int) string {
	if !(t.MS > 0) {
		return ""
	}
	var b strings.Builder
	at := 0
	for i, step := range t.Steps {
		to := width
		if i+1 < len(t.Steps) {
			to = max(at, min(width, int(float64(width)*t.Steps[i+1].From/t.MS)))
		}
		with := barSending
		switch step.State {
		case transferlog.Computing:
			with = barComputing
		case transferlog.Waiting:
			with = barWaiting
		}
		b.WriteString(strings.Repeat(with, to-at))
		at = to
	}
	return b.String()
}

// engines lists the engines of P that the registry knows. Those that D does not see come first.
func (s *Screen) engines() (out block) {
	out.title, out.least = "engines of P, by the registry", 1
	list := slices.Clone(s.now.Live.PD.Engines)
	for _, shown := range []bool{false, true} {
		for i := range list {
			e := &list[i]
			if e.Shown != shown {
				continue
			}
			line := fmt.Sprintf("  %s %d workers at %s, heard %.0f s ago", column(e.ID, 30), e.Workers, text(e.Host), e.Heard)
			if !shown {
				line = s.red(line + ", D does not see it: " + text(e.Why))
			}
			out.rows = append(out.rows, line)
		}
	}
	return out
}
