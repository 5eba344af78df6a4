// SPDX-License-Identifier: Apache-2.0

// Package lookup has the end of a lookup as one value. The server passes it to all that
// read it: figures by model, explanations, counters and the log.
package lookup

import "github.com/kvasir-kv/kvasir/store"

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
