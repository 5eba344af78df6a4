// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"io"
	"net/http"
	"os"
	"strconv"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/httpserver"
	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/internal/takeover"
	"github.com/kvasir-kv/kvasir/tier/keeper"
)

// keeperCmd keeps directories of vLLM's fs tier below a limit.
type keeperCmd struct {
	Keep   keeperKeepCmd   `cmd:"" default:"withargs" help:"Hold directories at their limit, until a signal."`
	Status keeperStatusCmd `cmd:"" help:"Show the figures of the keeper that has a directory."`
	Verify keeperVerifyCmd `cmd:"" help:"Compare all files with the checksums that the last run noted."`
}

// Help returns the text that kvasir keeper --help shows. It implements kong's detailed help.
func (keeperCmd) Help() string {
	return `vLLM's fs offloading tier ("type":"fs") and LMCache's fs adapters fill a directory and never delete. The keeper unlinks the least
recently used files before the limit is reached. It needs nothing of the engine, and writes nothing into the directory.

Examples:
  kvasir keeper /data/kv --max-gb 200
  kvasir keeper /data/kv /data/kv2 --min-free-gb 50 --ttl 72h
  kvasir keeper /data/kv --max-gb 200 --state-dir /var/lib/kvasir --http-port 9095
  kvasir keeper /data/kv --max-gb 200 --kv-events tcp://127.0.0.1:5557 --kv-events-replay tcp://127.0.0.1:5558    (for routers)
  kvasir keeper status /data/kv
  kvasir keeper verify /data/kv --state-dir /var/lib/kvasir

As root it hears of each read and write (fanotify). Other users get events of up to fs.inotify.max_user_watches directories.
docs/operate/keeper.md has the rules.`
}

type keeperKeepCmd struct {
	configFlags
	accessFlags
	zmqAuthFlags
	keeperEventFlags

	Dir      []string      `arg:"" help:"root_dir of an fs tier, or the directory of LMCache's fs adapter." type:"path"`
	Max      gibSize       `name:"max-gb" help:"Most that all files together may take: GiB, or with a unit, as 500GB. 0: no limit." placeholder:"N" default:"0"`
	MinFree  gibSize       `name:"min-free-gb" help:"Room that stays free in each directory's file system." placeholder:"N" default:"0"`
	TTL      time.Duration `name:"ttl" help:"Unlink files that no engine has used for so long, as 72h." placeholder:"DURATION" default:"0s"`
	StateDir string        `help:"Note times of use here, so that a restart knows them. Without, access times count." placeholder:"DIR" type:"path"`
	Watch    string        `help:"How it hears of reads and writes: fanotify (root), inotify, look (read the directories again and again), or auto, the best that is allowed." default:"auto" enum:"auto,fanotify,inotify,look"`
	Host     string        `help:"Address of --http-port." default:"127.0.0.1" group:"Network"`
	HTTPPort int           `name:"http-port" help:"Port of a page with the figures, /status (JSON), /metrics and /healthz. 0: none." default:"0" group:"Network"`
}

func (c *keeperKeepCmd) options(e *env) keeper.Options {
	return keeper.Options{
		Roots: c.Dir, Limit: int64(c.Max), MinFree: int64(c.MinFree), TTL: c.TTL, StateDir: c.StateDir, Watch: keeper.Watch(c.Watch),
		Changes: c.changes(), Log: e.log,
	}
}

func (c *keeperKeepCmd) check(*env) error {
	var f faults
	f.unless(c.Max >= 0, "--max-gb %v is below 0", c.Max)
	f.unless(c.MinFree >= 0, "--min-free-gb %v is below 0", c.MinFree)
	f.unless(c.TTL >= 0, "--ttl %v is below 0", c.TTL)
	f.unless(c.Max > 0 || c.MinFree > 0 || c.TTL > 0, "say what to hold: --max-gb, --min-free-gb or --ttl")
	f.port("--http-port", c.HTTPPort, true)
	return errors.Join(f.err(), c.accessFlags.check(c.exposed(), keeperListeners...), c.keeperEventFlags.check(&c.zmqAuthFlags), c.zmqAuthFlags.check(c.TokenFile, c.Events))
}

// keeperListeners are the names of a keeper's listeners, for --allow-from.
var keeperListeners = []string{"http", "events"}

