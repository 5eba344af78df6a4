// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"container/heap"
	"context"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/sim/costmodel"
	"github.com/kvasir-kv/kvasir/sim/replay"
)

// Limits that a kvasir server has, in reads, bytes, writes and objects per call. What exceeds them waits. One engine is one peer, which may
// use half of what other peers leave (store/below.go; probe.go and writeback.go of store/tiering).
const (
	maxReads            = 16
	maxReadBytes        = 512 << 20
	maxWrites           = 8
	firstStat, mostStat = 16, 256
	slowCalls           = 8 // when so many reads, or reads of maxReadBytes, take longer than the timeout, lookups do not use the store
)

// run is one fleet with one workload.
type run struct {
	o      *Options
	bytes  float64 // of a block
	window int     // reads of a node at a time
	nodes  []*node
	store  *replay.Cache[int64] // nil: there is no store
	lastOn map[int64]*node      // node that had a block last, for Sticky
	order  int                  // number of the next request

	happened int // number of events so far
	now      time.Duration
	end      time.Duration // when the last byte moved
	events   events
	read     link
	wrote    link

	p    Point
	ttft []time.Duration
}

// never is a time after which nothing comes, 36 years: sums of such times still fit into a time.
const never = 1 << 60

// link is a network that transfers one block after another.
type link struct {
	gbps float64
	free time.Duration // in use until that time
	busy time.Duration // total time in use
}

// share returns the part of the time until `until` in which the link was in use. Nothing may have been sent over it since.
func (l *link) share(until time.Duration) float64 {
	return float64(l.busy-max(0, l.free-until)) / float64(max(until, 1))
}

// pass returns when `bytes` bytes that come to the link at the time `begin` have passed it.
func (l *link) pass(begin time.Duration, bytes float64) time.Duration {
	if l.gbps == 0 {
		return begin
	}
	takes := time.Duration(min(bytes/l.gbps, never)) // bytes ÷ (GB/s) gives nanoseconds
	l.busy = min(l.busy+takes, never)
	l.free = min(max(l.free, begin)+takes, never)
	return l.free
}

type node struct {
	ram      *replay.Cache[int64]
	in, out  link
	loading  map[int64]*load
	queue    []*load         // loads to be read, in order
	begun    []time.Duration // when each running read began, oldest first
	outbox   []int64
	writing  int
	engine   time.Duration // the engine is in use until that time
	busy     time.Duration
	requests int
}

// load is a block that is being loaded from the store to one node.
type load struct {
	block   int64
	waiters []waiter
}

type waiter struct {
	q  *request
	at int // index of the block in the prompt
}

type request struct {
	*workload.Request
	node    *node
	hits    []bool // for each block of the prompt that can be a hit: whether it is one
	ram     int    // leading blocks in RAM at the arrival
	found   int    // leading blocks in RAM and store together
	pending int    // number of blocks that are being loaded
	settled bool
}

func (q *request) full() []int64 { return q.Blocks[:min(len(q.Blocks), q.Input/q.BlockTokens)] }

// play plays the requests in virtual time. It reads a request when nothing else happens before its arrival.
func play(ctx context.Context, o *Options, nodes int, withStore bool) (*run, error) {
	r := &run{o: o, bytes: o.Profile.Model.KVBytes() * float64(o.Profile.BlockTokens), lastOn: make(map[int64]*node)}
	r.window = max(1, min(maxReads, int(maxReadBytes/r.bytes)))
	r.read.gbps, r.wrote.gbps = o.Store.ReadGBps, o.Store.WriteGBps
	if withStore {
		r.store = replay.NewCache[int64](o.Store.Blocks)
	}
	for range nodes {
		r.nodes = append(r.nodes, &node{ram: replay.NewCache[int64](o.Pool), in: link{gbps: o.NodeGBps}, out: link{gbps: o.NodeGBps}, loading: make(map[int64]*load)})
	}
	r.p.Nodes = nodes
	for q, err := range o.Requests(nodes) {
		if err == nil {
			err = cmp.Or(o.check(&q, r.p.Requests), r.bounded())
		}
		if err == nil {
			err = r.advanceTo(ctx, q.Arrival)
		}
		if err != nil {
			return nil, err
		}
		r.now = max(r.now, q.Arrival)
		r.arrive(&q)
	}
	return r, r.advanceTo(ctx, math.MaxInt64)
}

// advanceTo handles all events before the time moment.
func (r *run) advanceTo(ctx context.Context, moment time.Duration) error {
	for len(r.events.list) > 0 && r.events.list[0].at < moment {
		if r.happened++; r.happened%1024 == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		e := heap.Pop(&r.events).(event)
		r.now = e.at
		e.do()
	}
	return ctx.Err()
}

// bounded returns an error if the run keeps too many names of blocks.
func (r *run) bounded() error {
	if r.p.Requests%1024 > 0 {
		return nil
	}
	names := len(r.lastOn)
	if r.store != nil {
		names = max(names, r.store.Len())
	}
	return bounded(names)
}

