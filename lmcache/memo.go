// SPDX-License-Identifier: Apache-2.0

package lmcache

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"sync"
	"sync/atomic"

	"github.com/tinylib/msgp/msgp"
	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/kv"
)

// Memo remembers the hashes of chunks of encoded tokens. A client sends the whole prompt in every call, and a conversation comes back one
// turn longer under a new request id. So most bytes of a token list were seen before. Comparing them costs a fortieth of decoding and
// hashing them.
//
// An entry is one chunk: the hash of the chunk before it, its msgpack or packed bytes, and its own hash. A walk through a token list
// compares the bytes of one entry per chunk: of the entry that followed last time, else of the entry found by a hash. It ends at the first
// chunk without an entry. The clock algorithm replaces entries. A Memo is safe for concurrent use; its lock is a leaf.
type Memo struct {
	chunkTokens int
	head        []byte // the msgpack array header of a chunk's tokens
	stride      int    // bytes kept per entry: 5 per token, the widest uint32 form
	seed        uint64
	scratch     sync.Pool // *memoScratch

	mu      sync.RWMutex
	buckets []int32 // 1 + index of the first entry in the bucket, 0: empty; the length is a power of two
	blocks  []*memoBlock
	count   int // entries in use
	max     int // entries at most
	hand    int // index at which the clock algorithm continues
}

type memoEntry struct {
	prev, hash kv.Hash
	bucket     uint32
	next       int32 // 1 + index of the next entry in the bucket
	width      int32 // bytes of the encoded chunk
	packed     bool  // four bytes per token, else msgpack integers
	used       atomic.Bool
	follower   atomic.Int32 // 1 + index of the entry that last followed this one; a hint
}

type memoScratch struct {
	chain  *kv.Chain
	widths []int
}

// memoBlockEntries is how many entries share one allocation.
const memoBlockEntries = 64

type memoBlock struct {
	entries [memoBlockEntries]memoEntry
	raw     []byte // stride bytes per entry
}

// NewMemo returns a Memo for chunks of chunkTokens tokens that takes at most about maxBytes. If maxBytes is less than one allocation
// (memoBlockEntries entries), the Memo remembers nothing.
func NewMemo(chunkTokens int, maxBytes int64) *Memo {
	m := &Memo{chunkTokens: chunkTokens, head: msgp.AppendArrayHeader(nil, uint32(chunkTokens)), stride: 5 * chunkTokens, seed: rand.Uint64()}
	m.scratch.New = func() any { return &memoScratch{chain: kv.NewChain(chunkTokens)} }
	const entryBytes = 32 + 32 + 20 + 4
	blocks := maxBytes / (memoBlockEntries * int64(m.stride+entryBytes))
	m.max = int(min(blocks, 1<<20)) * memoBlockEntries
	size := 1
	for size < m.max {
		size *= 2
	}
	if m.max > 0 {
		m.buckets = make([]int32, size)
	}
	return m
}

// ChunkTokens is the number of tokens per chunk.
func (m *Memo) ChunkTokens() int { return m.chunkTokens }

func (m *Memo) bucketOf(prev kv.Hash, b []byte, packed bool) uint32 {
	h := xxh3.HashSeed(b[:m.least(packed)], m.seed^binary.LittleEndian.Uint64(prev[:]))
	return uint32(h) & uint32(len(m.buckets)-1)
}

// least returns the smallest number of bytes that the encoding of a chunk can have.
func (m *Memo) least(packed bool) int {
	if packed {
		return 4 * m.chunkTokens
	}
	return m.chunkTokens
}

// known appends the hashes of the leading chunks of b that are remembered to k.Hashes, `chunks` of them at most. It returns the bytes of b
// after these chunks.
func (m *Memo) known(b []byte, chunks int, k *KeyView) []byte {
	if m.max == 0 || chunks == 0 {
		return b
	}
	m.mu.RLock()
	defer m.mu.RUnlock()
	prev := kv.Seed
	var before *memoEntry
	end := 0
	for range chunks {
		e := m.afterLocked(before, prev, b, k.Packed)
		if e == nil {
			break
		}
		if !e.used.Load() { // a store costs more
			e.used.Store(true)
		}
		b = b[e.width:]
		prev, before = e.hash, e
		end += int(e.width)
		k.Hashes, k.ends = append(k.Hashes, prev), append(k.ends, end)
	}
	return b
}