// exposed returns the listeners of the keeper.
func (c *keeperKeepCmd) exposed() (out []exposure) {
	if c.HTTPPort != 0 {
		out = append(out, exposure{listener: "http", at: "--host " + c.Host, host: c.Host, web: true, risk: "read the keeper's figures"})
	}
	for _, x := range c.keeperEventFlags.exposed() {
		x.own, x.keys = c.asks("events"), "--zmq-auth events=curve"
		out = append(out, x)
	}
	return out
}

// keeperNice is the keeper's scheduling priority (nice): the keeper has little to do, but must do it at once, beside engines that use
// all processors.
const keeperNice = -10

// raisePriority gives all threads of this process the keeper's priority, if the user may do that; threads that they start inherit it. A
// thread that starts meanwhile may miss it, so raisePriority repeats, at most 16 times, until no thread has missed it.
func raisePriority() {
	const tries, kernelBase = 16, 20 // the system call getpriority returns 20 - nice
	for range tries {
		tasks, _ := os.ReadDir("/proc/self/task") // without /proc the priority does not change
		missed := false
		for _, t := range tasks {
			id, err := strconv.Atoi(t.Name())
			if err != nil {
				continue
			}
			if is, err := unix.Getpriority(unix.PRIO_PROCESS, id); err != nil || is >= kernelBase-keeperNice {
				continue // the thread has ended, or has the priority
			}
			missed = true
			if errors.Is(unix.Setpriority(unix.PRIO_PROCESS, id, keeperNice), unix.EACCES) {
				return // only root may raise the priority
			}
		}
		if !missed {
			return
		}
	}
}

// Run keeps the directories below their limit until a signal stops it.
func (c *keeperKeepCmd) Run(e *env) (err error) {
	if err := c.check(e); err != nil {
		return err
	}
	raisePriority()
	k, err := keeper.Open(c.options(e))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, k.Close()) }()
	a, err := c.accessFlags.open(e.log, c.exposed(), keeperListeners...)
	if err != nil {
		return err
	}
	defer a.watch()()
	figures, stop, err := c.openEvents(e, k, a)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	ended := make(chan error, 1)
	if c.HTTPPort != 0 {
		l, err := takeover.ListenTCP(e.ctx, c.Host, c.HTTPPort)
		if err != nil {
			return takeover.ExplainListen(err, "--host", "--http-port")
		}
		web := httpserver.NewServer(keeperPages(k, a.gateOptions("http"), figures))
		go func() { ended <- a.serve(web, httpserver.Limit(l, httpserver.MaxConns)) }()
		defer func() {
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
			defer cancel()
			err = errors.Join(err, web.Shutdown(ctx))
		}()
		e.log.Info("the keeper's page has the figures", "page", a.url(l.Addr())+"/")
	}
	e.isReady()
	e.log.Info("the keeper watches", "directories", c.Dir, "limit", sizeWords(int64(c.Max)), "min_free", sizeWords(int64(c.MinFree)), "ttl", c.TTL.String())
	select {
	case err := <-ended:
		return err
	case <-e.ctx.Done():
	}
	s := k.Stats()
	e.log.Info("the keeper stops", "bytes", s.Total, "limit", s.Limit)
	return nil
}

func keeperPages(k *keeper.Keeper, guards auth.Options, figures func(*metrics.Registry)) http.Handler {
	registry := metrics.New(Version())
	metrics.Add(registry, k.Stats)
	figures(registry)
	guards.Need = pagesNeed
	gate := auth.New(guards)
	metrics.AddWith(registry, map[string]string{"listener": "http"}, gate.Stats)
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", registry.Handler())
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		if s := k.Stats(); s.CannotUnlink {
			http.Error(w, "files cannot be unlinked: "+s.Refusal, http.StatusServiceUnavailable)
			return
		}
		_, _ = io.WriteString(w, "ok\n")
	})
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(k.Stats()) // the client is gone
	})
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_ = keeperPage.Execute(w, k.Stats()) // the client is gone
	})
	return gate.Handler(mux)
}

