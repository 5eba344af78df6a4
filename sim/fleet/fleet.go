// SPDX-License-Identifier: Apache-2.0

// Package fleet plays requests in virtual time on a fleet of nodes with one shared store. It measures how much of the prompts RAM and
// store have, how many bytes pass between them, and from which size of the fleet on the store's bandwidth limits the hits.
//
// A node is a pool of blocks, which evicts the least recently used ones, below an engine that computes one prompt after the other. It
// loads and writes as package store does: lookups ask in batches; reads begin at the head of the prompt, at most as many at a time as
// the server allows. Blocks that arrive after the timeout stay in RAM, but their prompt was computed. Blocks that were evicted before
// their write are not written. Decoding is left out.
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

// Route says to which node a request is sent.
type Route string

// The routes, which say to which node a request goes.
const (
	// Even sends each request to the next node.
	Even Route = "even"
	// Sticky sends a request to the node that last had the longest beginning of its prompt. If that node has got a quarter more
	// requests than the mean, it sends the request to the node with the fewest requests.
	Sticky Route = "sticky"
)

// Store configures the store that all nodes share. A bandwidth of zero means unlimited.
type Store struct {
	Blocks    int           // capacity in blocks; the least recently used ones are evicted; 0: unlimited
	ReadGBps  float64       // read bandwidth of all nodes together, in 10^9 bytes per second
	WriteGBps float64       // write bandwidth of all nodes together
	Latency   time.Duration // latency of each request
}

// Options describes the runs: one for each number of nodes.
type Options struct {
	Profile  *costmodel.Profile // its BlockTokens must equal those of the requests
	Nodes    []int              // ascending
	Pool     int                // blocks in the RAM of a node
	NodeGBps float64            // network bandwidth of a node, in each direction; 0: unlimited
	Timeout  time.Duration      // how long a lookup waits for the store; default 2 s
	Route    Route              // default Even
	Store    Store

	// Requests returns the requests for a fleet of that many nodes, in the order of their arrivals. It is called three times, and no
	// request is kept, so a trace may be read from a file each time.
	Requests func(nodes int) iter.Seq2[workload.Request, error]

	Progress func(done, total int) // called with the progress; nil: not called
}

// ErrOptions means that the options of a fleet are not valid.
var ErrOptions = errors.New("fleet: invalid options")

// MaxNodes is the largest number of nodes. Validate refuses more.
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

// Point is the result for one fleet. Blocks are full blocks of prompts.
type Point struct {
	Nodes    int     `json:"nodes"`
	Requests int     `json:"requests"`
	Blocks   int     `json:"blocks"`
	Seconds  float64 `json:"virtual_seconds"` // from the first arrival until nothing moves any more

	RAMBlocks   int `json:"ram_blocks"`   // hits in the node's RAM
	StoreBlocks int `json:"store_blocks"` // hits that came from the store in time
	LateBlocks  int `json:"late_blocks"`  // blocks that the store had, but that came too late and were computed again

	Hit     float64 `json:"hit"`     // share of the blocks that are hits
	Alone   float64 `json:"alone"`   // Hit of the same fleet without the store
	Ceiling float64 `json:"ceiling"` // Hit with a single RAM that has room for all blocks

	Stats   int `json:"stats"`   // keys that lookups asked the store for
	Gets    int `json:"gets"`    // objects read
	Heads   int `json:"heads"`   // keys asked for before a write
	Puts    int `json:"puts"`    // objects written
	Doubled int `json:"doubled"` // those of Puts that another node wrote at the same time
	Skipped int `json:"skipped"` // blocks evicted from RAM before they could be written
	Spared  int `json:"spared"`  // lookups that did not use the store, because its reads took too long

	ReadGBps   float64 `json:"read_gbps"`  // of all nodes together
	WriteGBps  float64 `json:"write_gbps"` //
	ReadBusy   float64 `json:"read_busy"`  // share of the time until the last arrival in which the store's read bandwidth was in use
	WriteBusy  float64 `json:"write_busy"`
	EngineBusy float64 `json:"engine_busy"` // the same for the engines until their last prompt, mean over the engines
	MeanTTFT   float64 `json:"mean_ttft_ms"`
	P99TTFT    float64 `json:"p99_ttft_ms"`

	// Binds names the directions in which the store's bandwidth was in use for at least 90 % of the time until the last arrival:
	// "reads", "writes", "reads and writes", or "".
	Binds string `json:"binds,omitempty"`
}

// Run plays all fleets. When ctx ends first, it returns the points so far with ctx's error.
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

// Limits of a run, which ends with ErrOptions beyond them: a request takes 8 bytes, and the name of a block some 40 bytes.
const (
	maxRequests = 1 << 24
	maxNames    = 1 << 26 // different blocks
)

// check returns an error for a request that cannot be played after n others.
func (o *Options) check(q *workload.Request, n int) error {
	switch {
	case q.BlockTokens != o.Profile.BlockTokens:
		return fmt.Errorf("%w: request %d has blocks of %d tokens, the profile of %d", ErrOptions, n+1, q.BlockTokens, o.Profile.BlockTokens)
	case n == maxRequests:
		return fmt.Errorf("%w: there are more than %d requests", ErrOptions, maxRequests)
	}
	return nil
}

// bounded returns an error if there are too many names of blocks.
func bounded(names int) error {
	if names > maxNames {
		return fmt.Errorf("%w: there are more than %d different blocks: play a part of the trace, or bound the store", ErrOptions, maxNames)
	}
	return nil
}

// ceiling returns the share of full blocks that would be hits in one cache with room for all.
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

// hitLimit returns how many blocks of a prompt can be hits: at least one token must be computed.
func hitLimit(q *workload.Request) int { return min(len(q.Blocks), (q.Input-1)/q.BlockTokens) }

func share(n, of int) float64 { return float64(n) / float64(max(of, 1)) }

// Span says how many requests there are, and when the first and the last one arrive.
type Span struct {
	Requests    int
	First, Last time.Duration
}

// SpanOf reads requests and returns their Span. The error is one of the requests, ErrOptions if there are too many, or ctx's.
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

// AtRate returns the requests of a Span with new arrival times: on average `rate` requests per second, with the same rhythm as before.
func AtRate(requests iter.Seq2[workload.Request, error], s Span, rate float64) iter.Seq2[workload.Request, error] {
	return func(yield func(workload.Request, error) bool) {
		i, span := 0, s.Last-s.First
		for q, err := range requests {
			at := float64(i) / float64(max(s.Requests, 1)) // for a trace without times
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