// arrive looks up a prompt, and begins to load the blocks that the store has.
func (r *run) arrive(w *workload.Request) {
	q := &request{Request: w, node: r.route(w), hits: make([]bool, hitLimit(w))}
	n := q.node
	r.p.Requests++
	r.p.ReadBusy, r.p.WriteBusy = r.read.share(r.now), r.wrote.share(r.now)
	r.p.Blocks += len(q.full())
	for q.ram < len(q.hits) && n.ram.Has(q.Blocks[q.ram]) {
		q.hits[q.ram] = true
		q.ram++
	}
	n.ram.PutRun(q.ram, func(i int) int64 { return q.Blocks[i] })
	q.found = q.ram
	if r.store == nil || q.ram == len(q.hits) {
		r.settle(q)
		return
	}
	if r.slow(n) {
		r.p.Spared++
		r.settle(q)
		return
	}
	calls := r.ask(q)
	r.at(r.now+time.Duration(calls)*r.o.Store.Latency, func() { r.fetch(q) })
}

// slow reports whether lookups of the node do not use the store, because its reads take too long.
func (r *run) slow(n *node) bool {
	slow := 0
	for slow < len(n.begun) && r.now-n.begun[slow] > r.o.Timeout {
		slow++
	}
	return slow >= slowCalls || slow > 0 && float64(slow)*r.bytes >= maxReadBytes
}

// ask finds, in batches, how many leading blocks node and store have together. It returns how many calls of the store that took.
func (r *run) ask(q *request) (calls int) {
	n := q.node
	for from, step := 0, firstStat; from < len(q.hits); {
		end, asked := min(from+step, len(q.hits)), 0
		missing := end
		for i := from; i < end; i++ {
			if n.ram.Has(q.Blocks[i]) || n.loading[q.Blocks[i]] != nil {
				continue
			}
			if asked++; !r.store.Has(q.Blocks[i]) {
				missing = min(missing, i)
			}
		}
		if asked > 0 {
			calls++
			step = min(4*step, mostStat)
		}
		r.p.Stats += asked
		if q.found = missing; missing < end {
			break
		}
		from = end
	}
	return calls
}

// fetch queues the blocks to be loaded, from the head of the prompt on. The loads of the request end at its deadline.
func (r *run) fetch(q *request) {
	n := q.node
	for i := q.ram; i < q.found; i++ {
		b := q.Blocks[i]
		l := n.loading[b]
		switch {
		case l == nil && n.ram.Has(b):
			q.hits[i] = true
			continue
		case l == nil:
			l = &load{block: b}
			n.loading[b] = l
			n.queue = append(n.queue, l)
		}
		l.waiters = append(l.waiters, waiter{q, i})
		q.pending++
	}
	if q.pending == 0 {
		r.settle(q)
		return
	}
	r.at(r.now+r.o.Timeout, func() { r.settle(q) })
	r.readNext(n)
}

// readNext begins queued reads as long as more may run. It skips a block for which no request waits any more.
func (r *run) readNext(n *node) {
	for len(n.queue) > 0 && len(n.begun) < r.window {
		l := n.queue[0]
		n.queue = n.queue[1:]
		if !slices.ContainsFunc(l.waiters, func(w waiter) bool { return !w.q.settled }) {
			delete(n.loading, l.block)
			continue
		}
		if !r.store.Has(l.block) { // it was evicted after the lookup
			delete(n.loading, l.block)
			r.endLoad(l, false)
			continue
		}
		n.begun = append(n.begun, r.now)
		r.p.Gets++
		r.store.PutRun(1, func(int) int64 { return l.block })
		passed := n.in.pass(r.read.pass(r.now, r.bytes), r.bytes)
		r.at(passed+r.o.Store.Latency, func() {
			r.end = r.now
			n.begun = n.begun[1:]
			delete(n.loading, l.block)
			n.ram.PutRun(1, func(int) int64 { return l.block })
			r.endLoad(l, true)
			r.readNext(n)
		})
	}
}

// endLoad ends the load of a block for the requests that wait for it; ok says whether the block has come.
func (r *run) endLoad(l *load, ok bool) {
	for _, w := range l.waiters {
		w.q.hits[w.at] = ok
		if w.q.pending--; w.q.pending == 0 {
			r.settle(w.q)
		}
	}
}

// settle counts the hit of a prompt, and begins to compute the rest.
func (r *run) settle(q *request) {
	if q.settled {
		return
	}
	q.settled = true
	hit := 0
	for hit < len(q.hits) && q.hits[hit] {
		hit++
	}
	r.p.RAMBlocks += q.ram
	r.p.StoreBlocks += hit - q.ram
	r.p.LateBlocks += q.found - hit
	n := q.node
	takes := prefill(r.o.Profile, hit*q.BlockTokens, q.Input)
	n.engine = max(n.engine, r.now) + takes
	n.busy += takes
	r.at(n.engine, func() { r.computed(q, hit) })
}

