// SPDX-License-Identifier: Apache-2.0

// Package lookup has the outcome of a lookup as one value. The server passes it to everything that records it: figures by model,
// explanations, counters and the log.
package lookup

import (
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/store"
)

// Outcome is how one lookup ended. Its slices belong to the request: a reader must copy what it keeps.
type Outcome struct {
	Request     []byte // the engine's request id
	Model, Salt []byte
	Registered  bool // the model has a registered worker
	ChunkTokens int

	// LookupResult is what the search found. For a lookup that ended without a search only Why is set: miss.Short, miss.Unregistered,
	// miss.SkipLoad or miss.Declined.
	store.LookupResult
	Searched     bool
	PromptTokens int    // tokens of the prompt, if there was no search
	Detail       string // the reason in words, if there was no search

	Text       Text      // text of the prompt; not known for a lookup that was pending
	HashesOnly bool      // the lookup had hashes but no tokens
	Repeated   *Repeated // result of a comparison of the prompt before the lookup ended; nil: none
}

// Text gives access to the prompt of a lookup while its request lasts. The zero Text has no prompt.
type Text struct {
	Memo *lmcache.Memo
	Key  *lmcache.KeyView
}

// ChunkTokens returns the tokens per chunk; 0: there is no prompt.
func (t Text) ChunkTokens() int {
	if t.Key == nil {
		return 0
	}
	return t.Memo.ChunkTokens()
}

// Tokens appends to b the tokens of whole chunks from number chunk on, `most` tokens at most.
func (t Text) Tokens(b []uint32, chunk, most int) []uint32 {
	return t.Memo.AppendTokens(b, t.Key, chunk, most)
}

// Hashes returns the hashes of at least the first n chunks, or of all chunks if the prompt has fewer.
func (t Text) Hashes(n int) []kv.Hash {
	t.Memo.Hash(t.Key, n)
	return t.Key.Hashes
}

// Repeated is text of a prompt that earlier prompts have after another beginning (package beginning). All fields are numbers of tokens.
type Repeated struct {
	From   int // tokens before the part that was compared
	At     int // tokens before the repeated text
	Tokens int // tokens of the repeated text; 0: there is none
}

// AskedTokens returns how many tokens the lookup asked for. With a search that is whole chunks, without those that the engine has itself.
func (o *Outcome) AskedTokens() int {
	if !o.Searched {
		return o.PromptTokens
	}
	return (o.Asked - o.From) * o.ChunkTokens
}

// HitTokens returns how many tokens the engine can load.
func (o *Outcome) HitTokens() int { return (o.Hit - o.From) * o.ChunkTokens }

// BelowTokens returns how many of HitTokens came from the tier below for this lookup.
func (o *Outcome) BelowTokens() int { return o.Below * o.ChunkTokens }
