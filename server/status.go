// SPDX-License-Identifier: Apache-2.0

package server

import (
	"cmp"
	"os"
	"slices"
	"time"

	"github.com/kvasir-kv/kvasir/server/beginning"
	"github.com/kvasir-kv/kvasir/server/explain"
	"github.com/kvasir-kv/kvasir/server/workers"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/hitcurve"
	"github.com/kvasir-kv/kvasir/store/miss"
)

// Status is a snapshot for people and tools: the answer to GET /status.
type Status struct {
	Healthy   bool     `json:"healthy"`
	Unhealthy []string `json:"unhealthy"` // why the server is not healthy
	Version   string   `json:"version"`
	PID       int      `json:"pid"`
	Started   string   `json:"started"` // RFC 3339
	Uptime    float64  `json:"uptime_s"`

	ChunkTokens   int    `json:"chunk_size"`
	HashAlgorithm string `json:"hash_algorithm"`
	Sessions      int    `json:"active_sessions"`
	Clears        uint64 `json:"clears"` // how often the cache was cleared

	Pool       PoolStatus        `json:"l1"`
	Below      BelowStatus       `json:"l2"`
	Lookup     LookupStatus      `json:"lookup"`
	Recent     RecentStatus      `json:"recent"`
	Workers    []WorkerStatus    `json:"workers"`                  // in the order of their ids
	VLLM       *VLLMStatus       `json:"vllm_tier,omitempty"`      // with --vllm-tier
	TurnedAway []RefusedStatus   `json:"refused_registrations"`    // of workers that are not in the list
	Declined   map[string]uint64 `json:"declined"`                 // requests by reason, those that occurred
	Malformed  string            `json:"last_malformed,omitempty"` // the last request that could not be read, and why
	Strangers  int               `json:"strangers,omitempty"`      // ids that send heartbeats and are not registered
	Stranger   int64             `json:"stranger,omitempty"`       // one of them
	HitCurves  []hitcurve.Window `json:"hit_curves,omitempty"`     // of 15 minutes, one hour and 24 hours: what other amounts of memory would have found
	Findings   []Finding         `json:"findings"`                 // why hits are missing, the most important first
}

// PoolStatus is the part of a Status about the pool.
type PoolStatus struct {
	Name             string  `json:"shm_name"` // under /dev/shm
	TotalBytes       int64   `json:"total_bytes"`
	FreeBytes        int64   `json:"free_bytes"`
	UsageRatio       float64 `json:"usage_ratio"`
	ResidentBytes    int64   `json:"resident_bytes"`
	StagedBytes      int64   `json:"staged_bytes"`
	QuarantinedBytes int64   `json:"quarantined_bytes"`
	PopulatedBytes   int64   `json:"populated_bytes"`
	UsableBytes      int64   `json:"usable_bytes"`
	ResidentChunks   int     `json:"resident_chunks"`
	EvictableChunks  int     `json:"evictable_chunks"`
	EvictedChunks    uint64  `json:"evicted_chunks"`
	Failures         uint64  `json:"allocation_failures"` // stores for which the pool had no room for all chunks
	Transfers        int     `json:"transfers"`
	Quarantined      int     `json:"transfers_in_quarantine"`
}

// LookupStatus has figures of the lookups since the start.
type LookupStatus struct {
	Lookups     uint64            `json:"lookups"`
	AskedTokens uint64            `json:"asked_tokens"`
	HitTokens   uint64            `json:"hit_tokens"`
	MissReasons map[string]uint64 `json:"miss_reasons"`  // lookups that were not whole hits, by reason; only reasons that occurred
	LostTokens  map[string]uint64 `json:"lost_tokens"`   // tokens of prompts that were not found, by the label of why the hit ended (as in /explain)
	Hits        uint64            `json:"hits"`          // lookups that found at least one chunk
	Short       uint64            `json:"short_prompts"` // lookups of less than a chunk; not among the lookups
	Salted      uint64            `json:"salted"`        // lookups with a cache salt
	Retrieves   uint64            `json:"retrieves"`     // loads of workers that succeeded
	Stores      uint64            `json:"stores"`        // stores of workers that succeeded

	Beginnings beginning.Found `json:"beginnings"` // prompts that repeat earlier text after a changed beginning
}

// RecentStatus has figures of the last Seconds: five minutes, or less if the server is younger.
type RecentStatus struct {
	Seconds        float64 `json:"seconds"`
	Lookups        uint64  `json:"lookups"`
	AskedTokens    uint64  `json:"asked_tokens"`
	HitTokens      uint64  `json:"hit_tokens"`
	StoredBytes    uint64  `json:"stored_bytes"`
	RetrievedBytes uint64  `json:"retrieved_bytes"`
	EvictedChunks  uint64  `json:"evicted_chunks"`
	EvictedBytes   uint64  `json:"evicted_bytes"`
}

// RefusedStatus is a reason for which registrations were refused.
type RefusedStatus = explain.Refused

// WorkerStatus is one registered worker.
type WorkerStatus struct {
	Instance     int64   `json:"instance_id"`
	Peer         string  `json:"peer"` // the user or address that may speak for it
	Model        string  `json:"model_name"`
	World        int     `json:"world_size"`
	Mode         string  `json:"mode,omitempty"`
	ObjectGroups int     `json:"object_groups,omitempty"`
	ChunkTokens  int     `json:"chunk_tokens"`
	ChunkShape   []int   `json:"chunk_shape,omitempty"`
	DType        string  `json:"dtype,omitempty"`
	ChunkBytes   int64   `json:"chunk_bytes"`
	SilentFor    float64 `json:"silent_s"`
	Asleep       bool    `json:"asleep,omitempty"`  // silent for too long: no lookup counts on it before its next request
	Refused      string  `json:"refused,omitempty"` // why it is refused
	CannotMapShm bool    `json:"cannot_map_shm,omitempty"`
	Client       string  `json:"client_generation"` // the first lmcache release of its generation; several if they send the same messages
}

