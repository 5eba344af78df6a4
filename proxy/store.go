// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"encoding/json"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/proxy/blocks"
	"github.com/kvasir-kv/kvasir/proxy/prefix"
)

// store is what the proxy knows about the cache server that engines share (kvasir server). In the index of prefixes, the server has ids
// as an engine has. The id changes when the server restarts or is cleared: marks under an id that is no longer valid do not count.
//
// An id is used for new marks until the server has evicted half as many chunks as it holds, and stays valid for the same number of
// evictions after that: the chunks of a prompt are not expected to stay longer after their last use.
type store struct {
	instanceIDs *atomic.Uint32 // source of ids
	well        atomic.Bool
	below       atomic.Bool // the server has a tier below its memory

	events *blocks.Follower // follower of the server's KV events; nil: they are not followed
	known  *blocks.Prompts  // the server's chunks at the marks of prompts

	mu struct {
		sync.Mutex
		now, before uint32 // the current id and the one before it; 0: none
		instance    instance
		evicted     uint64 // chunks that the server had evicted when now began
	}
}

// instance identifies the life of a server between two starts or clears.
type instance struct {
	started string
	pid     int
	clears  uint64
}

// storeStatus is the part of the server's GET /status that the proxy reads.
type storeStatus struct {
	Healthy bool   `json:"healthy"`
	PID     int    `json:"pid"`
	Started string `json:"started"`
	Clears  uint64 `json:"clears"`
	Pool    struct {
		Resident int    `json:"resident_chunks"`
		Evicted  uint64 `json:"evicted_chunks"`
	} `json:"l1"`
	Below struct {
		Tiers []struct{} `json:"tiers"`
	} `json:"l2"`
}

// begin makes an id for a server whose status the proxy does not ask (Options.SharedStore without Store).
func (s *store) begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.now = s.instanceIDs.Add(1)
	s.well.Store(true)
}

// ids returns the valid ids, the current one first; 0 stands for none.
func (s *store) ids() (ids [2]uint32) {
	if !s.well.Load() {
		return ids
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return [2]uint32{s.mu.now, s.mu.before}
}

// update takes over the server's status; nil: the server did not answer.
func (s *store) update(st *storeStatus) {
	if st == nil || !st.Healthy {
		s.well.Store(false)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	is := instance{st.Started, st.PID, st.Clears}
	s.below.Store(len(st.Below.Tiers) > 0)
	resident := uint64(max(st.Pool.Resident, 1))
	switch gone := st.Pool.Evicted - s.mu.evicted; {
	case is != s.mu.instance:
		s.mu.now, s.mu.before = s.instanceIDs.Add(1), 0
	case len(st.Below.Tiers) > 0 || 2*gone <= resident:
		s.well.Store(true)
		return // evicted chunks are in the tier below, or there are few of them
	case gone <= resident:
		s.mu.now, s.mu.before = s.instanceIDs.Add(1), s.mu.now
	default:
		s.mu.now, s.mu.before = s.instanceIDs.Add(1), 0
	}
	s.mu.instance, s.mu.evicted = is, st.Pool.Evicted
	s.well.Store(true)
}

// follow begins to follow the server's KV events if Options.StoreEvents is set.
func (s *store) follow(o *Options) (err error) {
	if o.StoreEvents == "" {
		return nil
	}
	s.events, err = blocks.Follow(blocks.Options{Endpoint: o.StoreEvents, Replay: o.StoreReplay, Topic: "kv@", Cache: true, MaxBlocks: o.IndexEntries, Log: o.Log})
	return err
}

// chunkTokens returns how many tokens a chunk of the server has; 0: no event has reported it yet.
func (s *store) chunkTokens() (tokens int) {
	if s.events != nil {
		_, tokens, _ = s.events.Blocks()
	}
	return tokens
}

// stored is what the server's KV events say about one prompt.
type stored struct {
	bytes int  // leading bytes that the server has
	reach int  // leading bytes whose chunks are known; about the bytes after them, events say nothing
	all   bool // up to reach the server has no more than bytes
}

// correct returns how many leading bytes of a prompt the cache server has. guess is that number by the index of prefixes; if the events
// prove it wrong, correct returns t.bytes instead.
func (t stored) correct(guess int) int {
	if t.reach > 0 && (t.bytes > guess || t.all && guess <= t.reach) {
		return t.bytes
	}
	return guess
}

// has returns what the server's events say about the prompt with these marks; the zero value: nothing.
func (s *store) has(marks []prefix.Mark) (t stored) {
	if s.events == nil || len(marks) == 0 || !s.well.Load() {
		return t
	}
	known := s.known.Find(make([]blocks.Known, 0, len(marks)), marks)
	t.bytes, t.reach, t.all = s.events.Longest(marks, known)
	t.all = t.all && !s.below.Load() // evicted chunks may be in a tier below
	return t
}

// watchStore asks the cache server for its status again and again until ctx ends.
func (p *Proxy) watchStore(ctx context.Context) {
	for {
		look, cancel := context.WithTimeout(ctx, max(p.o.HealthInterval, 2*time.Second)+p.o.patience)
		text, status := p.read(look, p.o.Store+"/status", p.o.StoreToken)
		cancel()
		var st *storeStatus
		if status == http.StatusOK {
			if st = new(storeStatus); json.Unmarshal(text, st) != nil {
				st = nil
			}
		}
		was := p.fleet.store.well.Load()
		if p.fleet.store.update(st); was != p.fleet.store.well.Load() && ctx.Err() == nil {
			p.o.Log.Info("the cache server's health changed", "store", p.o.Store, "well", !was)
		}
		select {
		case <-time.After(p.o.HealthInterval):
		case <-ctx.Done():
			return
		}
	}
}

// noteStored records that the cache server has the prompt: the engine is answering, and engines store what they compute.
func (e *exchange) noteStored() {
	if id := e.p.fleet.store.ids()[0]; id != 0 && e.p.index != nil && len(e.want.marks) > 0 {
		e.p.index.Add(e.want.marks, id)
	}
}
