// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/kvasir-kv/kvasir/bench"
	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/sim/sweep"
	"github.com/kvasir-kv/kvasir/sim/tables"
)

// pointFiles are the flags that write the points of a result as CSV and as a drawing.
type pointFiles struct {
	CSV  string `name:"csv" help:"Write the points to this file; - is standard output." placeholder:"FILE"`
	Plot string `help:"Draw the points into this SVG file." placeholder:"FILE"`
}

// onStdout reports whether one of the files is standard output. Then the command prints no table.
func (f *pointFiles) onStdout() bool { return f.CSV == "-" || f.Plot == "-" }

// writePoints writes each of the two files that is asked for. asCSV and asSVG write their content.
func (f *pointFiles) writePoints(e *Env, asCSV, asSVG func(io.Writer) error) error {
	var errs []error
	for _, file := range []struct {
		path  string
		write func(io.Writer) error
	}{{f.CSV, asCSV}, {f.Plot, asSVG}} {
		var b bytes.Buffer
		switch file.path {
		case "":
		case "-":
			errs = append(errs, file.write(e.Stdout))
		default:
			errs = append(errs, file.write(&b), os.WriteFile(file.path, b.Bytes(), 0o644))
		}
	}
	return errors.Join(errs...)
}

type sweepCmd struct {
	jsonFlag
	pointFiles

	Profile string             `help:"Hardware profile of an engine: a name, or a file of kvasir engine calibrate." default:"a10-qwen2.5-7b" group:"Profile"`
	Set     map[string]float64 `help:"Give a constant of the profile another value; again for more." placeholder:"CONSTANT=VALUE" group:"Profile"`

	PD     []string  `name:"pd" help:"Engines that prefill and decode, as 2:1; 0:3 are three that do both." default:"1:1" group:"Swept"`
	Cache  []int     `name:"cache-blocks" help:"Blocks of a store below the engines; 0 is none." default:"0" group:"Swept"`
	Link   []float64 `name:"link-gbps" help:"Network between engines, GB/s; default the profile's." group:"Swept"`
	Budget []int     `name:"token-budget" aliases:"chunk-size" help:"Tokens of a step; default the profile's." group:"Swept"`
	Rate   []float64 `help:"Requests per second; 0 is as the trace has them, or all at once." default:"1,2,4" group:"Swept"`

	Trace    string   `help:"Requests of this trace instead of made conversations." placeholder:"FILE" group:"Workload"`
	Requests int      `help:"How many." default:"300" group:"Workload"`
	Input    int      `name:"random-input-len" help:"Tokens of each prompt, for unrelated prompts instead of conversations." default:"0" placeholder:"TOKENS" group:"Workload"`
	Output   int      `name:"random-output-len" help:"Tokens that each of them generates." default:"128" placeholder:"TOKENS" group:"Workload"`
	Seed     uint64   `help:"Seed of requests and arrivals." default:"1" group:"Workload"`
	Goodput  []string `help:"Limits of a good request, milliseconds." default:"ttft:2000,tpot:50" placeholder:"NAME:MS" group:"Workload"`
}

// Help returns the text that kvasir sim sweep --help shows.
func (sweepCmd) Help() string {
	return `Every combination of what is swept is a run of the same requests in virtual time. Interrupted, it keeps what has ended.
A trace is read once before the runs and once for each, and may be longer than memory: a run keeps the requests that have not ended.

Examples:
  kvasir sim sweep --pd 1:1,2:1,1:2,0:3 --rate 0.5,1,2,4 --plot sweep.svg
  kvasir sim sweep --cache-blocks 0,10000,100000 --pd 4:2 --csv -
  kvasir sim sweep --profile h100-70b-tp4 --random-input-len 4000 --token-budget 2048,8192 --json -`
}

// options returns the options of the runs. The caller calls done after them, also if there is an error: it closes the trace.
func (c *sweepCmd) options() (o sweep.Options, done func(), err error) {
	done = func() {}
	p, err := tables.Profile(c.Profile, tables.Options{Set: sortedSettings(c.Set)})
	if err != nil {
		return o, done, err
	}
	o = sweep.Options{Profile: p, Cache: c.Cache, Link: c.Link, Budget: c.Budget, Rate: c.Rate, Seed: c.Seed}
	for _, pair := range c.PD {
		a, b, ok := strings.Cut(pair, ":")
		prefill, err1 := strconv.Atoi(a)
		decode, err2 := strconv.Atoi(b)
		if !ok || errors.Join(err1, err2) != nil {
			return o, done, usagef("--pd %q is not as 2:1", pair)
		}
		o.Engines = append(o.Engines, sweep.Engines{Prefill: prefill, Decode: decode})
	}
	if o.SLOs, err = bench.ParseSLOs(c.Goodput); err != nil {
		return o, done, usagef("--goodput: %v", err)
	}
	switch {
	case c.Requests < 1 || c.Requests > 1_000_000:
		return o, done, usagef("--requests %d is outside 1 to 1000000", c.Requests)
	case c.Trace != "":
		trace, err := workload.OpenTrace(c.Trace, workload.TraceOptions{Max: c.Requests})
		if err != nil {
			return o, done, err
		}
		done = func() { _ = trace.Close() } // the file was only read, so the error does not matter
		o.Requests = trace.Requests()
	case c.Input > 0:
		list, err := workload.Random(c.Requests, c.Input, c.Output, 0, c.Seed)
		if err != nil {
			return o, done, usagef("%v", err)
		}
		o.Requests = workload.Each(list)
	default:
		o.Requests = workload.Each(workload.Chats(c.Requests, workload.ChatOptions{Seed: c.Seed}))
	}
	return o, done, nil
}

// Run plays every combination of the values that are swept, and prints the points.
func (c *sweepCmd) Run(e *Env) error {
	o, done, err := c.options()
	defer done()
	if err != nil {
		return asUsage(e, err)
	}
	if err := writable(c.JSON, c.CSV, c.Plot); err != nil {
		return err
	}
	show, end := e.progress("deployments")
	o.Progress = show
	points, err := sweep.Run(e.Ctx, o)
	end()
	if len(points) == 0 {
		return asUsage(e, err)
	}
	files := c.writePoints(e, func(w io.Writer) error { return sweep.WriteCSV(w, points) }, func(w io.Writer) error { return sweep.WriteSVG(w, points) })
	text := func(w io.Writer) error {
		if c.onStdout() {
			return nil
		}
		return sweep.Print(w, points)
	}
	files = errors.Join(files, c.write(e, points, text))
	if err != nil && e.Ctx.Err() != nil {
		err = fmt.Errorf("interrupted after %d deployments", len(points))
	}
	return errors.Join(files, asUsage(e, err))
}
