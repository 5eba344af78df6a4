package cli

import (
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/internal/topview"
)

// topCmd shows a running server again and again.
type topCmd struct {
	URL      string  `name:"url" help:"HTTP interface of the server (its --http-host and --http-port)." default:"http://127.0.0.1:8080" placeholder:"URL"`
	Interval float64 `help:"Seconds between two looks." default:"2"`
	Once     bool    `help:"Look twice, print what there is to see, and end; so where standard output is no terminal."`
}

// Help implements kong's detailed help.
func (topCmd) Help() string {
	return `Shows pool, hit rate, bytes per second, why lookups found no more, tiers, workers, times of requests, and what else runs in
the process of kvasir all. Keys: q ends, p pauses. A server that went away is asked until it is back.

Examples:
  kvasir top
  kvasir top --url http://127.0.0.1:8081 --interval 1
  kvasir top --once | head -8`
}

// Run shows the server until it is told to stop.
func (c *topCmd) Run(e *env) error {
	u, err := url.Parse(c.URL)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return usagef("--url %q is not http://HOST:PORT", c.URL)
	}
	if !(c.Interval >= 0.1) || c.Interval > 3600 {
		return usagef("--interval %g is not between 0.1 and 3600", c.Interval)
	}
	o := topview.Options{
		URL: strings.TrimSuffix(u.String(), "/"), Interval: time.Duration(c.Interval * float64(time.Second)),
		In: os.Stdin, Color: os.Getenv("NO_COLOR") == "",
	}
	var terminal bool
	if o.Out, terminal = e.stdout.(*os.File); c.Once || !terminal || !topview.IsTerminal(o.Out) {
		return topview.Once(e.ctx, o, e.stdout)
	}
	return topview.Top(e.ctx, o)
}
