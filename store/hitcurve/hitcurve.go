// SPDX-License-Identifier: Apache-2.0

// Package hitcurve estimates, from the lookups of a running store, what other amounts of memory would have found.
//
// The ceiling is the hit rate of an unlimited memory: all chunks are hits except the first of each name. Sketches count the names. The
// curve is the hit rate at 1/2 to 16 times the pool's size, and at the size of the pool and its tiers. For the curve, small caches play a
// sample of the chunks, chosen by their names (SHARDS: C. Waldspurger et al., FAST 2015), with the store's own policy and with lru. A
// sample of chunks gives the hits of whole prompts, because a cache that drops the end of a prompt before its beginning has, with a chunk,
// all chunks before it.
//
// Three corrections allow a small sample. The sample tells only which part of the repeated chunks a cache misses; the sketches tell how
// many chunks are repeated. Chunks that very many prompts have count as hits, outside of the sample. And the curve of the store's policy is
// made to go through the hit rate that the pool really had.
package hitcurve

import (
	"context"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/store/evict"
)

// Factors are the sizes of the curve, as multiples of the pool's size.
var Factors = [...]float64{0.5, 1, 2, 4, 8, 16}

// poolFactor is the index of the pool's own size in Factors.
const poolFactor = 1

// Options configures Curves.
type Options struct {
	Policy string // the store's policy, one of evict.Names
	Bytes  int64  // of the pool
	Tiers  []Tier // tiers below the pool, in the order in which they are asked

	// Teach fills in what the store's leaf-hazard has learned (evict.LeafHazard.Teach); nil: nothing.
	Teach func(l *evict.Lessons, whole bool)
}

// Tier is a tier below the pool.
type Tier struct {
	Name  string
	Bytes int64 // 0: unlimited
}

// maxTierBytes is the size of pool and tiers together from which on a tier counts as unlimited.
const maxTierBytes = 1 << 58

// MaxTiers bounds the tiers of a curve. New leaves out further ones.
const MaxTiers = 8

// Limits of the sample.
const (
	maxSampled = 15 << 10 // chunks in all sampled caches of one policy
	maxQueued  = 1 << 14  // sampled chunks that wait for Play; further prompts are left out
	maxRate    = 1 << 20  // at most one chunk in so many is sampled, even if the caches then have more than maxSampled
)

// Curves makes the estimates. Its methods are safe for concurrent use. The mutex mu is a leaf. The mutex playing is taken before mu, and
// before the locks of Options.Teach.
type Curves struct {
	opts    Options
	news    chan struct{} // something is queued; capacity 1
	playing sync.Mutex    // guards caches
	caches  caches

	mu struct {
		sync.Mutex
		windows windows
		hot     hotChunks
		rate    uint64 // one chunk in `rate` is sampled; 0 until the first chunk
		jobs    []job
		queue   []sampled // sampled chunks of the jobs
	}
}

// sampled is a chunk of the sample. counts says that its hit or miss counts: a lookup asked for it, and it is not hot.
type sampled struct {
	id     uint64
	counts bool
}

// job is a part of a prompt that has sampled chunks. Its chunks are the next ones of the queue: first `played` chunks that were played
// before, then `play` chunks to play.
type job struct {
	played, play int
	last         uint64 // name of the last chunk of the part
	bytes        int64  // of a chunk
}

// New returns Curves that have recorded nothing.
func New(o Options) *Curves {
	o.Tiers = o.Tiers[:min(len(o.Tiers), MaxTiers)]
	c := &Curves{opts: o, news: make(chan struct{}, 1)}
	c.caches.init()
	return c
}

// Lookup is what one lookup asked for and found.
type Lookup struct {
	Asked int // chunks
	Pool  int // chunks of them that the pool had
	Below int // chunks of them that came from tiers

	// Chunks are the names of the leading chunks of the prompt, as far as they are known. The others may follow when the request stores
	// them: see Stored.
	Chunks []uint64
	From   int   // leading chunks that the engine had itself: they count as used, not as asked for
	Bytes  int64 // of a chunk, in all its objects
	Tokens int   // of a chunk
}

// Lookup records a lookup. `now` is the time since a fixed moment.
func (c *Curves) Lookup(l *Lookup, now time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.mu.windows.at(now)
	n.lookups++
	n.asked += uint64(l.Asked)
	n.pool += uint64(l.Pool)
	n.below += uint64(l.Below)
	n.bytes += uint64(l.Asked) * uint64(l.Bytes)
	n.tokens += uint64(l.Asked) * uint64(l.Tokens)
	from := min(l.From, len(l.Chunks))
	c.noteLocked(n, l.Chunks, 0, from, had, l.Bytes)
	c.noteLocked(n, l.Chunks, from, len(l.Chunks), asked, l.Bytes)
}

// Stored records the chunks that a request stores and that its Lookup did not name: chunks[from:]. Those within the first `prompt` chunks
// belong to the prompt and were asked for; those after it belong to the answer and were not.
func (c *Curves) Stored(chunks []uint64, from, prompt int, bytes int64, now time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.mu.windows.at(now)
	prompt = min(max(prompt, from), len(chunks))
	c.noteLocked(n, chunks, from, prompt, asked, bytes)
	c.noteLocked(n, chunks, prompt, len(chunks), answered, bytes)
	n.answers += uint64(len(chunks) - prompt)
}

// noted says why a chunk is recorded.
type noted uint8

const (
	asked    noted = iota
	had            // the engine had it, so it was not asked for: it changes the caches and counts nowhere
	answered       // stored and not asked for: it counts as a distinct chunk, which stretch.answers subtracts again
)

