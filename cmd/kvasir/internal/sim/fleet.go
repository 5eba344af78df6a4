// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/sim/fleet"
	"github.com/kvasir-kv/kvasir/sim/tables"
)

type fleetCmd struct {
	jsonFlag
	constantFlags
	pointFiles

	Nodes   []int         `help:"Nodes of each fleet." default:"1,2,4,8,16,32,64,128,256"`
	Pool    float64       `name:"pool-gib" help:"RAM that a node keeps chunks in, GiB." default:"100"`
	Route   string        `help:"Node of a request: even (the next one) or sticky (the one that had its beginning last, while it has not a quarter more than the mean)." default:"even" enum:"even,sticky"`
	Profile string        `help:"Hardware profile of a node's engine: a name, or a file of kvasir engine calibrate." default:"h100-llama-3.1-8b" group:"Profile"`
	Node    float64       `name:"node-gbps" help:"Network of a node, 10^9 bytes per second, each direction; 0: as fast as it likes." default:"12.5"`
	Timeout time.Duration `name:"l2-prefetch-load-timeout" help:"What a lookup waits for the store at most." default:"2s"`

	Store     float64       `name:"store-gib" help:"What the store keeps, GiB; 0 is all." default:"0" group:"Store"`
	ReadGBps  float64       `name:"read-gbps" help:"What it gives, 10^9 bytes per second; 0: as much as anybody likes." default:"50" group:"Store"`
	WriteGBps float64       `name:"write-gbps" help:"What it takes." default:"50" group:"Store"`
	Latency   time.Duration `help:"Of each request to it." default:"1ms" group:"Store"`

	Trace    string          `help:"Requests of this trace, the same for each fleet, instead of made conversations; agentic: made sessions of coding agents." placeholder:"FILE" group:"Workload"`
	Format   workload.Format `name:"trace-format" help:"How lines are read: mooncake, timed (vLLM's timed_trace), or aiperf (sessions); default by the keys of each line." enum:",mooncake,timed,aiperf" default:"" placeholder:"NAME" group:"Workload"`
	Block    int             `name:"block-tokens" help:"Tokens of the trace's hash ids." default:"512" group:"Workload"`
	Requests int             `help:"Made conversations: requests for each node." default:"200" group:"Workload"`
	Rate     float64         `help:"Requests per second for each node." default:"1" group:"Workload"`
	Seed     uint64          `help:"Seed of conversations and arrivals." default:"1" group:"Workload"`
}

// Help returns the text that kvasir sim fleet --help shows.
func (fleetCmd) Help() string {
	return `Nodes with RAM of their own over one store: what hits where, what passes between them, and from how many nodes on
the store's bandwidth binds. Made conversations grow with the fleet (12 at a time for each node, 3 system prompts for all);
a trace comes faster, and is read three times for each fleet: it may be longer than memory (up to 16.7 million requests and 67 million
different blocks). docs/measured/scale.md has the curves.

Examples:
  kvasir sim fleet --trace conversation_trace.jsonl --plot fleet.svg
  kvasir sim fleet --nodes 1,4,16 --read-gbps 5 --write-gbps 5 --route sticky --csv -`
}

// maxFleetRequests is how many requests all nodes together may send; --requests for more is refused.
const maxFleetRequests = 2_000_000

