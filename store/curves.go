// SPDX-License-Identifier: Apache-2.0

package store

import (
	"encoding/binary"
	"hash/maphash"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store/evict"
	"github.com/kvasir-kv/kvasir/store/hitcurve"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/miss"
)

// curves show the lookups of a store to a hitcurve.Curves. A chunk has the name of its object of the first group and shard.
//
// A lookup knows the names of the chunks that it searched. Those behind the first missing chunk get their names when the request
// stores them, so that a lookup hashes no more than it needs.
type curves struct {
	*hitcurve.Curves
	seed  maphash.Seed
	began time.Time

	mu struct {
		sync.Mutex
		of    map[uint64]*namedPrompt // by request
		order [maxNamedPrompts]uint64
		next  int
	}
}

// namedPrompt is a prompt that was looked up.
type namedPrompt struct {
	asked int // chunks
	named int // leading chunks whose names are noted
}

// maxNamedPrompts bounds the prompts that are remembered from their lookup to their store.
const maxNamedPrompts = 1 << 12

// newCurves returns what Options.Curves asks for.
func (s *Store) newCurves() *curves {
	if s.opts.Curves == nil {
		return nil
	}
	o := *s.opts.Curves
	o.Bytes = s.mu.pool.Bytes()
	if t, ok := s.opts.Policy.(evict.Teacher); ok {
		o.Teach = func(l *evict.Lessons, whole bool) {
			s.lock()
			defer s.unlock()
			t.Teach(l, whole)
		}
	}
	c := &curves{Curves: hitcurve.New(o), seed: maphash.MakeSeed(), began: s.began}
	c.mu.of = make(map[uint64]*namedPrompt)
	return c
}

// Curves returns what lookups of the last 15 minutes, hour and 24 hours found, and what they would have found with other amounts of
// memory; nil without Options.Curves. Lookups by LookupEach are not in it.
func (s *Store) Curves() []hitcurve.Window {
	if s.curves == nil {
		return nil
	}
	return s.curves.Estimate(time.Since(s.began))
}

// names returns the names of chunks.
func names(sh object.Shard, hashes []kv.Hash) []uint64 {
	var k kv.Key
	sh.Key(&k, 0, 0, kv.Hash{})
	base := miss.ID(&k)
	out := make([]uint64, len(hashes))
	for i := range hashes {
		out[i] = base ^ binary.LittleEndian.Uint64(hashes[i][:])
	}
	return out
}

// bytesOf returns the bytes of a chunk in all groups and shards.
func bytesOf(sh object.Shard) (n int64) {
	for g := range sh.Groups.Len() {
		n += sh.Groups.Bytes(g)
	}
	return n * int64(sh.World)
}

// lookup notes the end of a lookup. hashes are those of the leading chunks that are known.
func (c *curves) lookup(q *query, hashes []kv.Hash, out *LookupResult) {
	if c == nil || out.Asked <= out.From {
		return
	}
	hashes = hashes[:min(len(hashes), out.Asked)]
	c.note(q.session, namedPrompt{out.Asked, len(hashes)})
	c.Lookup(&hitcurve.Lookup{
		Asked: out.Asked - out.From, Pool: max(out.Hit-out.From-out.Below, 0), Below: out.Below,
		Chunks: names(q.shard, hashes), From: out.From, Bytes: bytesOf(q.shard),
	}, time.Since(c.began))
}

// stored notes that a request stores chunks[name.From:name.To], of which taken were missing. The first shard speaks for all.
func (c *curves) stored(name *hold.Transfer, request []byte, hashes []kv.Hash, taken []heldObject) {
	if c == nil || name.Shard.Index != 0 {
		return
	}
	from, asked, ok := c.extend(request, name)
	if !ok {
		return
	}
	to := min(name.To, asked) // what is not of the prompt is an answer, and counts where it is new
	if len(taken) > 0 {
		to = name.To
	}
	if from < to {
		c.Stored(names(name.Shard, hashes[:to]), from, asked, bytesOf(name.Shard), time.Since(c.began))
	}
}

// note remembers a prompt.
func (c *curves) note(request []byte, p namedPrompt) {
	id := maphash.Bytes(c.seed, request)
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.mu.of[id]; !ok {
		delete(c.mu.of, c.mu.order[c.mu.next])
		c.mu.order[c.mu.next] = id
		c.mu.next = (c.mu.next + 1) % maxNamedPrompts
	}
	c.mu.of[id] = &p
}

// extend notes that the chunks of a prompt before name.To get their names now. It returns the first of them and the chunks that were asked for;
// false where the request is not known.
func (c *curves) extend(request []byte, name *hold.Transfer) (from, asked int, ok bool) {
	id := maphash.Bytes(c.seed, request)
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.mu.of[id]
	if p == nil {
		return 0, 0, false
	}
	from = max(name.From, p.named)
	p.named = max(p.named, name.To)
	return from, p.asked, true
}
