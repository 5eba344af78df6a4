package topview

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/explain"
	"github.com/kvasir-kv/kvasir/internal/simcmd"
)

// ExplainCommand is kvasir explain: it asks a running server why lookups found no more.
type ExplainCommand struct {
	Request string  `arg:"" optional:"" help:"Request id, as the engine's log and the server's debug log have it. Without it: the last lookups of all requests."`
	URL     string  `name:"url" help:"HTTP interface of the server (its --http-host and --http-port)." default:"http://127.0.0.1:8080" placeholder:"URL"`
	Limit   int     `help:"Lookups to show, at most." default:"10"`
	JSON    bool    `name:"json" help:"Print what the server answers, as JSON."`
	Timeout float64 `help:"Seconds to wait for the answer." default:"10"`
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

// maxPatience bounds --timeout, seconds.
const maxPatience = 1e6

// maxExplained bounds --limit: what a server remembers.
const maxExplained = 4096

// Run asks and prints.
func (c *ExplainCommand) Run(e *simcmd.Env) error {
	at, err := c.at()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(e.Ctx, time.Duration(c.Timeout*float64(time.Second)))
	defer cancel()
	body, err := Get(ctx, at)
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
		_, err := fmt.Fprintln(e.Stdout, strings.TrimSpace(string(body)))
		return err
	}
	return printExplanation(e.Stdout, &got)
}

func (c *ExplainCommand) at() (string, error) {
	u, err := url.Parse(c.URL)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return "", simcmd.UsageErrorf("--url %q is not http://HOST:PORT", c.URL)
	}
	if c.Limit < 1 || c.Limit > maxExplained {
		return "", simcmd.UsageErrorf("--limit %d is not between 1 and %d", c.Limit, maxExplained)
	}
	if !(c.Timeout > 0) || c.Timeout > maxPatience {
		return "", simcmd.UsageErrorf("--timeout %g is not above 0", c.Timeout)
	}
	q := url.Values{"limit": {strconv.Itoa(c.Limit)}}
	if c.Request != "" {
		q.Set("request_id", c.Request)
	}
	return strings.TrimSuffix(u.String(), "/") + "/explain?" + q.Encode(), nil
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
