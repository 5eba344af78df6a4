// SPDX-License-Identifier: Apache-2.0

package evict

// S3FIFO has three first-in-first-out queues. A new slot enters the small queue, which has a tenth of the bytes. If it was used at least
// twice it moves from there to the main queue, otherwise it is evicted. A third queue remembers the ids of such evicted slots; content that
// comes back while its id is remembered enters the main queue. So a scan through many prompts that are never seen again does not evict what
// is used often. After J. Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1; sizes here are in bytes.
//
// Victim takes busy slots out of their queue until their next Use, which puts them back at their former place. So it looks at each only
// once. An operation takes constant time.
type S3FIFO struct {
	capacity int64 // bytes of the pool
	pages    []*entryPage
	queues   [3]queue // by queueOf
	clock    uint64   // counts entries into a queue
	hint     uint32   // 1 + the slot that was put back last
	ghosts   ghostQueue
}

// queueOf is the queue of a slot. A slot keeps it while it is set aside because it was busy.
type queueOf uint8

const (
	nowhere queueOf = iota
	small
	main
)

// The paper's constants.
const (
	maxFreq   = 3 // uses are counted up to this
	promoteAt = 2 // uses in the small queue that lead to the main queue
	smallPart = 10
)

// maxWalk is how many slots putBack looks at for the place of a slot. If the place is farther away, the slot gets the one where the search
// ended.
const maxWalk = 32

// entry is the state of a slot.
type entry struct {
	older, newer uint32 // 1 + slot in the queue; 0 for its ends
	of           queueOf
	aside        bool  // out of its queue, because Victim found it busy
	freq         uint8 // uses, maxFreq at most, less those for which Victim spared it
	weight       int64
	id           uint64
	came         uint64 // the clock when it entered the queue
}

// entryPage is a run of entries: the table grows without being copied.
type entryPage [4096]entry

// queue is a list of slots in the order in which they entered.
type queue struct {
	oldest, newest uint32 // 1 + slot; 0 while it is empty
	weight         int64  // of all slots that belong to it, aside or not
	len            int
}

// NewS3FIFO returns an empty S3FIFO for a pool of poolBytes bytes.
func NewS3FIFO(poolBytes int64) *S3FIFO {
	return &S3FIFO{capacity: poolBytes, ghosts: ghostQueue{limit: poolBytes - poolBytes/smallPart}}
}

func (p *S3FIFO) entry(slot uint32) *entry {
	page := int(slot) / len(entryPage{})
	if page >= len(p.pages) {
		return nil
	}
	return &p.pages[page][int(slot)%len(entryPage{})]
}

// Add implements Policy.
func (p *S3FIFO) Add(slot uint32, id, _ uint64, weight int64) {
	for p.entry(slot) == nil {
		p.pages = append(p.pages, new(entryPage))
	}
	e := p.entry(slot)
	*e = entry{weight: weight, id: id}
	if p.ghosts.take(id) {
		p.enter(slot, e, main)
	} else {
		p.enter(slot, e, small)
	}
}

// Use implements Policy.
func (p *S3FIFO) Use(slot uint32) {
	e := p.entry(slot)
	if e == nil || e.of == nowhere {
		return
	}
	e.freq = min(e.freq+1, maxFreq)
	if e.aside {
		e.aside = false
		p.putBack(slot, e)
	}
}

// Remove implements Policy. It remembers the id of a slot that was new and hardly used.
func (p *S3FIFO) Remove(slot uint32) {
	e := p.entry(slot)
	if e == nil || e.of == nowhere {
		return
	}
	if e.of == small && e.freq < promoteAt {
		p.ghosts.add(e.id, e.weight)
	}
	p.leave(slot, e)
	*e = entry{}
}

// Victim implements Policy.
func (p *S3FIFO) Victim(busy func(slot uint32) bool) (slot uint32, ok, more bool) {
	for range maxLooks {
		of := main
		if p.queues[small].weight >= p.capacity/smallPart && p.queues[small].len > 0 || p.queues[main].len == 0 {
			of = small
		}
		if p.queues[of].len == 0 {
			return 0, false, false
		}
		slot = p.queues[of].oldest - 1
		e := p.entry(slot)
		switch {
		case busy(slot):
			p.unlink(slot, e)
			e.aside = true
		case of == small && e.freq >= promoteAt:
			p.leave(slot, e)
			e.freq = 0
			p.enter(slot, e, main)
		case of == main && e.freq > 0:
			p.leave(slot, e)
			e.freq--
			p.enter(slot, e, main)
		default:
			return slot, true, false
		}
	}
	return 0, false, true
}