// prefill returns how long an engine computes the tokens [from, to) of a prompt.
func prefill(p *costmodel.Profile, from, to int) (total time.Duration) {
	for from < to {
		k := min(p.TokenBudget, to-from)
		var w costmodel.Work
		w.Add(from, k, from+k == to)
		total += p.Step(w)
		from += k
	}
	return total
}

// computed stores the blocks of a computed prompt in RAM, and queues the new ones for writing to the store.
func (r *run) computed(q *request, hit int) {
	r.ttft, r.end = append(r.ttft, r.now-q.Arrival), r.now
	n, full := q.node, q.full()
	var fresh []int64
	for _, b := range full[min(hit, len(full)):] {
		if !n.ram.Has(b) {
			fresh = append(fresh, b)
		}
	}
	n.ram.PutRun(len(full), func(i int) int64 { return full[i] })
	if r.store == nil {
		return
	}
	n.outbox = append(n.outbox, fresh...)
	r.writeNext(n)
}

func (r *run) writeNext(n *node) {
	for len(n.outbox) > 0 && n.writing < maxWrites {
		b := n.outbox[0]
		n.outbox = n.outbox[1:]
		if !n.ram.Has(b) {
			r.p.Skipped++
			continue
		}
		n.writing++
		r.p.Heads++
		r.at(r.now+r.o.Store.Latency, func() { r.write(n, b) })
	}
}

// write writes a block to the store, unless the store has it by now.
func (r *run) write(n *node, b int64) {
	if r.store.Has(b) {
		n.writing--
		r.writeNext(n)
		return
	}
	r.p.Puts++
	passed := n.out.pass(r.wrote.pass(r.now, r.bytes), r.bytes)
	r.at(passed+r.o.Store.Latency, func() {
		r.end = r.now
		if r.store.Has(b) {
			r.p.Doubled++
		}
		r.store.PutRun(1, func(int) int64 { return b })
		n.writing--
		r.writeNext(n)
	})
}

// route returns the node for the next request.
func (r *run) route(q *workload.Request) *node {
	r.order++
	n := r.nodes[(r.order-1)%len(r.nodes)]
	if r.o.Route == Sticky {
		n = r.sticky(q)
		for _, b := range q.Blocks {
			r.lastOn[b] = n
		}
	}
	n.requests++
	return n
}

func (r *run) sticky(q *workload.Request) *node {
	most := 2 + r.order*5/(4*len(r.nodes))
	for _, b := range slices.Backward(q.Blocks) {
		if n := r.lastOn[b]; n != nil {
			if n.requests < most {
				return n
			}
			break
		}
	}
	return slices.MinFunc(r.nodes, func(a, b *node) int { return a.requests - b.requests })
}

// bound is the share of time in use from which a bandwidth counts as binding: at peaks it binds even below that.
const bound = 0.9

// point returns the result of the run.
func (r *run) point() Point {
	p := r.p
	p.Seconds = r.end.Seconds()
	p.Hit = share(p.RAMBlocks+p.StoreBlocks, p.Blocks)
	long := max(p.Seconds, 1e-9)
	p.ReadGBps, p.WriteGBps = float64(p.Gets)*r.bytes/long/1e9, float64(p.Puts)*r.bytes/long/1e9
	for _, n := range r.nodes {
		if n.engine > 0 {
			p.EngineBusy += n.busy.Seconds() / n.engine.Seconds() / float64(len(r.nodes))
		}
	}
	if len(r.ttft) > 0 {
		slices.Sort(r.ttft)
		sum := time.Duration(0)
		for _, t := range r.ttft {
			sum += t / time.Duration(len(r.ttft))
		}
		p.MeanTTFT, p.P99TTFT = sum.Seconds()*1e3, r.ttft[(len(r.ttft)-1)*99/100].Seconds()*1e3
	}
	var binds []string
	if p.ReadBusy >= bound {
		binds = append(binds, "reads")
	}
	if p.WriteBusy >= bound {
		binds = append(binds, "writes")
	}
	p.Binds = strings.Join(binds, " and ")
	return p
}

func (r *run) at(t time.Duration, do func()) {
	r.events.next++
	heap.Push(&r.events, event{t, r.events.next, do})
}

// events is a heap of events by time; of events at the same time, the one that was added first comes first.
type events struct {
	list []event
	next uint64
}

type event struct {
	at     time.Duration
	number uint64
	do     func()
}

func (e *events) Len() int { return len(e.list) }
func (e *events) Less(i, j int) bool {
	a, b := &e.list[i], &e.list[j]
	return a.at < b.at || a.at == b.at && a.number < b.number
}
func (e *events) Swap(i, j int) { e.list[i], e.list[j] = e.list[j], e.list[i] }
func (e *events) Push(x any)    { e.list = append(e.list, x.(event)) }
func (e *events) Pop() any {
	last := len(e.list) - 1
	x := e.list[last]
	e.list[last] = event{}
	e.list = e.list[:last]
	return x
}
