// SPDX-License-Identifier: Apache-2.0

// Package fleet plays requests in virtual time on a fleet of nodes over one store. It measures how
// much of the prompts RAM and store have, how many bytes pass between them, and where the store's
// bandwidth binds.
//
// A node is a pool of blocks (it evicts the least recently used) below an engine that computes
// one prompt after the other. It loads and writes as package store does: Lookups ask in batches.
// Reads go head first, at most as many at a time as the server allows. Blocks that come after
// the timeout stay, but their prompt was computed. Blocks that were evicted before their write
// are not written. Decoding is left out.
package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/sim/costmodel"
	"github.com/kvasir-kv/kvasir/sim/replay"
)

// Route says which node a request goes to.
type Route string

// Routes.
const (
	// Even sends each request to the next node.
	Even Route = "even"
	// Sticky sends a request to the node that had the longest beginning of its prompt last,
	// unless that has a quarter more requests than the mean; then to the one with the fewest.
	Sticky Route = "sticky"
)

// Store is the store that all nodes share. A zero bandwidth is unlimited.
type Store struct {
	Blocks    int           // that it keeps; least recently used ones go; 0: all
	ReadGBps  float64       // 10^9 bytes a second, of all nodes together
	WriteGBps float64       // the same towards the store
	Latency   time.Duration // of each request
}

// Options describe the runs: one for every number of nodes.
type Options struct {
	Profile  *costmodel.Profile // BlockTokens are those of the requests
	Nodes    []int              // ascending
	Pool     int                // blocks of a node's RAM
	NodeGBps float64            // network of a node, each direction; 0: unlimited
	Timeout  time.Duration      // that a lookup waits for the store; default 2 s
	Route    Route              // default Even
	Store    Store

	// Requests returns the requests for a fleet of nodes nodes, in the order of their arrivals. They are asked for three times, and none is
	// kept, so a trace may be read from a file each time.
	Requests func(nodes int) iter.Seq2[workload.Request, error]

	Progress func(done, total int) // nil for none
}

// ErrOptions means that a fleet is impossible.
var ErrOptions = errors.New("fleet: invalid options")

// MaxNodes bounds a fleet.
const MaxNodes = 4096

// Validate reports every field that cannot be used, as options.Errors.
func (o *Options) Validate() error {
	var c options.Checks
	c.That(o.Profile != nil, "Profile", "is missing")
	c.That(o.Requests != nil, "Requests", "are missing")
	c.That(len(o.Nodes) > 0, "Nodes", "are missing")
	for _, n := range o.Nodes {
		options.Within(&c, "Nodes", n, 1, MaxNodes)
	}
	c.That(slices.IsSorted(o.Nodes), "Nodes", "do not ascend")
	options.Within(&c, "Pool", o.Pool, 1, 1<<30)
	options.Within(&c, "Store.Blocks", o.Store.Blocks, 0, 1<<40)
	options.Within(&c, "NodeGBps", o.NodeGBps, 0, 1e6)
	options.Within(&c, "Store.ReadGBps", o.Store.ReadGBps, 0, 1e6)
	options.Within(&c, "Store.WriteGBps", o.Store.WriteGBps, 0, 1e6)
	options.Within(&c, "Store.Latency", o.Store.Latency, 0, time.Minute)
	options.Within(&c, "Timeout", o.Timeout, 0, time.Hour)
	c.That(o.Route == "" || o.Route == Even || o.Route == Sticky, "Route", "is neither even nor sticky")
	return c.Err()
}

// Point is one fleet and what it measured. Blocks are full blocks of prompts.
type Point struct {
	Nodes    int     `json:"nodes"`
	Requests int     `json:"requests"`
	Blocks   int     `json:"blocks"`
	Seconds  float64 `json:"virtual_seconds"` // from the first arrival until nothing moves any more

	RAMBlocks   int `json:"ram_blocks"`   // hits in the node's RAM
	StoreBlocks int `json:"store_blocks"` // hits that came from the store in time
	LateBlocks  int `json:"late_blocks"`  // that the store had, and that were computed again

	Hit     float64 `json:"hit"`     // share of blocks that are hits
	Alone   float64 `json:"alone"`   // the same fleet without the store
	Ceiling float64 `json:"ceiling"` // the same requests with one RAM that has room for all

	Stats   int `json:"stats"`   // keys that lookups asked for
	Gets    int `json:"gets"`    // objects read
	Heads   int `json:"heads"`   // asked for before a write
	Puts    int `json:"puts"`    // objects written
	Doubled int `json:"doubled"` // of these, what another node wrote at the same time
	Skipped int `json:"skipped"` // evicted from RAM before they could be written
	Spared  int `json:"spared"`  // lookups that did without the store, because its reads took too long

	ReadGBps   float64 `json:"read_gbps"`  // of all nodes together
	WriteGBps  float64 `json:"write_gbps"` //
	ReadBusy   float64 `json:"read_busy"`  // share of the store's bandwidth in use until the last arrival
	WriteBusy  float64 `json:"write_busy"`
	EngineBusy float64 `json:"engine_busy"` // mean of the engines, until their last prompt
	MeanTTFT   float64 `json:"mean_ttft_ms"`
	P99TTFT    float64 `json:"p99_ttft_ms"`

	// Binds names the directions in which the store's bandwidth is in use for 90 % of the
	// time until the last arrival or more: "reads", "writes", "reads and writes", or nothing.
	Binds string `json:"binds,omitempty"`
}

