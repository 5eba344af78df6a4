// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"github.com/kvasir-kv/kvasir/kv"
)

// EventKind says what a KV event reports.
type EventKind uint8

// The kinds.
const (
	Stored  EventKind = iota // a chunk can be found in the cache
	Cleared                  // everything announced so far may be gone
)

// medium is the name LMCache gives to the cache server's memory.
const medium = "CPU"

// Event is a KV event as vLLM publishes it to routers. The event stream of LMCache's server does not announce the stores of engine-driven
// workers, so a worker reports its own.
type Event struct {
	Kind        EventKind
	Medium      string
	Model       string
	Salt        string
	Hash        kv.Hash  // Stored: the chunk's hash
	Parent      kv.Hash  // Stored: hash of the chunk before it, unless First
	First       bool     // Stored: the prompt's first chunk, without a parent
	Tokens      []uint32 // Stored: the chunk's tokens, in memory that the request shares; read only
	ChunkTokens int
}

// Events returns the events since the last call, in order. lost is how many older events were dropped because more than MaxEvents waited; a
// Cleared event then comes first.
func (a *Worker) Events() (events []Event, lost int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	events, lost = a.mu.events, a.mu.lost
	a.mu.events, a.mu.lost = nil, 0
	if lost > 0 {
		events = append([]Event{{Kind: Cleared, Medium: medium, Model: a.o.Model}}, events...)
	}
	return events, lost
}

func (a *Worker) emit(e Event) {
	if a.o.MaxEvents <= 0 {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.mu.events) >= a.o.MaxEvents {
		a.mu.events = append(a.mu.events[:0], a.mu.events[1:]...)
		a.mu.lost++
	}
	a.mu.events = append(a.mu.events, e)
}

// emitStored announces the chunks that a committed store wrote. The server had the other chunks already, or had no room for them.
func (a *Worker) emitStored(j *job, chunks []int) {
	if a.o.MaxEvents <= 0 {
		return
	}
	c := a.o.ChunkTokens
	hashes := kv.ChunkHashes(j.Tokens[:j.End], c)
	for _, i := range chunks {
		at := j.Start/c + i
		e := Event{
			Kind: Stored, Medium: medium, Model: a.o.Model, Salt: j.Salt, Hash: hashes[at], First: at == 0,
			Tokens: j.Tokens[at*c : (at+1)*c : (at+1)*c], ChunkTokens: c,
		}
		if at > 0 {
			e.Parent = hashes[at-1]
		}
		a.emit(e)
	}
}
