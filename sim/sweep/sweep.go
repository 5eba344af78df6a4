// SPDX-License-Identifier: Apache-2.0

// Package sweep runs one workload on many deployments in virtual time. It varies the number of engines that prefill and decode, the
// size of the cache that they share, the speed of their network, the tokens of a step, and the requests per second.
package sweep

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"time"

	"github.com/kvasir-kv/kvasir/bench"
	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/sim/cluster"
	"github.com/kvasir-kv/kvasir/sim/costmodel"
)

// Engines says how many engines prefill and how many decode; if Prefill is 0, the Decode engines do both.
type Engines struct{ Prefill, Decode int }

func (e Engines) String() string {
	if e.Prefill == 0 {
		return fmt.Sprintf("%d regular", e.Decode)
	}
	return fmt.Sprintf("%dP%dD", e.Prefill, e.Decode)
}

// Options describes the runs: one for every combination of the lists. An empty list means the profile's own value, or none.
type Options struct {
	Profile *costmodel.Profile

	Engines []Engines // default 1P1D
	Cache   []int     // blocks of a cache that the engines that prefill share; 0: none
	Link    []float64 // GB/s between engines, and of the cache
	Budget  []int     // most tokens of a step
	Rate    []float64 // requests per second, Poisson arrivals; 0: the arrivals of the requests

	// Requests is read once before the first run and once for each run, in the order of arrivals. No request is kept, so a trace may be
	// read from a file each time.
	Requests iter.Seq2[workload.Request, error]
	Seed     uint64 // seed of random arrivals
	SLOs     []bench.SLO

	Progress func(done, total int) // called with the progress; nil: not called
}

// ErrOptions means that the options of a sweep are not valid.
var ErrOptions = errors.New("sweep: invalid options")

// maxPoints is the largest number of runs of a sweep. Validate refuses more.
const maxPoints = 10000

func (o *Options) defaults() {
	if len(o.Engines) == 0 {
		o.Engines = []Engines{{1, 1}}
	}
	if len(o.Cache) == 0 {
		o.Cache = []int{0}
	}
	if len(o.Link) == 0 {
		o.Link = []float64{o.Profile.Constants.TransferGBps}
	}
	if len(o.Budget) == 0 {
		o.Budget = []int{o.Profile.TokenBudget}
	}
	if len(o.Rate) == 0 {
		o.Rate = []float64{0}
	}
}

// Validate returns everything that is wrong with o.
func (o *Options) Validate() error {
	if o.Profile == nil || o.Requests == nil {
		return fmt.Errorf("%w: a profile and requests are needed", ErrOptions)
	}
	var errs []error
	f := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf("%w: %s", ErrOptions, fmt.Sprintf(format, args...)))
		}
	}
	points := 1
	for _, n := range []int{len(o.Engines), len(o.Cache), len(o.Link), len(o.Budget), len(o.Rate)} {
		points = min(points*max(n, 1), 1<<30)
	}
	f(points <= maxPoints, "%d deployments; %d at most are possible", points, maxPoints)
	for _, r := range o.Rate {
		f(r >= 0 && r <= 1e6, "%v requests per second; 0 to 1,000,000 are possible", r)
	}
	for _, g := range o.Link {
		f(g >= 0.001 && g <= 1e6, "a network of %v GB/s; 0.001 to 1,000,000 is possible", g)
	}
	for _, n := range o.Budget {
		f(n >= 1 && n <= 1<<24, "a step of %d tokens; 1 to 2^24 are possible", n)
	}
	return errors.Join(errs...)
}

// Point is one deployment with its results.
type Point struct {
	Engines string  `json:"engines"`
	Prefill int     `json:"prefill"`
	Decode  int     `json:"decode"`
	Cache   int     `json:"cache_blocks"`
	Link    float64 `json:"link_gbps"`
	Budget  int     `json:"max_num_batched_tokens"`
	Rate    float64 `json:"request_rate"` // 0: the arrivals of the requests

	Goodput     float64 `json:"request_goodput"` // requests per second that met all SLOs
	GoodPerGPU  float64 `json:"goodput_per_gpu"`
	Throughput  float64 `json:"output_throughput"`
	Failed      int     `json:"failed"` // requests that fit into no engine
	Cached      float64 `json:"cached"` // share of prompt tokens that were not computed
	PrefillBusy float64 `json:"prefill_busy"`
	DecodeBusy  float64 `json:"decode_busy"`

	Figures cluster.Figures `json:"figures"`
}

// Run runs all deployments. When ctx ends first, it returns the points so far with ctx's error.
func Run(ctx context.Context, o Options) ([]Point, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	o.defaults()
	n, err := workload.Count(ctx, o.Requests)
	switch {
	case err != nil:
		return nil, err
	case n == 0:
		return nil, fmt.Errorf("%w: requests are needed", ErrOptions)
	}
	var todo, done []Point
	for _, e := range o.Engines {
		for _, cache := range o.Cache {
			for _, link := range o.Link {
				for _, budget := range o.Budget {
					for _, rate := range o.Rate {
						todo = append(todo, Point{Engines: e.String(), Prefill: e.Prefill, Decode: e.Decode, Cache: cache, Link: link, Budget: budget, Rate: rate})
					}
				}
			}
		}
	}
	for i := range todo {
		p := todo[i]
		if err := o.measure(ctx, n, &p); err != nil {
			return done, err
		}
		done = append(done, p)
		if o.Progress != nil {
			o.Progress(len(done), len(todo))
		}
	}
	return done, nil
}

// measure runs the deployment p with n requests, and stores the results in p.
func (o *Options) measure(ctx context.Context, n int, p *Point) error {
	profile := *o.Profile
	profile.TokenBudget, profile.Constants.TransferGBps = p.Budget, p.Link
	requests := o.Requests
	if p.Rate > 0 {
		requests = o.arriving(p.Rate)
	}
	good := 0
	v := cluster.Options{Profile: &profile, Prefill: p.Prefill, Decode: p.Decode, Total: n, Ended: func(_ int, q *cluster.Record) {
		if q.Meets(o.SLOs) {
			good++
		}
	}}
	if p.Cache > 0 {
		v.Store = cluster.Store{Blocks: p.Cache, GBps: p.Link, Latency: time.Millisecond}
	}
	r, err := cluster.Stream(ctx, requests, v)
	if err != nil {
		return err
	}
	p.Figures = r.Figures()
	p.Throughput, p.Failed = p.Figures.OutputThroughput, p.Figures.Failed
	if s := r.Duration.Seconds(); s > 0 {
		p.Goodput = float64(good) / s
	}
	p.GoodPerGPU = p.Goodput / float64((p.Prefill+p.Decode)*profile.TP)
	p.PrefillBusy, p.DecodeBusy = r.PrefillBusy, r.DecodeBusy
	p.Cached = float64(r.Cached()) / math.Max(float64(p.Figures.Input), 1)
	return nil
}

// arriving returns the requests with random arrivals at that rate per second.
func (o *Options) arriving(rate float64) iter.Seq2[workload.Request, error] {
	return func(yield func(workload.Request, error) bool) {
		failed := error(nil) // error of the requests themselves
		list := func(yield func(workload.Request, error) bool) {
			for q, err := range o.Requests {
				if failed = err; !yield(q, err) {
					return
				}
			}
		}
		for q, err := range workload.Arriving(list, rate, 1, o.Seed) {
			if err != nil && failed == nil {
				err = fmt.Errorf("%w: %v requests per second: %w", ErrOptions, rate, err)
			}
			if !yield(q, err) {
				return
			}
		}
	}
}