var keeperPage = template.Must(template.New("keeper").Funcs(template.FuncMap{"size": sizeWords, "watch": watchWords}).Parse(`<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="5"><title>Kvasir keeper</title>
<style>body{font:15px system-ui,sans-serif;margin:2em;color-scheme:light dark}table{border-collapse:collapse}td,th{padding:.3em .8em;text-align:right;border-bottom:1px solid #8884}td:first-child,th:first-child,td:nth-child(2),th:nth-child(2){text-align:left}progress{width:24em}</style></head>
<body><h1>Keeper</h1>
<p>{{if .Limit}}<progress max="{{.Limit}}" value="{{.Total}}"></progress> {{size .Total}} of {{size .Limit}}, of which {{size .Reserve}} stay free for bursts{{else}}{{size .Total}}, no limit{{end}}.
The file that goes next was last used {{.Oldest}} ago. {{watch .}}</p>
{{if .CannotUnlink}}<p><strong>Files cannot be unlinked: {{.Refusal}}</strong></p>{{end}}
<table><tr><th>directory</th><th>model</th><th>files</th><th>bytes</th><th>read</th><th>written</th><th>evicted</th><th>removed by others</th></tr>
{{range .Directories}}<tr><td>{{.Path}}</td><td>{{.Model}}</td><td>{{.Files}}</td><td>{{size .Bytes}}</td><td>{{.Reads}}, {{size .ReadBytes}}</td><td>{{.Writes}}, {{size .WrittenBytes}}</td><td>{{.Evicted}}, {{size .EvictedBytes}}</td><td>{{.Removed}}</td></tr>
{{end}}</table></body></html>
`))

type keeperStatusCmd struct {
	Dir  string `arg:"" help:"A directory that a keeper of this host has." type:"path"`
	JSON bool   `name:"json" help:"As JSON."`
}

// Run prints the figures of the keeper.
func (c *keeperStatusCmd) Run(e *env) error {
	s, err := keeper.Ask(e.ctx, c.Dir)
	if err != nil {
		return err
	}
	if c.JSON {
		return json.NewEncoder(e.stdout).Encode(s)
	}
	return writeKeeper(e.stdout, s)
}

func writeKeeper(w io.Writer, s keeper.Stats) error {
	switch {
	case !s.Known:
		fmt.Fprintln(w, "the directories are being read for the first time")
	case s.Limit > 0:
		fmt.Fprintf(w, "%s of %s, of which %s stay free for bursts\n", sizeWords(s.Total), sizeWords(s.Limit), sizeWords(s.Reserve))
	default:
		fmt.Fprintf(w, "%s, no limit\n", sizeWords(s.Total))
	}
	fmt.Fprintf(w, "the file that goes next was last used %s ago\n%s\n", s.Oldest.Round(time.Second), watchWords(s))
	if s.CannotUnlink {
		fmt.Fprintf(w, "files cannot be unlinked: %s\n", s.Refusal)
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "\nDIRECTORY\tMODEL\tFILES\tBYTES\tREAD\tWRITTEN\tEVICTED\tREMOVED BY OTHERS")
	for _, d := range s.Directories {
		fmt.Fprintf(t, "%s\t%s\t%d\t%s\t%d\t%s\t%d\t%d\n", printable(d.Path), printable(d.Model), d.Files, sizeWords(d.Bytes), d.Reads, sizeWords(d.WrittenBytes), d.Evicted, d.Removed)
	}
	return t.Flush()
}

// watchWords returns a sentence that says how the keeper learns about reads and writes, and about which share of them.
func watchWords(s keeper.Stats) string {
	switch s.Watch {
	case keeper.WatchFanotify:
		return "Reads and writes are reported at once (fanotify)."
	case keeper.WatchInotify:
		return fmt.Sprintf("Reads and writes are reported at once for %.0f %% of the directories (inotify); the others are looked at again and again.", 100*s.Watched)
	}
	return "The directories are looked at again and again; access times show reads."
}

type keeperVerifyCmd struct {
	Dir      []string `arg:"" help:"Directories of an fs tier." type:"path"`
	StateDir string   `help:"Where checksums are noted." required:"" placeholder:"DIR" type:"path"`
	JSON     bool     `name:"json" help:"As JSON."`
}

// Run compares all files with their checksums.
func (c *keeperVerifyCmd) Run(e *env) error {
	report, err := keeper.Verify(e.ctx, keeper.VerifyOptions{Roots: c.Dir, StateDir: c.StateDir, Log: e.log})
	if err != nil {
		return err
	}
	if c.JSON {
		if err := json.NewEncoder(e.stdout).Encode(report); err != nil {
			return err
		}
	} else {
		fmt.Fprintf(e.stdout, "%d files (%s) read, %d of them for the first time, %d faults\n", report.Files, sizeWords(report.Bytes), report.New, len(report.Faults))
		for _, f := range report.Faults {
			fmt.Fprintf(e.stdout, "%s: %s\n", printable(f.Path), f.Reason)
		}
	}
	if len(report.Faults) > 0 {
		return fmt.Errorf("%d files are not what they were: unlink them, and engines compute them again", len(report.Faults))
	}
	return nil
}