// Run plays all fleets. When ctx ends, the points so far are returned with its error.
func Run(ctx context.Context, o Options) ([]Point, error) {
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrOptions, err)
	}
	if o.Timeout == 0 {
		o.Timeout = 2 * time.Second
	}
	var done []Point
	for i, n := range o.Nodes {
		p, err := o.measure(ctx, n)
		if err != nil {
			return done, err
		}
		done = append(done, p)
		if o.Progress != nil {
			o.Progress(i+1, len(o.Nodes))
		}
	}
	return done, nil
}

func (o *Options) measure(ctx context.Context, nodes int) (p Point, err error) {
	with, err := play(ctx, o, nodes, true)
	if err != nil {
		return p, err
	}
	without, err := play(ctx, o, nodes, false)
	if err != nil {
		return p, err
	}
	p = with.point()
	p.Alone = without.point().Hit
	p.Ceiling, err = ceiling(ctx, o.Requests(nodes))
	return p, err
}

// Bounds of a run: requests have 8 bytes each, and names of blocks some 40.
const (
	maxRequests = 1 << 24
	maxNames    = 1 << 26
)

// check is an error for a request that cannot be played after n others.
func (o *Options) check(q *workload.Request, n int) error {
	switch {
	case q.BlockTokens != o.Profile.BlockTokens:
		return fmt.Errorf("%w: request %d has blocks of %d tokens, the profile of %d", ErrOptions, n+1, q.BlockTokens, o.Profile.BlockTokens)
	case n == maxRequests:
		return fmt.Errorf("%w: there are more than %d requests", ErrOptions, maxRequests)
	}
	return nil
}

// bounded is an error where there are too many names.
func bounded(names int) error {
	if names > maxNames {
		return fmt.Errorf("%w: there are more than %d different blocks: play a part of the trace, or bound the store", ErrOptions, maxNames)
	}
	return nil
}

// ceiling is the share of full blocks that one cache with room for all would have.
func ceiling(ctx context.Context, requests iter.Seq2[workload.Request, error]) (float64, error) {
	c, blocks, hits, n := replay.NewCache[int64](0), 0, 0, 0
	for q, err := range requests {
		if n++; n%1024 == 0 {
			err = cmp.Or(err, ctx.Err(), bounded(c.Len()))
		}
		if err != nil {
			return 0, err
		}
		full := q.Blocks[:min(len(q.Blocks), q.Input/q.BlockTokens)]
		most, hit := hitLimit(&q), 0
		for hit < most && c.Has(full[hit]) {
			hit++
		}
		blocks, hits = blocks+len(full), hits+hit
		c.PutRun(len(full), func(i int) int64 { return full[i] })
	}
	return share(hits, blocks), nil
}

// hitLimit is how many blocks of a prompt may be hits: one token at least is computed.
func hitLimit(q *workload.Request) int { return min(len(q.Blocks), (q.Input-1)/q.BlockTokens) }

func share(n, of int) float64 { return float64(n) / float64(max(of, 1)) }

// Span says how many requests there are, and when they come.
type Span struct {
	Requests    int
	First, Last time.Duration
}

// SpanOf reads requests for their Span. Errors: theirs, ErrOptions for too many, that of ctx.
func SpanOf(ctx context.Context, requests iter.Seq2[workload.Request, error]) (s Span, err error) {
	for q, err := range requests {
		switch {
		case err != nil:
			return s, err
		case s.Requests == maxRequests:
			return s, fmt.Errorf("%w: there are more than %d requests", ErrOptions, maxRequests)
		case s.Requests%1024 == 0 && ctx.Err() != nil:
			return s, ctx.Err()
		case s.Requests == 0:
			s.First = q.Arrival
		}
		s.Requests, s.Last = s.Requests+1, q.Arrival
	}
	return s, nil
}

// AtRate returns requests of a Span that come at a rate per second, on average, in the rhythm that they
// have.
func AtRate(requests iter.Seq2[workload.Request, error], s Span, rate float64) iter.Seq2[workload.Request, error] {
	return func(yield func(workload.Request, error) bool) {
		i, span := 0, s.Last-s.First
		for q, err := range requests {
			at := float64(i) / float64(max(s.Requests, 1)) // of a trace without times
			if span > 0 {
				at = float64(q.Arrival-s.First) / float64(span)
			}
			q.Arrival = time.Duration(at * float64(s.Requests) / rate * 1e9)
			if i++; !yield(q, err) {
				return
			}
		}
	}
}