// Ascend implements Policy: the small queue first.
func (p *S3FIFO) Ascend(f func(slot uint32) bool) {
	for _, of := range []queueOf{small, main} {
		for i := p.queues[of].oldest; i != 0; i = p.entry(i - 1).newer {
			if !f(i - 1) {
				return
			}
		}
	}
}

// enter puts a slot at the newest end of the queue `of`.
func (p *S3FIFO) enter(slot uint32, e *entry, of queueOf) {
	p.clock++
	e.of, e.came = of, p.clock
	q := &p.queues[of]
	q.weight += e.weight
	p.insert(slot, e, q.newest)
}

// leave removes a slot from its queue.
func (p *S3FIFO) leave(slot uint32, e *entry) {
	p.queues[e.of].weight -= e.weight
	if !e.aside {
		p.unlink(slot, e)
	}
	e.of, e.aside = nowhere, false
}

// insert links a slot after the slot older-1 of its queue, or with 0 at the oldest end.
func (p *S3FIFO) insert(slot uint32, e *entry, older uint32) {
	q := &p.queues[e.of]
	e.older, e.newer = older, q.oldest
	if older != 0 {
		o := p.entry(older - 1)
		e.newer, o.newer = o.newer, slot+1
	} else {
		q.oldest = slot + 1
	}
	if e.newer != 0 {
		p.entry(e.newer - 1).older = slot + 1
	} else {
		q.newest = slot + 1
	}
	q.len++
}

func (p *S3FIFO) unlink(slot uint32, e *entry) {
	q := &p.queues[e.of]
	if e.older != 0 {
		p.entry(e.older - 1).newer = e.newer
	} else {
		q.oldest = e.newer
	}
	if e.newer != 0 {
		p.entry(e.newer - 1).older = e.older
	} else {
		q.newest = e.older
	}
	e.older, e.newer = 0, 0
	q.len--
}

// putBack puts a slot that was aside back to its former place in its queue. Only slots that were put back before can be older. As they
// mostly come back in order, the search begins at the last of them; it ends after maxWalk slots.
func (p *S3FIFO) putBack(slot uint32, e *entry) {
	older := uint32(0)
	if p.hint != 0 {
		if h := p.entry(p.hint - 1); h.of == e.of && !h.aside && h.came < e.came {
			older = p.hint
		}
	}
	for range maxWalk {
		next := p.queues[e.of].oldest
		if older != 0 {
			next = p.entry(older - 1).newer
		}
		if next == 0 || p.entry(next-1).came > e.came {
			break
		}
		older = next
	}
	p.insert(slot, e, older)
	p.hint = slot + 1
}

// maxGhosts bounds the ids that a ghostQueue remembers: 40 MB. Beyond it the oldest is forgotten.
const maxGhosts = 1 << 20

// ghostQueue remembers the ids of content that was evicted, the latest of them that together weigh at most `limit` bytes.
type ghostQueue struct {
	limit  int64
	weight int64
	at     map[uint64]uint64 // id to its place; places are counted up
	pages  []*ghostPage      // by place modulo maxGhosts
	first  uint64            // the oldest place
	next   uint64
}

type ghost struct {
	id     uint64
	weight int64
}

// ghostPage is a run of ghosts: the queue grows without being copied.
type ghostPage [4096]ghost

func (g *ghostQueue) place(at uint64) *ghost {
	at %= maxGhosts
	return &g.pages[at/uint64(len(ghostPage{}))][at%uint64(len(ghostPage{}))]
}

func (g *ghostQueue) add(id uint64, weight int64) {
	if g.at == nil {
		g.at = make(map[uint64]uint64)
	}
	g.take(id) // once only
	for g.next > g.first && (g.next-g.first >= maxGhosts || g.weight+weight > g.limit) {
		g.forgetOldest()
	}
	if g.next%maxGhosts == uint64(len(g.pages)*len(ghostPage{})) {
		g.pages = append(g.pages, new(ghostPage))
	}
	*g.place(g.next) = ghost{id, weight}
	g.at[id] = g.next
	g.weight += weight
	g.next++
}

func (g *ghostQueue) forgetOldest() {
	o := g.place(g.first)
	g.weight -= o.weight
	if g.at[o.id] == g.first {
		delete(g.at, o.id)
	}
	g.first++
}

// take reports whether id is remembered, and forgets it.
func (g *ghostQueue) take(id uint64) bool {
	at, ok := g.at[id]
	if ok {
		delete(g.at, id)
		o := g.place(at)
		g.weight -= o.weight
		o.weight = 0
	}
	return ok
}