// afterLocked returns the entry of the chunk that b begins with, as findLocked does. It first tries the entry that followed `before` last
// time: most chunks have one successor, and this one needs no hash.
func (m *Memo) afterLocked(before *memoEntry, prev kv.Hash, b []byte, packed bool) *memoEntry {
	if before != nil {
		if i := int(before.follower.Load()); i != 0 {
			if e, raw := m.entryLocked(i - 1); e.is(prev, packed) && bytes.HasPrefix(b, raw[:e.width]) {
				return e
			}
		}
	}
	i := m.findLocked(prev, b, packed)
	if i == 0 {
		return nil
	}
	if before != nil {
		before.follower.Store(int32(i))
	}
	e, _ := m.entryLocked(i - 1)
	return e
}

// findLocked returns 1 + the index of the entry of the chunk that b begins with,
// or 0.
func (m *Memo) findLocked(prev kv.Hash, b []byte, packed bool) int {
	if len(b) < m.least(packed) {
		return 0
	}
	for i := m.buckets[m.bucketOf(prev, b, packed)]; i != 0; {
		e, raw := m.entryLocked(int(i - 1))
		if e.is(prev, packed) && bytes.HasPrefix(b, raw[:e.width]) {
			return int(i)
		}
		i = e.next
	}
	return 0
}

// entryLocked returns entry i and the memory for the bytes of its chunk.
func (m *Memo) entryLocked(i int) (*memoEntry, []byte) {
	block := m.blocks[i/memoBlockEntries]
	i %= memoBlockEntries
	return &block.entries[i], block.raw[i*m.stride : (i+1)*m.stride]
}

// is reports whether the entry is a chunk after prev, and is packed exactly if `packed` is set.
func (e *memoEntry) is(prev kv.Hash, packed bool) bool { return e.prev == prev && e.packed == packed }

// learn adds the chunks that b begins with. Chunk i takes widths[i] bytes and has the hash k.Hashes[first+i].
func (m *Memo) learn(b []byte, widths []int, k *KeyView, first int) {
	if m.max == 0 {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	prev := kv.Seed
	if first > 0 {
		prev = k.Hashes[first-1]
	}
	for i, w := range widths {
		hash := k.Hashes[first+i]
		if w <= m.stride && m.findLocked(prev, b, k.Packed) == 0 {
			m.addLocked(prev, b[:w], hash, k.Packed)
		}
		prev = hash
		b = b[w:]
	}
}

func (m *Memo) addLocked(prev kv.Hash, b []byte, hash kv.Hash, packed bool) {
	i := m.slotLocked()
	e, raw := m.entryLocked(i)
	e.prev, e.hash, e.width, e.packed = prev, hash, int32(len(b)), packed
	copy(raw, b)
	e.bucket = m.bucketOf(prev, b, packed)
	e.next = m.buckets[e.bucket]
	m.buckets[e.bucket] = int32(i + 1) // last: a reader never finds an entry that is not whole
}

// slotLocked returns the index of a free entry: a new one while there are fewer than max, else the next one that was not used since the
// clock's hand last passed it.
func (m *Memo) slotLocked() int {
	if i := m.count; i < m.max {
		if i%memoBlockEntries == 0 {
			m.blocks = append(m.blocks, &memoBlock{raw: make([]byte, memoBlockEntries*m.stride)})
		}
		m.count++
		return i
	}
	for {
		i := m.hand
		m.hand = (m.hand + 1) % m.count
		e, _ := m.entryLocked(i)
		if e.used.Swap(false) {
			continue
		}
		m.unlinkLocked(e, int32(i+1))
		return i
	}
}

// unlinkLocked removes entry e from its bucket. id is 1 + the entry's index.
func (m *Memo) unlinkLocked(e *memoEntry, id int32) {
	p := &m.buckets[e.bucket]
	for *p != id {
		before, _ := m.entryLocked(int(*p - 1))
		p = &before.next
	}
	*p = e.next
}
