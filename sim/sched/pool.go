// SPDX-License-Identifier: Apache-2.0

package sched

// BlockID is the number of a block. Block 0 is a placeholder: it holds nothing and is never allocated.
type BlockID = int32

// Hash identifies the content of a full block: its tokens, all tokens before it, and what else determines its KV (salt, adapter).
type Hash [16]byte

// block is one block of the pool. Blocks without users are in the free queue.
type block struct {
	users      int32
	hashed     bool
	hash       Hash
	prev, next BlockID // in the free queue; 0 is its end
	twin       BlockID // the block that was registered next with the same hash; 0: none
}

// pool is the paged KV cache: how many users each block has, the free queue in the order of eviction, and at which block each hash is
// found.
type pool struct {
	blocks  []block // blocks[0] is both ends of the free queue
	free    int
	byHash  map[Hash]BlockID // of several blocks, the one registered first
	caching bool
	removed func(Hash)
}

func newPool(n int, caching bool, removed func(Hash)) *pool {
	p := &pool{blocks: make([]block, n), byHash: make(map[Hash]BlockID), caching: caching, removed: removed}
	for i := 1; i < n; i++ {
		p.insert(BlockID(i), p.blocks[0].prev)
	}
	return p
}

// insert puts b into the free queue after the block `behind`; 0 means the front.
func (p *pool) insert(b, behind BlockID) {
	next := p.blocks[behind].next
	p.blocks[b].prev, p.blocks[b].next = behind, next
	p.blocks[behind].next, p.blocks[next].prev = b, b
	p.free++
}

func (p *pool) unlink(b BlockID) {
	x := &p.blocks[b]
	p.blocks[x.prev].next, p.blocks[x.next].prev = x.next, x.prev
	p.free--
}

// take appends n blocks from the front of the free queue, which must have them, to table. Their old content is forgotten.
func (p *pool) take(n int, table []BlockID) []BlockID {
	for range n {
		b := p.blocks[0].next
		if b == 0 {
			panic("BUG: sched: no free block")
		}
		p.unlink(b)
		p.forget(b)
		p.blocks[b].users = 1
		table = append(table, b)
	}
	return table
}

// use adds a user to b.
func (p *pool) use(b BlockID) {
	if p.blocks[b].users == 0 {
		p.unlink(b)
	}
	p.blocks[b].users++
}

// release ends one use of each block of list. Of the blocks that then have no user, those that cannot be found in the cache go to the
// front of the free queue and the others to its back, both in the order of list.
func (p *pool) release(list []BlockID) {
	front := BlockID(0)
	for _, b := range list {
		if b == 0 {
			continue
		}
		x := &p.blocks[b]
		if x.users--; x.users > 0 {
			continue
		}
		if x.users < 0 {
			panic("BUG: sched: a block is freed twice")
		}
		if x.hashed && p.caching {
			p.insert(b, p.blocks[0].prev)
			continue
		}
		p.insert(b, front)
		front = b
	}
}

// register makes b findable under h.
func (p *pool) register(b BlockID, h Hash) {
	x := &p.blocks[b]
	x.hashed, x.hash, x.twin = true, h, 0
	first, ok := p.byHash[h]
	if !ok {
		p.byHash[h] = b
		return
	}
	for p.blocks[first].twin != 0 {
		first = p.blocks[first].twin
	}
	p.blocks[first].twin = b
}

// forget makes b no longer findable.
func (p *pool) forget(b BlockID) {
	x := &p.blocks[b]
	if !x.hashed {
		return
	}
	switch at := p.byHash[x.hash]; {
	case at != b:
		for p.blocks[at].twin != b {
			at = p.blocks[at].twin
		}
		p.blocks[at].twin = x.twin
	case x.twin != 0:
		p.byHash[x.hash] = x.twin
	default:
		delete(p.byHash, x.hash)
	}
	x.hashed, x.twin = false, 0
	p.removed(x.hash)
}

// find returns the block with the content that h identifies.
func (p *pool) find(h Hash) (BlockID, bool) {
	b, ok := p.byHash[h]
	return b, ok
}

// clear makes all blocks unfindable. The free queue keeps its order.
func (p *pool) clear() {
	clear(p.byHash)
	for i := range p.blocks {
		p.blocks[i].hashed, p.blocks[i].twin = false, 0
	}
}

// queue returns the free blocks in the order of eviction.
func (p *pool) queue() (list []BlockID) {
	for b := p.blocks[0].next; b != 0; b = p.blocks[b].next {
		list = append(list, b)
	}
	return list
}
