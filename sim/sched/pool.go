// SPDX-License-Identifier: Apache-2.0

package sched

// BlockID is a block's number. Block 0 is a placeholder: it holds nothing and is never given
// out.
type BlockID = int32

// Hash names the content of a full block: its tokens, all tokens before it, and what else
// decides its KV (salt, adapter).
type Hash [16]byte

// block is one block of the pool. Blocks without a user are in the free queue.
type block struct {
	users      int32
	hashed     bool
	hash       Hash
	prev, next BlockID // free queue; 0 is its end
	twin       BlockID // the next block of the same hash, in order of registration; 0 is none
}

// pool is the paged KV cache: users of each block, the free queue in order of eviction, and
// what each hash is found at.
type pool struct {
	blocks  []block // blocks[0] is the end of the free queue on both sides
	free    int
	byHash  map[Hash]BlockID // the block that was registered first
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

// insert puts b into the free queue behind another block; 0 is the front.
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

// take gives out n blocks from the front of the free queue, which has them. What they
// held is forgotten.
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

// release ends one use of each block of list. Of those without a user then, the ones that
// cannot be found go to the front of the free queue and the others to its back, each in the
// order of list.
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

// register makes b findable.
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

// forget makes b unfindable.
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

// find returns the block that holds what h names.
func (p *pool) find(h Hash) (BlockID, bool) {
	b, ok := p.byHash[h]
	return b, ok
}

// clear forgets everything; the free queue keeps its order.
func (p *pool) clear() {
	clear(p.byHash)
	for i := range p.blocks {
		p.blocks[i].hashed, p.blocks[i].twin = false, 0
	}
}

// queue lists the free blocks in order of eviction.
func (p *pool) queue() (list []BlockID) {
	for b := p.blocks[0].next; b != 0; b = p.blocks[b].next {
		list = append(list, b)
	}
	return list
}
