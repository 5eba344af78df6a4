// SPDX-License-Identifier: Apache-2.0

package hitcurve

import "github.com/kvasir-kv/kvasir/store/evict"

// cache is a sampled cache: a policy over the sampled chunks, with the same part of the bytes of the cache that it stands for.
type cache struct {
	policy   evict.Policy
	capacity int64 // bytes
	used     int64
	at       map[uint64]uint32 // chunk to slot
	slots    []slot
	free     []uint32
	isNew    []bool // for each chunk of the prompt that is played
}

// slot is a chunk in a sampled cache.
type slot struct {
	id     uint64
	bytes  int64
	prompt uint32 // number of the last prompt that had it
	tail   uint64 // the last sampled chunk of that prompt
}

func newCache(policy evict.Policy, capacity int64) *cache {
	return &cache{policy: policy, capacity: capacity, at: make(map[uint64]uint32)}
}

// play looks up the sampled chunks of a prompt and stores those that are missing. It returns how many of the chunks that count were there,
// in a row from the beginning. parent is the sampled chunk before them, 0 for none. The policy sees the same calls as in a store: chunks
// that are there are busy while the rest is stored; then all are added and used, the last one first.
func (c *cache) play(parent uint64, chunks []sampled, bytes int64, prompt uint32) (hits int) {
	c.isNew = append(c.isNew[:0], make([]bool, len(chunks))...)
	run, found := true, 0
	for _, s := range chunks {
		at, ok := c.at[s.id]
		if ok {
			c.slots[at].prompt = prompt
		}
		if run = run && ok; !run {
			continue
		}
		if found++; s.counts {
			hits++
		}
	}
	c.share(chunks[:found])
	for i, s := range chunks {
		if _, ok := c.at[s.id]; ok {
			continue
		}
		if !c.makeRoom(bytes, prompt) {
			break // there is no room for the prompt's tail
		}
		c.at[s.id] = c.take(slot{id: s.id, bytes: bytes, prompt: prompt})
		c.isNew[i] = true
		c.used += bytes
	}
	for i := len(chunks) - 1; i >= 0; i-- {
		at, ok := c.at[chunks[i].id]
		switch {
		case c.isNew[i]:
			before := parent
			if i > 0 {
				before = chunks[i-1].id
			}
			c.policy.Add(at, chunks[i].id, before, bytes)
		case ok:
			c.policy.Use(at)
		}
		if ok {
			c.slots[at].tail = chunks[len(chunks)-1].id
		}
	}
	return hits
}

// share tells the policy which chunks a prompt has in common with an earlier one. The prompts part at the last of them, unless the earlier
// prompt ended there.
func (c *cache) share(chunks []sampled) {
	s, ok := c.policy.(*evict.Shadow)
	if !ok || len(chunks) == 0 {
		return
	}
	deepest := chunks[len(chunks)-1].id
	parts := c.slots[c.at[deepest]].tail != deepest
	for _, chunk := range chunks {
		s.Share(c.at[chunk.id], parts)
	}
}

// take returns a free slot with that content.
func (c *cache) take(content slot) (at uint32) {
	if last := len(c.free) - 1; last >= 0 {
		at, c.free = c.free[last], c.free[:last]
		c.slots[at] = content
		return at
	}
	c.slots = append(c.slots, content)
	return uint32(len(c.slots) - 1)
}

// thin removes the chunks whose names have a bit of mask, and halves the capacity.
func (c *cache) thin(mask uint64) {
	c.capacity = max(c.capacity/2, 1)
	for at := range c.slots {
		if s := &c.slots[at]; s.bytes > 0 && s.id&mask != 0 {
			c.drop(uint32(at))
		}
	}
}

// drop frees a slot.
func (c *cache) drop(at uint32) {
	c.policy.Remove(at)
	delete(c.at, c.slots[at].id)
	c.used -= c.slots[at].bytes
	c.slots[at] = slot{}
	c.free = append(c.free, at)
}

// makeRoom evicts until `bytes` bytes fit. It reports false if all that is left is part of the prompt.
func (c *cache) makeRoom(bytes int64, prompt uint32) bool {
	if bytes > c.capacity {
		return false // chunks of another model: nothing gives way to them
	}
	for c.used+bytes > c.capacity {
		at, ok, more := c.policy.Victim(func(s uint32) bool { return c.slots[s].prompt == prompt })
		if !ok {
			if more {
				continue
			}
			return false
		}
		c.drop(at)
	}
	return true
}

// mark gives a chunk the class of a prompt that has it.
func (c *cache) mark(id uint64, end evict.PromptEnd) {
	at, ok := c.at[id]
	if !ok {
		return
	}
	if s, ok := c.policy.(*evict.Shadow); ok {
		s.Mark(at, end)
	}
}