// options returns the options of the runs. The caller calls done after them, also if there is an error: it closes the trace.
func (c *fleetCmd) options(e *Env) (o fleet.Options, done func(), err error) {
	done = func() {}
	var f faults
	most := 0
	for _, n := range c.Nodes {
		most = max(most, n)
	}
	f.unless(c.Requests >= 1 && c.Requests <= maxFleetRequests/max(most, 1), "--requests %d for each of %d nodes: 1 to %d in all are possible", c.Requests, most, maxFleetRequests)
	f.unless(c.Rate > 0 && c.Rate <= 1e6, "--rate %v is outside 0 to 1000000", c.Rate)
	f.unless(c.Block >= 1, "--block-tokens %d is less than 1", c.Block)
	f.unless(c.Pool > 0 && c.Pool <= 1<<20, "--pool-gib %v is outside 0 to %d", c.Pool, 1<<20)
	f.unless(c.Store >= 0 && c.Store <= 1<<30, "--store-gib %v is outside 0 to %d", c.Store, 1<<30)
	if err := f.err(); err != nil {
		return o, done, err
	}
	p, err := tables.Profile(c.Profile, tables.Options{TokenBudget: c.Budget, Set: c.settings()})
	if err != nil {
		return o, done, err
	}
	p.BlockTokens = 512 // for made conversations; a trace has --block-tokens
	var trace *workload.Trace
	var span fleet.Span
	if c.Trace != "" {
		p.BlockTokens = c.Block
		if trace, err = workload.OpenTrace(c.Trace, workload.TraceOptions{BlockTokens: c.Block, Format: c.Format}); err != nil {
			return o, done, err
		}
		done = func() { _ = trace.Close() } // the file was only read, so the error does not matter
		if span, err = fleet.SpanOf(e.Ctx, trace.Requests()); err != nil {
			return o, done, err
		}
		for _, n := range c.Nodes {
			if last := float64(span.Requests) / (c.Rate * float64(n)); n > 0 && !(last < float64(math.MaxInt64)/1e9) {
				return o, done, fmt.Errorf("%w: --rate %v: the last request would arrive after %.3g s, which is more than 292 years", fleet.ErrOptions, c.Rate, last)
			}
		}
	}
	blocks := func(gib float64) int {
		if gib == 0 {
			return 0
		}
		return max(1, int(gib*(1<<30)/(p.Model.KVBytes()*float64(p.BlockTokens))))
	}
	o = fleet.Options{Profile: p, Nodes: c.Nodes, Pool: blocks(c.Pool), NodeGBps: c.Node, Timeout: c.Timeout, Route: fleet.Route(c.Route)}
	o.Store = fleet.Store{Blocks: blocks(c.Store), ReadGBps: c.ReadGBps, WriteGBps: c.WriteGBps, Latency: c.Latency}
	o.Requests = func(nodes int) iter.Seq2[workload.Request, error] {
		if c.Trace != "" {
			return fleet.AtRate(trace.Requests(), span, c.Rate*float64(nodes))
		}
		list := workload.Chats(c.Requests*nodes, workload.ChatOptions{Seed: c.Seed, Open: 12 * nodes})
		if err := workload.Arrive(list, c.Rate*float64(nodes), 1, c.Seed); err != nil {
			return func(yield func(workload.Request, error) bool) {
				yield(workload.Request{}, fmt.Errorf("%w: --rate %v: %w", fleet.ErrOptions, c.Rate, err))
			}
		}
		return workload.Each(list)
	}
	return o, done, nil
}

// Run plays a fleet of each size, and prints the results.
func (c *fleetCmd) Run(e *Env) error {
	o, done, err := c.options(e)
	defer done()
	if err != nil {
		return asUsage(e, err)
	}
	if err := writable(c.JSON, c.CSV, c.Plot); err != nil {
		return err
	}
	show, end := e.progress("fleets")
	o.Progress = show
	points, err := fleet.Run(e.Ctx, o)
	end()
	if len(points) == 0 {
		return asUsage(e, err)
	}
	files := c.writePoints(e, func(w io.Writer) error { return fleet.WriteCSV(w, points) }, func(w io.Writer) error { return fleet.WriteSVG(w, points) })
	text := func(w io.Writer) error {
		if c.onStdout() {
			return nil
		}
		return fleet.Print(w, points)
	}
	files = errors.Join(files, c.write(e, points, text))
	if err != nil && e.Ctx.Err() != nil {
		err = fmt.Errorf("interrupted after %d fleets", len(points))
	}
	return errors.Join(files, asUsage(e, err))
}