// Status returns a snapshot.
func (s *Server) Status() Status {
	st := s.store.Stats()
	why := s.Unhealthy()
	asked, hit := s.askedAndHit()
	out := Status{
		Healthy: len(why) == 0, Unhealthy: why, Version: s.opts.Version, PID: os.Getpid(),
		Started: s.started.UTC().Format(time.RFC3339), Uptime: time.Since(s.started).Round(time.Millisecond).Seconds(),
		ChunkTokens: s.opts.ChunkTokens, HashAlgorithm: "blake3", Sessions: st.Sessions, Clears: s.clears.Load(),
		Pool: PoolStatus{
			Name: s.store.Files().Name(), TotalBytes: st.Bytes, FreeBytes: st.FreeBytes, UsageRatio: usedRatio(&st), ResidentBytes: st.ResidentBytes,
			StagedBytes: st.StagedBytes, QuarantinedBytes: st.CondemnedBytes, PopulatedBytes: s.store.Memory().Provided(), UsableBytes: s.store.Memory().Usable(),
			ResidentChunks: st.Resident, EvictableChunks: st.EvictableObjs, EvictedChunks: st.EvictedChunks, Failures: st.AllocationFailures,
			Transfers: st.Transfers, Quarantined: st.Quarantined,
		},
		Below: s.below(&st),
		Lookup: LookupStatus{
			Lookups: st.Lookups, AskedTokens: asked, HitTokens: hit, MissReasons: map[string]uint64{}, LostTokens: map[string]uint64{},
			Hits: s.n.hits.Load(), Short: s.ended.Count(miss.Short), Salted: s.n.salted.Load(), Retrieves: s.n.retrievesFinished.Sum(), Stores: s.n.storesFinished.Sum(),
			Beginnings: s.beginnings.Found(),
		},
		Recent: s.recentStatus(), Workers: s.workers(), VLLM: s.vllmStatus(), TurnedAway: s.turnedAway.List(), Declined: map[string]uint64{},
	}
	out.Strangers, out.Stranger = s.registry.Strangers(time.Now())
	out.HitCurves = s.store.Curves()
	if why := s.lastMalformed.Load(); why != nil {
		out.Malformed = *why
	}
	for r := miss.None + 1; int(r) < miss.NumReasons; r++ {
		if n := s.ended.LostTokens(r); n > 0 {
			out.Lookup.LostTokens[r.Label()] = n
		}
		if n := s.ended.Count(r); n > 0 && (!r.IsBelow() || len(s.opts.Tiers) == 0) {
			out.Lookup.MissReasons[r.String()] = n
		}
	}
	for _, name := range s.TierNames() {
		for why, n := range s.n.tierMisses.Counts(name, miss.Reason.String) {
			if n > 0 {
				out.Lookup.MissReasons["tier "+name+": "+why] = n
			}
		}
	}
	for label, count := range s.n.refusals {
		if n := count.Load(); n > 0 {
			out.Declined[label] = n
		}
	}
	out.Findings = out.findings()
	return out
}

func (s *Server) recentStatus() RecentStatus {
	from, now := s.recent.since(s.started), s.count()
	return RecentStatus{
		Seconds: time.Since(from.at).Round(time.Millisecond).Seconds(),
		Lookups: now.lookups - from.n.lookups, AskedTokens: now.asked - from.n.asked, HitTokens: min(now.hit-from.n.hit, now.asked-from.n.asked),
		StoredBytes: now.stored - from.n.stored, RetrievedBytes: now.loaded - from.n.loaded,
		EvictedChunks: now.evicted - from.n.evicted, EvictedBytes: now.evictedBytes - from.n.evictedBytes,
	}
}

// usedRatio returns which part of the pool is in use.
func usedRatio(st *store.Stats) float64 {
	if st.Bytes == 0 {
		return 0
	}
	return float64(st.Bytes-st.FreeBytes) / float64(st.Bytes)
}

func (s *Server) workers() []WorkerStatus {
	out := []WorkerStatus{}
	for _, in := range s.registry.List() {
		w := WorkerStatus{
			Instance: in.ID, Peer: in.By.String(), Model: in.Model, World: in.World, ChunkTokens: in.Chunk, ChunkBytes: in.Bytes, Refused: in.Refused, Asleep: in.Asleep(), CannotMapShm: in.Side() == workers.Pickle,
			Client:    in.Generations.String(),
			SilentFor: s.registry.Silence(in, time.Now()).Round(time.Millisecond).Seconds(),
		}
		if in.Refused == "" {
			w.ChunkShape, w.DType, w.Mode, w.ObjectGroups = in.Layout.Shape(), in.Layout.DType, "engine_driven", 1
			if in.Lent != nil {
				w.Mode, w.ObjectGroups = "lmcache_driven", len(in.Lent.Objects)
			}
		}
		out = append(out, w)
	}
	slices.SortStableFunc(out, func(a, b WorkerStatus) int { return cmp.Compare(a.Instance, b.Instance) })
	return out
}
