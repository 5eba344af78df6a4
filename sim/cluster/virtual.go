// SPDX-License-Identifier: Apache-2.0

// Package cluster runs whole deployments in virtual time: prefill and decode engines, or engines that do both, a cache that they share,
// and the network between them. Each engine has vLLM's scheduler (package sim/sched) and its paged KV cache, without bytes or with
// bytes (Options.Bytes). Package sim/costmodel says how long steps and transfers take.
//
// A run is an event loop in one goroutine. The same requests and options give the same result, to the nanosecond. Memory: for each open
// request the hashes, the block tables, and 8 bytes per generated token; 16 bytes for each distinct time of a figure; and, if Records
// are asked for, a Record per request. With bytes, in addition: the KV memory of the engines and the store (Carried.Memory, at most 2
// GiB), 8 bytes for each token of the open requests, and the prompts that were pushed and not yet received.
package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"slices"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/sim/costmodel"
)

// Transport says how KV gets from P to D.
type Transport uint8

// The transports, which say how KV goes from P to D.
const (
	Pull Transport = iota // D asks for the KV, and its request waits: MooncakeConnector
	Push                  // P sends layer by layer, and waits for the last layer: P2pNcclConnector
	Pipe                  // P waits until all KV has been sent: vLLM v0
)

// Options configure a deployment.
type Options struct {
	Profile *costmodel.Profile

	// Prefill and Decode are the numbers of engines. If Prefill is 0, the Decode engines do both.
	Prefill, Decode int

	Transport Transport
	// FirstToken means that the client's first token comes from P, and is delivered when D has the KV. Otherwise D computes the last
	// prompt token again, and the first token comes from D.
	FirstToken bool
	// PrefillAlone means that engines that do both compute prompts first and alone, as SGLang does.
	PrefillAlone bool
	// Concurrency is how many requests the client has open at a time; 0: each is sent at its arrival time.
	Concurrency int

	NoPrefixCache bool
	Store         Store
	Bytes         *Bytes // nil: no KV bytes, only hashes and times

	// Progress is called from time to time with the number of finished requests; nil: it is not called.
	Progress func(done, total int)

	// Only for Stream:
	Total   int  // number of requests that will come, for Progress and an interrupted run; 0: unknown
	Records bool // keep the Record of each request, of at most 2^22 requests

	// Ended is called for each request that has ended, and, at the end of an interrupted run, for each request that was sent and has
	// not ended. Requests are numbered from 0 in the order of their arrivals. The Record is valid only during the call. nil: it is not
	// called.
	Ended func(number int, q *Record)
}

// Limits of a run, which ends with ErrOptions where one is exceeded.
const (
	maxRecords    = 1 << 22 // from Stream, 160 bytes each
	maxOpen       = 1 << 21 // requests that were sent and have not ended
	maxOpenBlocks = 1 << 27 // names of the blocks of open requests: 1 GiB
)

// ErrOptions means that the options of a deployment are not valid.
var ErrOptions = errors.New("cluster: invalid options")

// maxEngines is the largest number of prefill engines, and of decode engines, of a deployment. Validate refuses more.
const maxEngines = 4096

// Validate returns everything that is wrong with o.
func (o *Options) Validate() error {
	var errs []error
	f := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf("%w: %s", ErrOptions, fmt.Sprintf(format, args...)))
		}
	}
	if o.Profile == nil {
		return fmt.Errorf("%w: no profile", ErrOptions)
	}
	profile := o.Profile.Validate()
	errs = append(errs, profile)
	f(o.Prefill >= 0 && o.Prefill <= maxEngines, "%d prefill engines; 0 to %d are possible", o.Prefill, maxEngines)
	f(o.Decode >= 1 && o.Decode <= maxEngines, "%d decode engines; 1 to %d are possible", o.Decode, maxEngines)
	f(o.Transport <= Pipe, "transport %d is unknown", o.Transport)
	f(!o.PrefillAlone || o.Prefill == 0, "PrefillAlone is for engines that do both: it cannot stand beside prefill engines")
	f(o.Concurrency >= 0, "concurrency %d is below 0", o.Concurrency)
	f(o.Store.Blocks >= 0 && o.Store.Blocks <= 1<<26, "a store of %d blocks; 0 to 2^26 are possible", o.Store.Blocks)
	f(o.Store.Blocks == 0 || o.Store.GBps > 0 && o.Store.GBps < 1e9, "a store of %v GB/s; above 0 and below 1e9 is possible", o.Store.GBps)
	f(o.Store.Latency >= 0 && o.Store.Latency < time.Hour, "a store's latency of %v; 0 to an hour is possible", o.Store.Latency)
	if o.Bytes != nil && profile == nil {
		o.validateBytes(f)
	}
	if err := errors.Join(errs...); err != nil || o.Bytes == nil {
		return err
	}
	return o.checkMemory()
}

