// SPDX-License-Identifier: Apache-2.0

// Package blocks learns from an engine's KV events which blocks of prompts the engine has, and where in a prompt's bytes these blocks
// end.
//
// The package names a block by a chain of hashes over the token ids that events carry. So it does not matter how an engine hashes, and
// blocks of several engines can be compared. A proxy has prompts as bytes: once an engine has tokenized a prompt, Prompts remembers,
// for each mark in it (package prefix), the block that ends near that mark.
package blocks

import (
	"encoding/binary"
	"sync"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/kv/event"
	"github.com/kvasir-kv/kvasir/proxy/prefix"
)

// Key names a block together with all blocks before it; 0 means none.
type Key uint64

// root returns the start of the chain of keys of a prompt.
func root(salt string, blockTokens int) Key {
	return Key(xxh3.HashStringSeed(salt, uint64(blockTokens)))
}

// next returns the key of the block after k, which has these tokens.
func (k Key) next(tokens []int64) Key {
	var b [8]byte
	h := uint64(k)
	for _, t := range tokens {
		binary.LittleEndian.PutUint64(b[:], uint64(t))
		h = xxh3.HashSeed(b[:], h)
	}
	return Key(max(h, 1))
}

// Chain returns the keys of the full blocks of a prompt.
func Chain(salt string, blockTokens int, tokens []int64) (keys []Key) {
	k := root(salt, blockTokens)
	for ; len(tokens) >= blockTokens; tokens = tokens[blockTokens:] {
		k = k.next(tokens[:blockTokens])
		keys = append(keys, k)
	}
	return keys
}

// Scope returns a salt that separates the blocks of one model and salt from all others, for a publisher that reports several models.
func Scope(model, salt string) string { return model + "\x00" + salt }

// Held holds the blocks that one publisher has. Its methods are safe for concurrent use.
type Held struct {
	max   int
	cache bool // the publisher is a cache server: blocks count in every medium, and several models occur

	mu struct {
		sync.Mutex
		by     map[uint64]heldBlock // by the engine's own hash of the block
		keys   map[Key]int          // number of entries of by with that key; no entry is 0
		tokens int                  // tokens in a block; 0: not known
		all    bool                 // the publisher has reported every block it has
		full   bool                 // max blocks were reached since the last reset
	}
}

type heldBlock struct {
	key Key
	n   int // how often it was stored minus how often it was removed
}

// NewHeld returns a Held of at most max blocks, about 100 bytes each. It ignores further blocks, and from then on does not claim to
// know all blocks of the publisher.
func NewHeld(max int) *Held {
	h := &Held{max: max}
	h.Reset(false)
	return h
}

// NewCacheHeld returns a Held for a cache server: blocks count in every medium, and Scope separates the blocks of different models.
func NewCacheHeld(max int) *Held {
	h := NewHeld(max)
	h.cache = true
	return h
}

// Reset forgets all blocks. all means that the publisher has no blocks now.
func (h *Held) Reset(all bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.resetLocked(all)
}

func (h *Held) resetLocked(all bool) {
	h.mu.by, h.mu.keys, h.mu.all, h.mu.full = make(map[uint64]heldBlock), make(map[Key]int), all, false
}

// hashOf returns the last 8 bytes of a block's hash as a number. Engines that send integers send that number.
func hashOf(b []byte) (h uint64) {
	for _, c := range b[max(0, len(b)-8):] {
		h = h<<8 | uint64(c)
	}
	return h
}

// Apply applies a batch of events. It counts only the first group of hybrid models, only an engine's blocks in GPU memory, and no
// blocks of LoRA adapters. model is the model that a cache server's message names.
func (h *Held) Apply(b *event.Batch, model string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	apart := uint64(0) // two models may have the same hash for the same tokens
	if h.cache {
		apart = xxh3.HashString(model)
	}
	for i := range b.Events {
		ev := &b.Events[i]
		switch {
		case ev.Kind == event.Cleared:
			h.resetLocked(true)
		case ev.Group > 0 || !h.cache && ev.Medium != "" && ev.Medium != event.GPU:
		case ev.Kind == event.Removed:
			for _, hash := range ev.Hashes {
				h.removeLocked(hashOf(hash) ^ apart)
			}
		case ev.LoRA == "":
			scope := ev.Salt
			if h.cache {
				scope = Scope(model, ev.Salt)
			}
			h.storeLocked(ev, scope, apart)
		}
	}
}

