package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"strings"

	"github.com/kvasir-kv/kvasir/admin"
	"github.com/kvasir-kv/kvasir/internal/safelog"
	"github.com/kvasir-kv/kvasir/internal/topview"
)

// statusCmd asks a running server.
type statusCmd struct {
	URL     string  `name:"url" help:"HTTP interface of the server (its --http-host and --http-port)." default:"http://127.0.0.1:8080" placeholder:"URL"`
	JSON    bool    `name:"json" help:"Print what the server answers, as JSON."`
	Timeout float64 `help:"Seconds to wait for the answer." default:"10"`
}

// Help implements kong's detailed help.
func (statusCmd) Help() string {
	return `Says what the server serves, how full its pool is, how much of the prompts it found, and what keeps hits
away with what to do about it.

Examples:
  kvasir status
  kvasir status --url http://127.0.0.1:8081
  kvasir status --json | jq .findings`
}

// Run asks and prints.
func (c *statusCmd) Run(e *env) error {
	u, err := url.Parse(c.URL)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return usagef("--url %q is not http://HOST:PORT", c.URL)
	}
	if !(c.Timeout > 0) || c.Timeout > maxSeconds {
		return usagef("--timeout %g is not above 0", c.Timeout)
	}
	ctx, cancel := context.WithTimeout(e.ctx, seconds(c.Timeout))
	defer cancel()
	at := strings.TrimSuffix(u.String(), "/") + "/status"
	body, err := topview.Get(ctx, at)
	if err != nil {
		return err
	}
	var st admin.Status
	if err := json.Unmarshal(body, &st); err != nil || st.PID == 0 || st.ChunkTokens == 0 {
		return fmt.Errorf("%s is not answered by a kvasir server", at)
	}
	if c.JSON {
		_, err := fmt.Fprintln(e.stdout, strings.TrimSpace(string(body)))
		return err
	}
	return topview.Print(e.stdout, c.URL, &st)
}

// printable is text of others, such as the names of models and files, for a terminal:
// it moves no cursor and begins no line.
func printable(s string) string { return safelog.Text(s, 4096) }

// thousands writes a number in groups of three: 3,308,093.
func thousands(n uint64) string { return topview.Thousands(n) }
