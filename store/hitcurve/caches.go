// SPDX-License-Identifier: Apache-2.0

package hitcurve

import (
	"slices"

	"github.com/kvasir-kv/kvasir/store/evict"
)

// Limits of what the caches remember.
const (
	maxSeen    = 1 << 14 // sampled names in each of the two parts of seen; when the newer one is full, the older one is forgotten
	maxForks   = 1 << 13 // sampled chunks in each of the two parts of forks, which are forgotten likewise
	maxEnds    = 512     // prompts whose class is not known yet, and as many whose class is known; the oldest is forgotten
	teachEvery = 32      // batches between two copies of the policy's indices
)

// caches has the sampled caches of all sizes.
type caches struct {
	own   []*cache // with the store's policy, for the sizes of Factors; none if that policy is lru
	lru   []*cache // with lru, for the sizes of Options.sizes
	batch int

	prompt  uint32
	seen    [2]map[uint64]struct{} // sampled names: the newer ones, the older ones
	lessons evict.Lessons
	waiting recent[[]sampled]             // sampled chunks of prompts whose class is not known yet, by the last chunk of the prompt
	ended   recent[evict.PromptEnd]       // classes of prompts, by the last chunk of the prompt
	forks   [2]map[uint64]evict.PromptEnd // sampled chunks that are a fork or before one: the newer ones, the older ones
}

func (c *caches) init() {
	c.seen = [2]map[uint64]struct{}{{}, {}}
	c.forks = [2]map[uint64]evict.PromptEnd{{}, {}}
	c.waiting.init()
	c.ended.init()
}

// learn takes from the store's policy what it has learned since the last call.
func (c *caches) learn(o *Options, rate uint64) {
	if o.Teach == nil {
		return
	}
	c.lessons.Mask = rate - 1
	o.Teach(&c.lessons, c.batch%teachEvery == 0)
	c.batch++
	for _, end := range c.lessons.Ends {
		if end.Fork {
			c.noteFork(end)
			continue
		}
		c.ended.put(end.ID, end)
		c.mark(c.waiting.of[end.ID], end)
	}
}

// mark gives each chunk of a chain the class of the prompt, or of the fork that it belongs to.
func (c *caches) mark(chain []sampled, end evict.PromptEnd) {
	for i := range chain {
		of := end
		for _, forks := range c.forks {
			if fork, ok := forks[chain[i].id]; ok {
				of = fork
				break
			}
		}
		for _, cache := range c.own {
			cache.mark(chain[i].id, of)
		}
	}
}

// noteFork remembers that a chunk is a fork or before one.
func (c *caches) noteFork(end evict.PromptEnd) {
	if len(c.forks[0]) >= maxForks {
		c.forks[1], c.forks[0] = c.forks[0], make(map[uint64]evict.PromptEnd)
	}
	c.forks[0][end.ID] = end
	for _, cache := range c.own {
		cache.mark(end.ID, end)
	}
}

// play plays the sampled chunks of a job in every cache, and adds their hits to n. The chain begins with chunks that were played before.
func (c *caches) play(o *Options, n *counts, chain []sampled, j *job) {
	if c.prompt++; j.play > 0 {
		c.playNew(n, chain, j)
	}
	if o.Teach == nil || len(c.own) == 0 {
		return
	}
	if end, ok := c.ended.of[j.last]; ok {
		c.mark(chain, end)
	}
	c.waiting.put(j.last, slices.Clone(chain))
}

func (c *caches) playNew(n *counts, chain []sampled, j *job) {
	again := 0
	for i := range chain[j.played:] {
		s := &chain[j.played+i]
		if seen := c.remember(s.id); s.counts {
			n.sampled++
			if s.counts = seen; seen {
				again++
			}
		}
	}
	n.again += uint64(again)
	parent := uint64(0)
	if j.played > 0 {
		parent = chain[j.played-1].id
	}
	for i, cache := range c.own {
		n.own[i] += uint64(cache.play(parent, chain[j.played:], j.bytes, c.prompt))
	}
	for i, cache := range c.lru {
		n.lru[i] += uint64(cache.play(parent, chain[j.played:], j.bytes, c.prompt))
	}
}

// remember remembers a sampled name. It reports whether the name was seen before.
func (c *caches) remember(id uint64) bool {
	_, newer := c.seen[0][id]
	if newer {
		return true
	}
	_, older := c.seen[1][id]
	if len(c.seen[0]) >= maxSeen {
		c.seen[1], c.seen[0] = c.seen[0], make(map[uint64]struct{})
	}
	c.seen[0][id] = struct{}{}
	return older
}

// begin makes the caches. It is called when the size of a chunk is known.
func (c *caches) begin(o *Options, rate uint64, bytes int64) {
	sizes, _ := o.sizes()
	for i, s := range sizes {
		part := max(s/int64(rate), bytes)
		c.lru = append(c.lru, newCache(evict.NewLRU(), part))
		if i < len(Factors) {
			if p := c.policy(o.Policy, part); p != nil {
				c.own = append(c.own, newCache(p, part))
			}
		}
	}
}

// chunks returns how many chunks the lru caches have. The other caches have no more.
func (c *caches) chunks() (n int) {
	for _, cache := range c.lru {
		n += len(cache.at)
	}
	return n
}

// thin removes the half of the chunks that is not in a sample of one in `rate`, and half of the room.
func (c *caches) thin(rate uint64) {
	for _, cache := range append(slices.Clone(c.own), c.lru...) {
		cache.thin(rate - 1)
	}
}

// policy returns the store's policy for a sampled cache, or nil if that evicts as lru does.
func (c *caches) policy(name string, bytes int64) evict.Policy {
	switch name {
	case "lru", "leaf-lru":
		return nil
	case "leaf-hazard":
		return evict.NewShadow(&c.lessons)
	}
	p, err := evict.New(name, bytes)
	if err != nil {
		return nil
	}
	return p
}

// recent has the last maxEnds values that were put, by name.
type recent[T any] struct {
	of    map[uint64]T
	order [maxEnds]uint64
	next  int
}

func (r *recent[T]) init() { r.of = make(map[uint64]T) }

func (r *recent[T]) put(id uint64, v T) {
	if _, ok := r.of[id]; !ok {
		delete(r.of, r.order[r.next])
		r.order[r.next] = id
		r.next = (r.next + 1) % maxEnds
	}
	r.of[id] = v
}
