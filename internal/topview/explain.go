package topview

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"

	"github.com/kvasir-kv/kvasir/explain"
	"github.com/kvasir-kv/kvasir/internal/simcmd"
)

// ExplainCommand is kvasir explain: it asks a running server why lookups found no more.
type ExplainCommand struct {
	Request string `arg:"" optional:"" help:"Request id, as the engine's log and the server's debug log have it. Without it: the last lookups of all requests."`
	Limit   int    `help:"Lookups to show, at most." default:"10"`
	askFlags
}

// Help implements kong's detailed help.
func (ExplainCommand) Help() string {
	return `Says for each lookup why its hit ended where it did: never stored, evicted (when, and for whom), under another salt, model, world
size or layout, a prompt shorter than a chunk, a store that was not completed, a tier that is slow or broken, and what to do about it.
The server remembers the last 4,096 lookups that found less than they asked for.

Examples:
  kvasir explain
  kvasir explain chatcmpl-7d3f9a
  kvasir explain --limit 100 --json | jq '.lookups[].reason'`
}

// maxExplained bounds --limit: what a server remembers.
const maxExplained = 4096

// Run asks and prints.
func (c *ExplainCommand) Run(e *simcmd.Env) error {
	if c.Limit < 1 || c.Limit > maxExplained {
		return simcmd.UsageErrorf("--limit %d is not between 1 and %d", c.Limit, maxExplained)
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
	if c.Request != "" && len(got.Lookups) == 0 {
		return fmt.Errorf("no lookup of request %s is remembered that found less than it asked for: it found all, it is older than the last %d of those, or no such request came", c.Request, max(got.Kept, 1))
	}
	if c.JSON {
		return printJSON(e, body)
	}
	return printExplanation(e.Stdout, &got)
}

// printExplanation writes lookups in words, the oldest first, and what to do about their reasons.
func printExplanation(w io.Writer, got *explain.Explanation) error {
	if len(got.Lookups) == 0 {
		_, err := fmt.Fprintln(w, "No lookup found less than it asked for.")
		return err
	}
	var order []string
	for _, l := range slices.Backward(got.Lookups) {
		model := l.Model
		if l.Salt != "" {
			model += fmt.Sprintf(" (salt %q)", l.Salt)
		}
		if l.Tags != "" {
			model += "  " + l.Tags
		}
		fmt.Fprintf(w, "%s  %s  %s\n  %s\n", l.At, printable(l.Request), printable(model), printable(l.Text))
		if !slices.Contains(order, l.Reason) {
			order = append(order, l.Reason)
		}
	}
	fmt.Fprintln(w, "\nWhat to do:")
	for _, reason := range order {
		a := got.Advice[reason]
		if _, err := fmt.Fprintf(w, "- %s\n  %s\n", printable(a.What), printable(a.Do)); err != nil {
			return err
		}
	}
	return nil
}