func (h *Held) storeLocked(ev *event.Event, scope string, apart uint64) {
	if ev.BlockTokens <= 0 || len(ev.Tokens) < len(ev.Hashes)*ev.BlockTokens {
		return
	}
	k := root(scope, ev.BlockTokens)
	if ev.Parent != nil {
		parent, ok := h.mu.by[hashOf(ev.Parent)^apart]
		if !ok { // the parent block was stored before the proxy followed the events
			return
		}
		k = parent.key
	}
	h.mu.tokens = ev.BlockTokens
	for i, hash := range ev.Hashes {
		k = k.next(ev.Tokens[i*ev.BlockTokens : (i+1)*ev.BlockTokens])
		id := hashOf(hash) ^ apart
		b, there := h.mu.by[id]
		if !there {
			if len(h.mu.by) >= h.max {
				h.mu.full = true
				return
			}
			b.key = k
			h.mu.keys[k]++
		}
		b.n++
		h.mu.by[id] = b
	}
}

func (h *Held) removeLocked(id uint64) {
	b, ok := h.mu.by[id]
	if !ok {
		return
	}
	if b.n--; b.n > 0 {
		h.mu.by[id] = b
		return
	}
	delete(h.mu.by, id)
	if h.mu.keys[b.key]--; h.mu.keys[b.key] == 0 {
		delete(h.mu.keys, b.key)
	}
}

// Blocks returns how many blocks are known, and how many tokens each has. all means that the publisher has no other blocks.
func (h *Held) Blocks() (n, tokens int, all bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.mu.by), h.mu.tokens, h.mu.all && !h.mu.full
}

// Longest returns how many leading bytes of a prompt the publisher has: up to the last mark before the first missing block, because an
// engine cannot use blocks after a gap. known is the result of Prompts.Find for the marks. reach is the end of the last mark whose
// block is known in this publisher's block size; Longest says nothing about bytes after reach. all means that the publisher has no
// other blocks than those of its events.
func (h *Held) Longest(marks []prefix.Mark, known []Known) (bytes, reach int, all bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	hole := false
	for i, k := range known {
		if k.Tokens == 0 || k.Tokens != h.mu.tokens {
			continue
		}
		reach = marks[i].End
		if k.Key == 0 {
			continue
		}
		if hole = hole || h.mu.keys[k.Key] == 0; !hole {
			bytes = reach
		}
	}
	return bytes, reach, h.mu.all && !h.mu.full
}

// Known is the last full block before a mark, for blocks of Tokens tokens. A zero Key with Tokens means that there is no full block
// before the mark. A zero Known means that nothing is known.
type Known struct {
	Key    Key
	Tokens int
}

// Prompts remembers the blocks at marks of prompts. It keeps two sets of at most max marks each; when the newer set is full, it drops
// the older one. Its methods are safe for concurrent use.
type Prompts struct {
	max int

	mu struct {
		sync.Mutex
		young, old map[uint64]Known
	}
}

// NewPrompts returns a Prompts of at most 2*max marks (two sets of max), about 60 bytes each.
func NewPrompts(max int) *Prompts {
	p := &Prompts{max: max}
	p.mu.young = make(map[uint64]Known)
	return p
}

// Learn records the blocks of a prompt with these marks and tokens. It estimates after how many tokens a mark lies from the mark's
// share of the bytes, and takes one block less, to be safe.
func (p *Prompts) Learn(marks []prefix.Mark, salt string, blockTokens int, tokens []int64) {
	if len(marks) == 0 || blockTokens <= 0 {
		return
	}
	keys := Chain(salt, blockTokens, tokens)
	all := marks[len(marks)-1].End
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, m := range marks {
		n := len(keys)
		if i < len(marks)-1 {
			n = min(n, int(int64(len(tokens))*int64(m.End)/int64(all))/blockTokens-1)
		}
		is := Known{Tokens: blockTokens}
		if n > 0 {
			is.Key = keys[n-1]
		}
		if len(p.mu.young) >= p.max {
			p.mu.young, p.mu.old = make(map[uint64]Known), p.mu.young
		}
		p.mu.young[m.Hash] = is
	}
}

// Find appends to dst, for each mark, what is known about it.
func (p *Prompts) Find(dst []Known, marks []prefix.Mark) []Known {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range marks {
		k, ok := p.mu.young[m.Hash]
		if !ok {
			if k, ok = p.mu.old[m.Hash]; ok && len(p.mu.young) < p.max {
				p.mu.young[m.Hash] = k
			}
		}
		dst = append(dst, k)
	}
	return dst
}
