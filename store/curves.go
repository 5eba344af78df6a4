// SPDX-License-Identifier: Apache-2.0

package store

import (
	"encoding/binary"
	"hash/maphash"
	"slices"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store/evict"
	"github.com/kvasir-kv/kvasir/store/hitcurve"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/miss"
)

// curves reports the lookups and stores of a Store to a hitcurve.Curves. The name of a chunk is that of its object of the first group and
// shard.
//
// At a lookup only the names of the chunks that it searched are known. The chunks after the first missing one get their names when the
// request stores them, so that a lookup hashes no more chunks than it needs.
type curves struct {
	*hitcurve.Curves
	seed  maphash.Seed
	began time.Time

	// While a goroutine has this mutex, it takes no other one than that of the hitcurve.Curves.
	mu struct {
		sync.Mutex
		prompts [maxNamedPrompts / promptsPerSet][promptsPerSet]namedPrompt // by request; the newest of each set first
		names   []uint64                                                    // the last result of namesLocked, whose memory the next call reuses
	}
}

// namedPrompt is a prompt that a request looked up.
type namedPrompt struct {
	request uint64 // hash of its id; 0: none
	asked   int    // chunks that its lookup asked for
	named   int    // leading chunks whose names were reported
}

// maxNamedPrompts bounds the prompts that are remembered from their lookup to their store. They are in sets, so that a lookup neither
// allocates nor changes a map. A full set forgets its oldest prompt.
const (
	maxNamedPrompts = 1 << 12
	promptsPerSet   = 8
)

// newCurves returns the curves for Options.Curves, or nil if that is nil.
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
	return &curves{Curves: hitcurve.New(o), seed: maphash.MakeSeed(), began: s.began}
}

// Curves returns what lookups of the last 15 minutes, hour and 24 hours found, and what they would have found with other amounts of memory.
// It returns nil without Options.Curves. Lookups by LookupEach are not counted.
func (s *Store) Curves() []hitcurve.Window {
	if s.curves == nil {
		return nil
	}
	return s.curves.Estimate(time.Since(s.began))
}

// namesLocked returns the names of chunks. They are valid until the next call.
func (c *curves) namesLocked(sh object.Shard, hashes []kv.Hash) []uint64 {
	var k kv.Key
	sh.Key(&k, 0, 0, kv.Hash{})
	base := miss.ID(&k)
	out := slices.Grow(c.mu.names[:0], len(hashes))[:len(hashes)]
	for i := range hashes {
		out[i] = base ^ binary.LittleEndian.Uint64(hashes[i][:])
	}
	if len(out) <= batch { // the memory of a longer list is freed
		c.mu.names = out
	}
	return out
}

// bytesOf returns the bytes of one chunk in all groups and shards.
func bytesOf(sh object.Shard) (n int64) {
	for g := range sh.Groups.Len() {
		n += sh.Groups.Bytes(g)
	}
	return n * int64(sh.World)
}

// lookup reports the end of a lookup. hashes are those of the leading chunks whose hashes are known.
func (c *curves) lookup(q *query, hashes []kv.Hash, out *LookupResult) {
	if c == nil || out.Asked <= out.From {
		return
	}
	hashes = hashes[:min(len(hashes), out.Asked)]
	request := c.id(q.session)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.noteLocked(namedPrompt{request, out.Asked, len(hashes)})
	c.Lookup(&hitcurve.Lookup{
		Asked: out.Asked - out.From, Pool: max(out.Hit-out.From-out.Below, 0), Below: out.Below,
		Chunks: c.namesLocked(q.shard, hashes), From: out.From, Bytes: bytesOf(q.shard), Tokens: out.Tokens,
	}, time.Since(c.began))
}

// stored reports that a request stores the chunks [name.From, name.To). taken are the objects of them that the pool lacked. Only the first
// shard's stores are reported.
func (c *curves) stored(name *hold.Transfer, request []byte, hashes []kv.Hash, taken []heldObject) {
	if c == nil || name.Shard.Index != 0 {
		return
	}
	id := c.id(request)
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.promptLocked(id)
	if p == nil {
		return
	}
	from := max(name.From, p.named)
	p.named = max(p.named, name.To)
	to := min(name.To, p.asked) // chunks beyond the prompt belong to the answer; they count only if one of them is new
	if len(taken) > 0 {
		to = name.To
	}
	if from < to {
		c.Stored(c.namesLocked(name.Shard, hashes[:to]), from, p.asked, bytesOf(name.Shard), time.Since(c.began))
	}
}

// id returns the value of namedPrompt.request for a request id.
func (c *curves) id(request []byte) uint64 { return maphash.Bytes(c.seed, request) | 1 }

// promptLocked returns the remembered prompt of a request, or nil.
func (c *curves) promptLocked(request uint64) *namedPrompt {
	set := &c.mu.prompts[request/2%uint64(len(c.mu.prompts))]
	for i := range set {
		if set[i].request == request {
			return &set[i]
		}
	}
	return nil
}

// noteLocked remembers the prompt of a request, in place of an older prompt if there is no room.
func (c *curves) noteLocked(p namedPrompt) {
	if known := c.promptLocked(p.request); known != nil {
		*known = p
		return
	}
	set := &c.mu.prompts[p.request/2%uint64(len(c.mu.prompts))]
	copy(set[1:], set[:])
	set[0] = p
}
