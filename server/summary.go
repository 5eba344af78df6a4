// SPDX-License-Identifier: Apache-2.0

package server

import (
	"math"
	"sync"
	"time"
)

// summary has the counters at the time of a summary line.
type summary struct{ lookups, asked, hit, stored, loaded, evicted, evictedBytes uint64 }

func (s *Server) count() summary {
	st := s.store.Stats()
	lookups, asked, hit := s.LookedUp()
	return summary{
		lookups: lookups, asked: asked, hit: hit,
		stored: st.StoredBytes, loaded: st.LoadedBytes, evicted: st.EvictedChunks, evictedBytes: st.EvictedBytes,
	}
}

// summarize logs one line about the time since the summary `last`, if anything happened, and returns the present counters.
func (s *Server) summarize(last summary) summary {
	now := s.count()
	s.recent.add(time.Now(), now)
	if now == last {
		return now
	}
	st := s.store.Stats()
	asked := now.asked - last.asked
	hit := min(now.hit-last.hit, asked) // a lookup may have counted between the two
	s.log.Info("last 10 s", "lookups", now.lookups-last.lookups, "asked_tokens", asked, "hit_tokens", hit, "hit_percent", percent(hit, asked),
		"stored_bytes", now.stored-last.stored, "retrieved_bytes", now.loaded-last.loaded, "evicted_chunks", now.evicted-last.evicted,
		"pool_percent", percent(uint64(st.Bytes-st.FreeBytes), uint64(st.Bytes)))
	return now
}

// recently has the counters of the last five minutes.
type recently struct {
	mu   sync.Mutex
	ring []sample // the oldest first
}

type sample struct {
	at time.Time
	n  summary
}

// maxSamples is how many summary lines are remembered. A new one then takes the place of the oldest.
const maxSamples = 30

func (r *recently) add(now time.Time, n summary) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ring = append(r.ring[max(0, len(r.ring)+1-maxSamples):], sample{now, n})
}

// since returns the oldest sample. While the server is younger than five minutes, that is the start with zero counters.
func (r *recently) since(start time.Time) sample {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.ring) < maxSamples {
		return sample{at: start}
	}
	return r.ring[0]
}

// percent returns part as a percentage of `whole`, with one digit after the point; 0 if `whole` is 0.
func percent(part, whole uint64) float64 {
	return math.Round(1000*float64(part)/float64(max(whole, 1))) / 10
}
