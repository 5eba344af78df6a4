// SPDX-License-Identifier: Apache-2.0

package transferlog

import (
	"cmp"
	"math"
	"slices"
	"strings"
)

// Join joins the transfers that a relay and a proxy in one process have recorded. It returns each transfer once, beginning with the one
// that began last, at most Max. A transfer that both have recorded gets the relay's steps, and from the proxy the client's request, the
// model, D's URL, and how long P computed before D asked.
//
// Join shortens transfer ids (see Short), because whoever knows an id may fetch the transfer's KV.
func Join(relayed, proxied []Transfer) []Transfer {
	known := make(map[string]int, len(proxied))
	for i, t := range proxied {
		if t.ID != "" {
			known[t.ID] = i
		}
	}
	out := make([]Transfer, 0, len(relayed)+len(proxied))
	seen := make(map[int]bool)
	for _, t := range relayed {
		if i, ok := known[t.ID]; ok {
			seen[i] = true
			t = t.joinProxy(proxied[i])
		}
		out = append(out, t)
	}
	for i, t := range proxied {
		if !seen[i] {
			out = append(out, t)
		}
	}
	slices.SortStableFunc(out, func(a, b Transfer) int { return cmp.Compare(b.At, a.At) })
	out = out[:min(Max, len(out))]
	for i := range out {
		out[i].ID = Short(out[i].ID)
	}
	return out
}

// joinProxy adds to t what the proxy's record p knows about the same transfer.
func (t Transfer) joinProxy(p Transfer) Transfer {
	t.Request, t.Model, t.To = cmp.Or(p.Request, t.Request), cmp.Or(p.Model, t.Model), cmp.Or(p.To, t.To)
	before := micros(t.At - p.At) // how long P had the request before D asked the relay
	if before <= 0 || len(p.Steps) == 0 || p.Steps[0].State != Computing {
		return t
	}
	computed := before // until D asked, or until P was ready
	if len(p.Steps) > 1 || !p.State.Running() {
		computed = min(computed, p.Steps[0].MS)
	}
	steps := []Step{{State: Computing, What: p.Steps[0].What, MS: computed}}
	if computed < before {
		steps = append(steps, Step{State: Waiting, What: "waits for D", From: computed, MS: micros(before - computed)})
	}
	for i, s := range t.Steps {
		s.From = micros(s.From + before)
		if i == 0 && s.State == Computing && len(steps) == 1 { // P was still computing when D asked: both are one step
			steps[0].MS = micros(steps[0].MS + s.MS)
			continue
		}
		steps = append(steps, s)
	}
	t.Steps, t.At, t.MS = steps, p.At, micros(t.MS+before)
	return t
}

// micros rounds milliseconds to microseconds: a time since 1970 as a float is not more exact.
func micros(ms float64) float64 { return math.Round(ms*1000) / 1000 }

// wholeID is the longest id that is shown completely, and beginning is how much of a longer id is shown, in bytes.
const wholeID, beginning = 20, 15

// Short returns a transfer id in a form for people: long enough to find it in a log. Long random ids must stay secret, so the form is
// too short to ask a relay for the KV. The part after # is not secret.
func Short(id string) string {
	base, again := id, ""
	if i := strings.LastIndexByte(id, '#'); i > 0 && len(id)-i <= 12 {
		base, again = id[:i], id[i:]
	}
	if len(base) <= wholeID {
		return id
	}
	return base[:beginning] + "…" + again
}
