// SPDX-License-Identifier: Apache-2.0

package status

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/sim"
	"github.com/kvasir-kv/kvasir/server/admin"
)

// interfaceFlags are the flags that say which running server to ask.
type interfaceFlags struct {
	URL string `name:"url" help:"HTTP interface of the server (its --http-host and --http-port)." default:"http://127.0.0.1:8080"`
	AccessFlags
}

// base returns the URL of --url without a slash at its end.
func (f *interfaceFlags) base() (string, error) {
	text := f.URL
	if !strings.Contains(text, "://") && strings.Contains(text, ":") {
		text = "http://" + text // HOST:PORT alone is http
	}
	u, err := url.Parse(text)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return "", sim.UsageErrorf("--url %q is not http://HOST:PORT", f.URL)
	}
	return strings.TrimSuffix(u.String(), "/"), nil
}

// askFlags are the flags of a command that sends one request.
type askFlags struct {
	interfaceFlags
	JSON    bool    `name:"json" help:"Print what the server answers, as JSON."`
	Timeout float64 `help:"Seconds to wait for the answer." default:"10"`
}

// maxPatience is the largest --timeout in seconds: ten years. A larger one is refused.
const maxPatience = 10 * 365 * 86400

// ask sends a request to a path of the server, with body as JSON unless it is nil. It returns the body of the answer, and as `at` the URL of
// the server without the path.
func (f *askFlags) ask(e *sim.Env, method, path string, body any) (answer []byte, at string, err error) {
	base, err := f.base()
	if err != nil {
		return nil, "", err
	}
	if !(f.Timeout > 0) || f.Timeout > maxPatience {
		return nil, "", sim.UsageErrorf("--timeout %g is not above 0", f.Timeout)
	}
	var content io.Reader
	if body != nil {
		text, err := json.Marshal(body)
		if err != nil {
			return nil, "", err
		}
		content = strings.NewReader(string(text))
	}
	ctx, cancel := context.WithTimeout(e.Ctx, time.Duration(f.Timeout*float64(time.Second)))
	defer cancel()
	at = base + path
	r, err := http.NewRequestWithContext(ctx, method, at, content)
	if err != nil {
		return nil, at, err
	}
	if body != nil {
		r.Header.Set("Content-Type", "application/json")
	}
	a, err := f.asker()
	if err != nil {
		return nil, at, err
	}
	answer, err = a.do(r)
	return answer, at, err
}

// printJSON prints an answer of the server, as it came.
func printJSON(e *sim.Env, answer []byte) error {
	_, err := fmt.Fprintln(e.Stdout, strings.TrimSpace(string(answer)))
	return err
}

// StatusCommand is kvasir status. It shows the state of a running server once.
type StatusCommand struct{ askFlags }

// Help returns the text that kvasir status --help shows. It implements kong's detailed help.
func (StatusCommand) Help() string {
	return `Says what the server serves, how full its pool is, how much of the prompts it found, and what keeps hits
away with what to do about it.

Examples:
  kvasir status
  kvasir status --url http://127.0.0.1:8081
  kvasir status --json | jq .findings`
}

// Run asks the server for its status and prints it.
func (c *StatusCommand) Run(e *sim.Env) error {
	body, at, err := c.ask(e, http.MethodGet, "/status", nil)
	if err != nil {
		return err
	}
	var st admin.Status
	if err := json.Unmarshal(body, &st); err != nil || st.PID == 0 || st.ChunkTokens == 0 {
		return fmt.Errorf("%s is not answered by a kvasir server", at)
	}
	if c.JSON {
		return printJSON(e, body)
	}
	return Print(e.Stdout, c.URL, &st)
}

// TopCommand is kvasir top. It shows the state of a running server again and again.
type TopCommand struct {
	interfaceFlags
	Interval float64 `help:"Seconds between two looks." default:"2"`
	View     string  `help:"What to show first: overview, tenants (hit rate by tenant, model and tier; quotas), requests (one step by step), slow, pool (its map, workers, tiers) or pd (relay, registry, proxy)." default:"overview" enum:"overview,tenants,requests,slow,pool,pd"`
	Once     bool    `help:"Look twice, print what there is to see, and end; so where standard output is no terminal."`
	JSON     bool    `name:"json" help:"Look twice, print the figures between the two looks and the server's status as one JSON object, and end."`
}

// Help returns the text that kvasir top --help shows. It implements kong's detailed help.
func (TopCommand) Help() string {
	return `Shows pool, hit rate, bytes per second, why lookups found no more, tiers, workers, times of requests, and what else runs in
the process of kvasir all. Keys: 1 to 6 or Tab choose a view, ? lists all keys, p pauses, q ends. A server that went away is asked
until it is back.

Examples:
  kvasir top
  kvasir top --view tenants
  kvasir top --url http://127.0.0.1:8081 --interval 1
  kvasir top --once | head -8
  kvasir top --json | jq .hit_rate`
}

// Run shows the server until the user or a signal stops the command.
func (c *TopCommand) Run(e *sim.Env) error {
	base, err := c.base()
	if err != nil {
		return err
	}
	if !(c.Interval >= 0.1) || c.Interval > 3600 {
		return sim.UsageErrorf("--interval %g is not between 0.1 and 3600", c.Interval)
	}
	asker, err := c.asker()
	if err != nil {
		return err
	}
	view, _ := ParseView(c.View) // the parser has checked the name
	o := Options{URL: base, Asker: asker, View: view, Interval: time.Duration(c.Interval * float64(time.Second)), In: os.Stdin, Color: os.Getenv("NO_COLOR") == ""}
	if c.JSON {
		return OnceJSON(e.Ctx, o, e.Stdout)
	}
	var terminal bool
	if o.Out, terminal = e.Stdout.(*os.File); c.Once || !terminal || !IsTerminal(o.Out) {
		return Once(e.Ctx, o, e.Stdout)
	}
	return Top(e.Ctx, o)
}