// maxVirtual is the last moment of a run. A run whose virtual clock passes it ends with ErrOptions.
const maxVirtual = time.Duration(math.MaxInt64 / 8)

// run is one run of a deployment.
type run struct {
	o     Options
	now   time.Duration
	queue events

	prefills, decodes []*engine
	store             *store
	source            source
	next              *request // the request that arrives next; nil: none; used only without a limit on concurrency
	open              map[*request]struct{}
	blocks            int           // number of block hashes of the open requests
	lastArrival       time.Duration // when the last request reached its engine
	sent, done        int
	out               *Result
	gaps              bool          // Records have Gaps
	first, last       time.Duration // when the first request was sent, and when the last token was received

	preemptions int
	moved       int64 // bytes from P to D in the model
	loaded      int64 // bytes from the store in the model

	carried Carried // only with bytes
	buffer  []byte  // one block that is being copied
	failed  error   // error that ends the run
}

// fail ends the run with err, unless err is nil or the run has failed before.
func (r *run) fail(err error) {
	if r.failed == nil {
		r.failed = err
	}
}

// source returns the requests one after another, with their numbers, and nil after the last one.
type source func() (number int, q *workload.Request, err error)

// Run plays requests in a deployment. When ctx ends before the last request has ended, Run returns the result so far, with ctx's error.
func Run(ctx context.Context, requests []workload.Request, o Options) (*Result, error) {
	// Without a limit on concurrency, requests are sent in the order of their arrivals.
	var order []int
	if early := func(a, b workload.Request) int { return cmp.Compare(a.Arrival, b.Arrival) }; o.Concurrency == 0 && !slices.IsSortedFunc(requests, early) {
		order = make([]int, len(requests))
		for i := range order {
			order[i] = i
		}
		slices.SortStableFunc(order, func(a, b int) int { return early(requests[a], requests[b]) })
	}
	at := 0
	o.Total = len(requests)
	out := &Result{Records: make([]Record, len(requests))}
	for i := range out.Records {
		out.Records[i] = Record{Input: requests[i].Input, Prefill: -1}
	}
	return play(ctx, &run{o: o, out: out, gaps: true, source: func() (int, *workload.Request, error) {
		if at == len(requests) {
			return 0, nil, nil
		}
		i := at
		if order != nil {
			i = order[at]
		}
		at++
		return i, &requests[i], nil
	}})
}

// Stream plays requests that come one after another, in the order of their arrivals. It keeps no request after its end, and keeps
// Records only if Options ask for them. An error in requests ends the run with that error.
func Stream(ctx context.Context, requests iter.Seq2[workload.Request, error], o Options) (*Result, error) {
	next, stop := iter.Pull2(requests)
	defer stop()
	n, last, out := 0, time.Duration(0), &Result{sums: &sums{}}
	if o.Records {
		out.Records = []Record{}
	}
	return play(ctx, &run{o: o, out: out, source: func() (int, *workload.Request, error) {
		q, err, ok := next()
		switch {
		case !ok:
			return 0, nil, nil
		case err != nil:
			return 0, nil, err
		case o.Concurrency == 0 && q.Arrival < last:
			return 0, nil, fmt.Errorf("%w: request %d comes at %v, after one that comes at %v", ErrOptions, n+1, q.Arrival, last)
		case o.Records && n == maxRecords:
			return 0, nil, fmt.Errorf("%w: there are more than %d requests, whose records are kept", ErrOptions, maxRecords)
		}
		n, last = n+1, q.Arrival
		return n - 1, &q, nil
	}})
}

// play plays all requests of a run and returns the result.
func play(ctx context.Context, r *run) (_ *Result, err error) {
	o := r.o
	if err := o.Validate(); err != nil {
		return nil, err
	}
	r.lastArrival, r.open, r.first = -o.Profile.Spacing(), make(map[*request]struct{}), math.MaxInt64
	if o.Store.Blocks > 0 {
		if r.store, err = newStore(r, o.Store); err != nil {
			return nil, err
		}
		defer func() {
			if cerr := r.store.close(); cerr != nil {
				err = errors.Join(err, cerr)
			}
		}()
	}
	if err := r.addEngines(); err != nil {
		return nil, err
	}
	r.fail(r.fetch())
	if o.Concurrency > 0 {
		for range o.Concurrency {
			if r.next == nil {
				break
			}
			r.send()
		}
	}
	err = r.loop(ctx)
	return r.result(), err
}

