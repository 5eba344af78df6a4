// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/event"
	"github.com/kvasir-kv/kvasir/lmcache/connector"
	"github.com/kvasir-kv/kvasir/sim/sched"
)

// maxEvents is the largest number of events of a worker that wait for a step. If there are more, the worker drops the oldest ones.
const maxEvents = 1 << 16

// publishes reports whether a client wants the KV events.
func (e *Engine) publishes() bool { return e.o.OnEvents != nil }

// maxEvents returns how many events each worker of a connector may keep for a step: none unless a client wants them.
func (e *Engine) maxEvents() int {
	if !e.publishes() {
		return 0
	}
	return maxEvents
}

// events publishes which blocks a step has stored, removed and cleared, and what connectors have stored.
func (e *Engine) events(scheduled []sched.Event) {
	if !e.publishes() {
		return
	}
	var list []event.Event
	for i := range scheduled {
		list = append(list, e.blockEvent(&scheduled[i]))
	}
	for _, c := range e.conns {
		if k, ok := c.(*lmcacheConn); ok {
			list = k.events(list)
		}
	}
	if len(list) > 0 {
		e.o.OnEvents(list)
	}
}

// blockEvent returns the event for blocks of the engine's own memory.
func (e *Engine) blockEvent(s *sched.Event) event.Event {
	out := event.Event{Kind: event.Cleared}
	if s.Kind == sched.Cleared {
		return out
	}
	out.Kind, out.Medium, out.Group = event.Removed, event.GPU, s.Group
	for _, h := range s.Hashes {
		out.Hashes = append(out.Hashes, h[:])
	}
	if s.Kind == sched.Removed {
		return out
	}
	q, block := of(s.Request), e.o.KV.BlockTokens
	out.Kind, out.BlockTokens = event.Stored, block
	for _, t := range q.tokens[s.Block*block : (s.Block+len(s.Hashes))*block] {
		out.Tokens = append(out.Tokens, int64(t))
	}
	if s.Block > 0 {
		parent := q.hash(s.Block - 1)
		out.Parent = parent[:]
	} else {
		out.Salt = q.r.Salt
	}
	return out
}

// chunkEvents holds the chunks of a cache server that were announced by events.
type chunkEvents struct {
	stored map[kv.Hash]int // number of workers that have stored the chunk
	of     int             // number of workers that store
}

// maxChunks is the largest number of announced chunks; further ones are not announced.
const maxChunks = 1 << 20

// events appends the events of the workers. It announces a chunk when every worker that stores has stored it. When a worker registers
// again, the server may be another one, so events withdraws all announced chunks.
func (k *lmcacheConn) events(list []event.Event) []event.Event {
	for _, w := range k.workers {
		reported, _ := w.Events()
		for i := range reported {
			list = k.chunks.add(list, &reported[i])
		}
	}
	return list
}

func (c *chunkEvents) add(list []event.Event, e *connector.Event) []event.Event {
	if e.Kind == connector.Cleared {
		gone := event.Event{Kind: event.Removed, Medium: e.Medium, Group: -1}
		for h, n := range c.stored {
			if n == c.of {
				gone.Hashes = append(gone.Hashes, h[:])
			}
		}
		clear(c.stored)
		if len(gone.Hashes) == 0 {
			return list
		}
		return append(list, gone)
	}
	n := c.stored[e.Hash]
	if n >= c.of || n == 0 && len(c.stored) >= maxChunks {
		return list // the chunk is announced already: it was evicted and stored again
	}
	if c.stored[e.Hash] = n + 1; n+1 < c.of {
		return list
	}
	out := event.Event{
		Kind: event.Stored, Medium: e.Medium, Group: -1, Hashes: [][]byte{e.Hash[:]}, BlockTokens: e.ChunkTokens,
	}
	if e.First {
		out.Salt = e.Salt
	} else {
		out.Parent = e.Parent[:]
	}
	for _, t := range e.Tokens {
		out.Tokens = append(out.Tokens, int64(t))
	}
	return append(list, out)
}
