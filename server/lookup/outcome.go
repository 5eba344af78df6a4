// SPDX-License-Identifier: Apache-2.0

// Package lookup has the end of a lookup as one value. The server passes it to all that
// read it: figures by model, explanations, counters and the log.
package lookup

import (
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/store"
)

// Outcome is how one lookup ended. Its slices belong to the request: a reader copies what it
// keeps.
type Outcome struct {
	Request     []byte // the engine's request id
	Model, Salt []byte
	Registered  bool // there is a worker of the model
	ChunkTokens int

	// LookupResult is what the search found. Of a lookup that ended without a search it has Why
	// only: miss.Short, miss.Unregistered, miss.SkipLoad or miss.Declined.
	store.LookupResult
	Searched     bool
	PromptTokens int    // where it was not searched for
	Detail       string // the reason in words, where it was not searched for

	Text       Text      // of the prompt; of a lookup that was pending it is not known any more
	HashesOnly bool      // the lookup brought hashes and no tokens
	Repeated   *Repeated // what was compared of the prompt before the lookup ended; nil: nothing
}

// Text is the prompt of a lookup, as long as its request lasts. The zero Text is not known.
type Text struct {
	Memo *lmcache.Memo
	Key  *lmcache.KeyView
}

// ChunkTokens returns the tokens of a chunk; 0: nothing is known.
func (t Text) ChunkTokens() int {
	if t.Key == nil {
		return 0
	}
	return t.Memo.ChunkTokens()
}

// Tokens appends to b the tokens of whole chunks from a chunk on, at most most.
func (t Text) Tokens(b []uint32, chunk, most int) []uint32 {
	return t.Memo.AppendTokens(b, t.Key, chunk, most)
}

// Hashes returns the hashes of at least the first n chunks, of as many as the prompt has.
func (t Text) Hashes(n int) []kv.Hash {
	t.Memo.Hash(t.Key, n)
	return t.Key.Hashes
}

// Repeated is text of a prompt that earlier prompts have behind another beginning (package beginning). All are tokens.
type Repeated struct {
	From   int // before what was compared
	At     int // before that text
	Tokens int // of it; 0: there is none
}

// AskedTokens returns how many tokens were asked for: whole chunks where there was a search, without those that the engine
// has itself.
func (o *Outcome) AskedTokens() int {
	if !o.Searched {
		return o.PromptTokens
	}
	return (o.Asked - o.From) * o.ChunkTokens
}

// HitTokens returns how many tokens can be loaded.
func (o *Outcome) HitTokens() int { return (o.Hit - o.From) * o.ChunkTokens }

// BelowTokens returns how many of HitTokens came from the tier below for this lookup.
func (o *Outcome) BelowTokens() int { return o.Below * o.ChunkTokens }