// addEngines creates the engines.
func (r *run) addEngines() error {
	o := r.o
	add := func(list *[]*engine, n int, as role) error {
		for i := range n {
			e := &engine{run: r, role: as, number: i, met: make(map[*engine]bool)}
			*list = append(*list, e)
			if o.Bytes != nil {
				var err error
				if e.memory, err = newMemory(r); err != nil {
					return err
				}
			}
			if o.PrefillAlone {
				e.core = &prefillFirst{e: e}
				continue
			}
			v, err := newVLLM(e)
			if err != nil {
				return err
			}
			e.core = v
		}
		return nil
	}
	as := decode
	if o.Prefill == 0 {
		as = both
	}
	return errors.Join(add(&r.prefills, o.Prefill, prefill), add(&r.decodes, o.Decode, as))
}

// fetch reads the next request from the source.
func (r *run) fetch() error {
	number, from, err := r.source()
	if err != nil || from == nil {
		r.next = nil
		return err
	}
	q := &request{number: number, from: from, limit: max(from.Output, 1)}
	q.Input, q.Prefill = from.Input, -1
	r.next = q
	return nil
}

func (r *run) loop(ctx context.Context) error {
	for n := 0; ; n++ {
		if n%4096 == 0 {
			if err := ctx.Err(); err != nil {
				return err
			}
			r.progress()
		}
		if r.failed != nil {
			return r.failed
		}
		// Among events at the same time, arrivals come first.
		arrival := r.next != nil && r.o.Concurrency == 0 && (len(r.queue.list) == 0 || r.next.from.Arrival <= r.queue.list[0].at)
		if arrival {
			r.now = r.next.from.Arrival
		} else if len(r.queue.list) > 0 {
			r.now = r.queue.list[0].at
		} else {
			break
		}
		if arrival && r.now > maxVirtual {
			return fmt.Errorf("%w: request %d comes at %v, %v is the last moment: let the times begin near 0", ErrOptions, r.sent+1, r.now, maxVirtual)
		}
		if r.now > maxVirtual {
			return fmt.Errorf("%w: the clock passed %v with %d of %d requests done", ErrOptions, maxVirtual, r.done, r.total())
		}
		if arrival {
			q := r.next
			r.fail(r.fetch())
			r.arrive(q)
			continue
		}
		e, _ := r.queue.pop()
		e.f()
	}
	if r.done != r.sent || r.next != nil {
		return fmt.Errorf("%w: after %v nothing moves any more, with %d of %d requests done", ErrOptions, r.now, r.done, r.total())
	}
	r.progress()
	return nil
}

// total returns the number of requests, as far as it is known.
func (r *run) total() int { return max(r.o.Total, r.sent, 1) }

func (r *run) progress() {
	if r.o.Progress != nil {
		r.o.Progress(r.done, r.total())
	}
}

func (r *run) at(t time.Duration, f func())    { r.queue.push(event{at: t, f: f}) }
func (r *run) after(d time.Duration, f func()) { r.at(r.now+d, f) }

// send sends the next request of a client with a limit on concurrency.
func (r *run) send() {
	if q := r.next; q != nil {
		r.fail(r.fetch())
		r.after(0, func() { r.arrive(q) })
	}
}

// arrive sends q to its first engine.
func (r *run) arrive(q *request) {
	q.Sent = r.now
	r.sent++
	r.open[q] = struct{}{}
	if r.blocks += len(q.from.Blocks); len(r.open) > maxOpen || r.blocks > maxOpenBlocks {
		r.fail(fmt.Errorf("%w: %d requests with %d names of blocks wait after %v, %d and %d at most: take more engines, or play fewer requests", ErrOptions,
			len(r.open), r.blocks, r.now, maxOpen, maxOpenBlocks))
	}
	if r.o.Records && q.number == len(r.out.Records) && !r.gaps {
		r.out.Records = append(r.out.Records, q.Record)
	}
	if r.o.Bytes != nil {
		q.prepare(r.o.Profile.BlockTokens, r.store != nil)
	}
	e := least(r.decodes)
	e.load += q.Input + q.limit
	q.d, q.Decode = e, e.number
	if len(r.prefills) > 0 {
		e = least(r.prefills)
		e.load += q.Input
		q.p, q.Prefill = e, e.number
	}
	r.lastArrival = max(r.lastArrival+r.o.Profile.Spacing(), r.now+r.o.Profile.Hop())
	r.at(r.lastArrival+r.o.Profile.Host(q.Input), func() {
		q.Queued = r.now
		r.add(e, q)
	})
}

// least returns the engine with the smallest load in tokens.
func least(engines []*engine) *engine {
	best := engines[0]
	for _, e := range engines[1:] {
		if e.load < best.load {
			best = e
		}
	}
	return best
}

func (r *run) add(e *engine, q *request) {
	if err := e.core.add(q); err != nil {
		q.Error = err.Error()
		r.finished(q)
		return
	}
	e.turn()
}

