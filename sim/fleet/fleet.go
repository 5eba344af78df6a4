// SPDX-License-Identifier: Apache-2.0

// Package fleet plays requests in virtual time on a fleet of nodes over one store: what RAM and
// store have of the prompts, what passes between them, and where the store's bandwidth binds.
//
// A node is a pool of blocks (least recently used ones go) below an engine that computes one
// prompt after the other. It loads and writes as package store does: lookups ask in batches,
// reads go head first and not more at a time than the server allows, what comes after the
// timeout is computed and stays, what was evicted meanwhile is not written. Decoding is left
// out.
package fleet

import (
	"context"
	"errors"
	"fmt"
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

// Store is what all nodes share. A zero bandwidth is none that binds.
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
	NodeGBps float64            // network of a node, each direction; 0: as fast as it likes
	Timeout  time.Duration      // that a lookup waits for the store; default 2 s
	Route    Route              // default Even
	Store    Store

	// Requests returns the requests for a fleet of nodes nodes.
	Requests func(nodes int) ([]workload.Request, error)

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
	list, err := o.Requests(nodes)
	if err != nil {
		return p, err
	}
	for i := range list {
		if list[i].BlockTokens != o.Profile.BlockTokens {
			return p, fmt.Errorf("%w: request %d has blocks of %d tokens, the profile of %d", ErrOptions, i+1, list[i].BlockTokens, o.Profile.BlockTokens)
		}
	}
	with, err := play(ctx, o, list, nodes, true)
	if err != nil {
		return p, err
	}
	without, err := play(ctx, o, list, nodes, false)
	if err != nil {
		return p, err
	}
	p = with.point()
	p.Alone = without.point().Hit
	p.Ceiling = ceiling(list)
	return p, nil
}

// ceiling is the share of full blocks that one cache with room for all would have.
func ceiling(list []workload.Request) float64 {
	c, blocks, hits := replay.NewCache[int64](0), 0, 0
	for i := range list {
		q := &list[i]
		full := q.Blocks[:min(len(q.Blocks), q.Input/q.BlockTokens)]
		most, hit := hitLimit(q), 0
		for hit < most && c.Has(full[hit]) {
			hit++
		}
		blocks, hits = blocks+len(full), hits+hit
		c.PutRun(len(full), func(i int) int64 { return full[i] })
	}
	return share(hits, blocks)
}

// hitLimit is how many blocks of a prompt may be hits: one token at least is computed.
func hitLimit(q *workload.Request) int { return min(len(q.Blocks), (q.Input-1)/q.BlockTokens) }

func share(n, of int) float64 { return float64(n) / float64(max(of, 1)) }

// AtRate returns requests that come at a rate per second, on average, in the rhythm that they
// have.
func AtRate(requests []workload.Request, rate float64) []workload.Request {
	out := slices.Clone(requests)
	if len(out) == 0 {
		return out
	}
	span := out[len(out)-1].Arrival - out[0].Arrival
	for i := range out {
		at := float64(i) / float64(len(out)) // of a trace without times
		if span > 0 {
			at = float64(out[i].Arrival-out[0].Arrival) / float64(span)
		}
		out[i].Arrival = time.Duration(at * float64(len(out)) / rate * 1e9)
	}
	return out
}
