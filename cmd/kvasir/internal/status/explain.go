// SPDX-License-Identifier: Apache-2.0

package status

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"

	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/sim"
	"github.com/kvasir-kv/kvasir/server/explain"
)

// ExplainCommand is kvasir explain. It asks a running server why lookups found no more.
type ExplainCommand struct {
	Request string `arg:"" optional:"" help:"Request id, as the engine's log and the server's debug log have it. Without it: the last lookups of all requests."`
	Limit   int    `help:"Lookups to show, at most." default:"10"`
	askFlags
}

// Help returns the text that kvasir explain --help shows. It implements kong's detailed help.
func (ExplainCommand) Help() string {
	return `Says for each lookup why its hit ended where it did: never stored, evicted (when, and for whom), under another salt, model, world
size or layout, a prompt shorter than a chunk, a store that was not completed, a tier that is slow or broken, and what to do about it.
Of one request it also draws what the engine asked for and how long each step took. The server remembers the last 4,096 lookups that
found less than they asked for, and the last 1,024 requests.

Examples:
  kvasir explain
  kvasir explain chatcmpl-7d3f9a
  kvasir explain --limit 100 --json | jq '.lookups[].reason'`
}

// maxExplained is the largest --limit, because a server remembers this many lookups; a larger one is refused.
const maxExplained = 4096

// Run asks the server and prints its explanation.
func (c *ExplainCommand) Run(e *sim.Env) error {
	if c.Limit < 1 || c.Limit > maxExplained {
		return sim.UsageErrorf("--limit %d is not between 1 and %d", c.Limit, maxExplained)
	}
	q := url.Values{"limit": {strconv.Itoa(c.Limit)}}
	if c.Request != "" {
		q.Set("request_id", c.Request)
	}
	body, at, err := c.ask(e, http.MethodGet, "/explain?"+q.Encode(), nil)
	if err != nil {
		return err
	}
	var got explain.Explanation
	if err := json.Unmarshal(body, &got); err != nil || got.Reasons == nil || got.Lookups == nil {
		return fmt.Errorf("%s is not answered by a kvasir server", at)
	}
	if c.Request != "" && len(got.Lookups)+len(got.Requests) == 0 {
		return fmt.Errorf("request %s is not remembered: it is older than the last %d, or none of that id came (kvasir explain lists ids; an engine's log has them)", printable(c.Request), explain.MaxTimelines)
	}
	switch {
	case c.JSON:
		return printJSON(e, body)
	case c.Request != "":
		return printRequest(e.Stdout, &got, c.Request, widthOf(e.Stdout, 100))
	}
	return printExplanation(e.Stdout, &got)
}

// printRequest writes why a request found no more, what it asked for as a waterfall of at most width columns, and what to do. id is the
// request's ID.
func printRequest(w io.Writer, got *explain.Explanation, id string, width int) error {
	if len(got.Lookups) > 0 {
		printLookups(w, got.Lookups)
	}
	for i := range got.Requests {
		r := &got.Requests[i]
		switch {
		case len(got.Lookups) > 0:
			fmt.Fprintf(w, "\nWhat it asked for, %.1f ms from %s on:\n", lengthOf(r), printable(r.Began))
		default:
			fmt.Fprintf(w, "%s  %s\n  %s\n\nWhat it asked for, %.1f ms:\n", printable(r.Began), printable(requestLine(r)), foundAll(r, got.Kept), lengthOf(r))
		}
		for _, line := range waterfall(r, width) {
			fmt.Fprintln(w, line)
		}
	}
	if len(got.Requests) == 0 {
		fmt.Fprintf(w, "\nWhat %s asked for is forgotten: the last %d requests are remembered.\n", printable(id), explain.MaxTimelines)
	}
	if len(got.Lookups) == 0 {
		return nil
	}
	return printAdvice(w, got)
}

// foundAll says why the server remembers, for a request, no lookup that found less than it asked for. kept is how many such lookups the
// server remembers in all; the request's may be among the older ones that it has forgotten.
func foundAll(r *explain.Timeline, kept int) string {
	switch {
	case r.AskedTokens == 0:
		return "it looked up no whole chunk"
	case r.HitTokens < r.AskedTokens:
		return fmt.Sprintf("why it found no more is forgotten: %d lookups are remembered that found less than they asked for", kept)
	}
	return "it found all that it asked for"
}

// printExplanation writes lookups in words, the oldest first, and then what to do about the reasons.
func printExplanation(w io.Writer, got *explain.Explanation) error {
	if len(got.Lookups) == 0 {
		_, err := fmt.Fprintln(w, "No lookup found less than it asked for.")
		return err
	}
	printLookups(w, got.Lookups)
	return printAdvice(w, got)
}

// printLookups writes lookups in words, the oldest first.
func printLookups(w io.Writer, list []explain.Lookup) {
	for _, l := range slices.Backward(list) {
		model := l.Model
		if l.Salt != "" {
			model += fmt.Sprintf(" (salt %q)", l.Salt)
		}
		if l.Tags != "" {
			model += "  " + l.Tags
		}
		fmt.Fprintf(w, "%s  %s  %s\n  %s\n", l.At, printable(l.Request), printable(model), printable(l.Text))
	}
}

// printAdvice writes what to do about the reasons of the lookups, one advice for each reason, in the order in which they occur.
func printAdvice(w io.Writer, got *explain.Explanation) error {
	var advised []string // reasons that have an advice already
	fmt.Fprintln(w, "\nWhat to do:")
	for _, l := range slices.Backward(got.Lookups) {
		if slices.Contains(advised, l.Reason) {
			continue
		}
		advised = append(advised, l.Reason)
		a := got.Advice[l.Reason]
		if _, err := fmt.Fprintf(w, "- %s\n  %s\n", printable(a.What), printable(a.Do)); err != nil {
			return err
		}
	}
	return nil
}