// noteLocked counts chunks[from:to], as `why` says. It does not count the chunks before them, but queues those of the sample as played
// before. If more than maxQueued chunks would wait for Play, it queues none.
func (c *Curves) noteLocked(n *counts, chunks []uint64, from, to int, why noted, bytes int64) {
	if from == to {
		return
	}
	if c.mu.rate == 0 {
		c.mu.rate = c.opts.rate(bytes)
	}
	mask, names, before := c.mu.rate-1, c.mu.windows.names(), len(c.mu.queue)
	for _, id := range chunks[:from] {
		if id&mask == 0 {
			c.mu.queue = append(c.mu.queue, sampled{id: id})
		}
	}
	j := job{played: len(c.mu.queue) - before, last: chunks[to-1], bytes: bytes}
	for i, id := range chunks[from:to] {
		switch why {
		case answered:
			c.mu.windows.current.answered.add(id)
			fallthrough
		case asked:
			names.add(id)
		}
		hot := from+i < hotPositions && c.mu.hot.note(from+i, id)
		if hot && why == asked {
			n.hot++
		}
		if id&mask == 0 {
			c.mu.queue = append(c.mu.queue, sampled{id, why == asked && !hot})
		}
	}
	if why == asked {
		n.named += uint64(to - from)
	}
	j.play = len(c.mu.queue) - before - j.played
	if j.play+j.played == 0 || len(c.mu.queue) > maxQueued {
		c.mu.queue = c.mu.queue[:before]
		return
	}
	c.mu.jobs = append(c.mu.jobs, j)
	select {
	case c.news <- struct{}{}:
	default:
	}
}

const (
	// playDelay is how long sampled chunks wait for others, so that not every lookup wakes a goroutine.
	playDelay = 50 * time.Millisecond

	// mayTake is the part of a processor's time that Run may take, over playPeriod. If Run takes more, it halves the sample.
	mayTake    = 0.05
	playPeriod = 10 * time.Second
)

// Run plays the sampled chunks until ctx ends.
func (c *Curves) Run(ctx context.Context) {
	delay := time.NewTimer(playDelay)
	defer delay.Stop()
	var took time.Duration
	for since := time.Now(); ; {
		select {
		case <-ctx.Done():
			return
		case <-c.news:
		}
		delay.Reset(playDelay)
		select {
		case <-ctx.Done():
			return
		case <-delay.C:
		}
		began := time.Now()
		c.Play()
		took += time.Since(began)
		if passed := time.Since(since); passed > playPeriod {
			if took.Seconds() > mayTake*passed.Seconds() {
				c.thin()
			}
			since, took = time.Now(), 0
		}
	}
}

// thin halves the sample, and drops the chunks that wait for Play. At maxRate it does nothing.
func (c *Curves) thin() {
	c.playing.Lock()
	defer c.playing.Unlock()
	c.thinPlayed()
}

// thinPlayed is thin for a caller that has the mutex playing.
func (c *Curves) thinPlayed() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.rate == 0 || c.mu.rate >= maxRate {
		return
	}
	c.mu.rate *= 2
	c.mu.jobs, c.mu.queue = nil, nil
	c.caches.thin(c.mu.rate)
}

// Play plays the sampled chunks that were not played yet.
func (c *Curves) Play() {
	c.playing.Lock()
	defer c.playing.Unlock()
	jobs, queue, rate := c.take()
	if len(jobs) == 0 {
		return
	}
	if c.caches.lru == nil {
		c.caches.begin(&c.opts, rate, jobs[0].bytes)
	}
	var n counts
	c.caches.learn(&c.opts, rate)
	for _, j := range jobs {
		chain := queue[:j.played+j.play]
		c.caches.play(&c.opts, &n, chain, &j)
		queue = queue[len(chain):]
		if c.caches.chunks() > maxSampled+len(c.caches.lru) { // later models have smaller chunks than the first one
			c.thinPlayed()
			break // the other jobs were sampled at the former rate
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if s := c.mu.windows.current; s != nil {
		s.add(&n)
	}
}

// take empties the queue and returns what was in it.
func (c *Curves) take() (jobs []job, queue []sampled, rate uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	jobs, queue, c.mu.jobs, c.mu.queue = c.mu.jobs, c.mu.queue, nil, nil
	return jobs, queue, c.mu.rate
}

// sizes returns the sizes for which there are caches: those of Factors, then for each tier that has a limit the size of the pool and all
// tiers up to it. tiers has for each tier its index in sizes; -1 for an unlimited tier and for the tiers below it.
func (o *Options) sizes() (sizes []int64, tiers []int) {
	for _, f := range Factors {
		sizes = append(sizes, int64(f*float64(o.Bytes)))
	}
	below, endless := o.Bytes, false
	for _, t := range o.Tiers {
		if endless = endless || t.Bytes == 0 || t.Bytes > maxTierBytes-below; endless {
			tiers = append(tiers, -1)
			continue
		}
		below += t.Bytes
		tiers = append(tiers, len(sizes))
		sizes = append(sizes, below)
	}
	return sizes, tiers
}

// rate returns the sampling rate for chunks of `bytes` bytes: one chunk in that many is sampled. It is a power of two.
func (o *Options) rate(bytes int64) uint64 {
	sizes, _ := o.sizes()
	all := int64(0)
	for _, s := range sizes {
		all += s / max(bytes, 1)
	}
	rate := int64(1)
	for all/rate > maxSampled && rate < maxRate {
		rate *= 2
	}
	return uint64(rate)
}