// begun records that the computing of q's first tokens begins at e.
func (r *run) begun(e *engine, q *request) {
	if e.role != decode && q.Started == 0 {
		q.Started = r.now
	}
	if e.role == decode && q.Decoding == 0 {
		q.Decoding = r.now
	}
}

// token records that q got a token at e.
func (r *run) token(e *engine, q *request) {
	if e.role != decode && q.Prefilled == 0 {
		q.Prefilled = r.now
	}
	if e.role == prefill {
		return
	}
	if q.Output < q.limit { // with P's first token, D may generate one token more than the request wants
		q.Output++
		r.deliver(q, r.now+r.o.Profile.Hop())
	}
}

// deliver records that the client gets a token of q at the time `at`.
func (r *run) deliver(q *request, at time.Duration) {
	if q.First == 0 {
		q.First = at
	} else {
		q.Gaps = append(q.Gaps, at-q.Last)
	}
	q.Last = at
}

// ended handles the end of q at e.
func (r *run) ended(e *engine, q *request) {
	if r.store != nil && e.role != decode {
		r.store.put(q)
	}
	if e.role != prefill {
		r.finished(q)
		return
	}
	e.load -= q.Input
	r.after(r.o.Profile.Hop()+r.o.Profile.Host(q.Input), func() {
		q.Dispatched = r.now
		if r.o.Transport != Pull {
			q.Loading, q.Loaded = q.Prefilled, q.Prefilled
		}
		r.add(q.d, q)
	})
}

// finished records that q has ended for the client.
func (r *run) finished(q *request) {
	r.done++
	r.take(q)
	delete(r.open, q)
	r.blocks -= len(q.from.Blocks)
	q.forget()
	q.d.load -= q.Input + q.limit
	if r.o.Concurrency > 0 {
		r.at(max(q.Last, r.now), r.send)
	}
}

// hand brings the KV of `external` tokens of q to D, into the blocks of table.
func (r *run) hand(d *engine, q *request, table []int32, external int) {
	p := r.o.Profile
	if r.o.Transport != Pull {
		if r.o.Transport == Push {
			d.extra += p.Receive()
		}
		if d.memory != nil {
			d.memory.receive(q, table, q.Input-1-external, q.Input-1)
		}
		return
	}
	blocks := (external + p.BlockTokens - 1) / p.BlockTokens
	from, to := q.atP.Tables()[0], table[len(table)-blocks:]
	from = from[len(from)-blocks:]
	runs := 1
	for i := 1; i < blocks; i++ {
		if from[i] != from[i-1]+1 || to[i] != to[i-1]+1 {
			runs++
		}
	}
	link, wait := p.Transfer(blocks, runs)
	q.Loading = max(r.now, q.p.link, d.link)
	q.p.link, d.link = q.Loading+link, q.Loading+link
	r.moved += p.TransferBytes(blocks)
	r.at(q.Loading+link+wait, func() {
		q.Loaded = r.now
		if d.memory != nil {
			r.pull(q.p, d, from, to)
			d.memory.check(span{q, table, q.Input - external, q.Input})
		}
		if r.o.FirstToken && q.First == 0 {
			q.Output++
			r.deliver(q, r.now+p.Hop())
		}
		q.p.out.Sent = append(q.p.out.Sent, q.atP.ID)
		d.out.Arrived = append(d.out.Arrived, q.atD.ID)
		q.p.turn()
		d.turn()
	})
}

// event is a function to be called at a virtual time.
type event struct {
	at     time.Duration
	number int // for events at the same time: order in which they were added
	f      func()
}

func (e *event) before(o *event) bool { return e.at < o.at || e.at == o.at && e.number < o.number }

// events is a heap of events by time.
type events struct {
	list   []event
	pushed int
}

func (q *events) push(e event) {
	q.pushed++
	e.number = q.pushed
	q.list = append(q.list, e)
	for i := len(q.list) - 1; i > 0; {
		up := (i - 1) / 2
		if !q.list[i].before(&q.list[up]) {
			return
		}
		q.list[i], q.list[up] = q.list[up], q.list[i]
		i = up
	}
}

func (q *events) pop() (e event, ok bool) {
	if len(q.list) == 0 {
		return e, false
	}
	e = q.list[0]
	n := len(q.list) - 1
	q.list[0], q.list[n] = q.list[n], event{}
	q.list = q.list[:n]
	for i := 0; ; {
		least := i
		for c := 2*i + 1; c <= 2*i+2 && c < n; c++ {
			if q.list[c].before(&q.list[least]) {
				least = c
			}
		}
		if least == i {
			return e, true
		}
		q.list[i], q.list[least] = q.list[least], q.list[i]
		i = least
	}
}
