package server

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/kvasir-kv/kvasir/internal/httpguard"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/store"
)

// counters count since the start.
type counters struct {
	requests           [256]atomic.Uint64        // by lmcache.Op
	refusals           [maxReasons]atomic.Uint64 // by index into refusalNames
	misses             [store.NumReasons]atomic.Uint64
	dropped            atomic.Uint64 // replies whose client was gone or too slow
	askedTokens        atomic.Uint64
	hitTokens          atomic.Uint64
	earlyExits         atomic.Uint64
	pickledIn          atomic.Uint64 // bytes
	pickledOut         atomic.Uint64
	storesSubmitted    atomic.Uint64
	storesFinished     atomic.Uint64
	retrievesSubmitted atomic.Uint64
	retrievesFinished  atomic.Uint64
	reaped             atomic.Uint64
	swept              atomic.Uint64 // segments of dead engines
	noteFailures       atomic.Uint64
	families           sync.Map
	held               atomic.Uint64 // requests that waited for their client's generation
	panics             atomic.Uint64
	callers            atomic.Uint64    // connections identified
	stackShown         [256]atomic.Bool // by lmcache.Op
}

func (s *Server) debug() bool { return s.log.Enabled(context.Background(), slog.LevelDebug) }

// HTTPHandler returns the admin interface: GET / /healthcheck /status /version
// /metrics, POST /cache/clear, with LMCache's bodies where it has them.
func (s *Server) HTTPHandler() http.Handler {
	reg := prometheus.NewRegistry()
	reg.MustRegister(s, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]string{"status": "ok", "service": "Kvasir HTTP API"})
	})
	mux.HandleFunc("GET /healthcheck", func(w http.ResponseWriter, _ *http.Request) {
		if s.Healthy() {
			writeJSON(w, http.StatusOK, map[string]string{"status": "healthy"})
			return
		}
		writeJSON(w, http.StatusServiceUnavailable, map[string]string{"status": "unhealthy", "reason": strings.Join(s.unhealthy(), "; ")})
	})
	guard := httpguard.Guard{AllowHosts: s.opts.AllowHosts} // probes and metrics tell nothing that a page could use
	mux.Handle("GET /status", guard.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, s.status())
	})))
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, http.StatusOK, s.opts.Version) })
	mux.Handle("POST /cache/clear", guard.Handler(http.HandlerFunc(s.httpClear)))
	mux.Handle("GET /metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{}))
	return mux
}

// httpClear takes the optional body {"tier": "l1", "force": false}.
func (s *Server) httpClear(w http.ResponseWriter, r *http.Request) {
	body := struct {
		Tier  string `json:"tier"`
		Force bool   `json:"force"`
	}{Tier: "l1"}
	if r.ContentLength != 0 {
		if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 4096)).Decode(&body); err != nil {
			writeJSON(w, http.StatusBadRequest, map[string]string{"error": "body is not {\"tier\": \"l1\", \"force\": false}: " + err.Error()})
			return
		}
	}
	if body.Tier != "l1" {
		writeJSON(w, http.StatusBadRequest, map[string]string{"error": "unknown tier \"" + body.Tier + "\": the only tier is l1"})
		return
	}
	n := s.Clear(body.Force)
	writeJSON(w, http.StatusOK, map[string]any{"status": "ok", "cleared": map[string]any{"tier": body.Tier, "chunks": n}})
}

func writeJSON(w http.ResponseWriter, code int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(v) // the client is gone if this fails
}

type workerStatus struct {
	Instance     int64   `json:"instance_id"`
	Peer         string  `json:"peer"` // who may speak for it
	Model        string  `json:"model_name"`
	World        int     `json:"world_size"`
	Mode         string  `json:"mode,omitempty"`
	ObjectGroups int     `json:"object_groups,omitempty"`
	ChunkShape   []int   `json:"chunk_shape,omitempty"`
	DType        string  `json:"dtype,omitempty"`
	ChunkBytes   int64   `json:"chunk_bytes"`
	SilentFor    float64 `json:"silent_s"`
	Refused      string  `json:"refused,omitempty"`
	CannotMapShm bool    `json:"cannot_map_shm,omitempty"`
	Client       string  `json:"client_generation"` // the first lmcache release of it; several when they act alike
}

func (s *Server) status() map[string]any {
	st := s.store.Stats()
	workers := []workerStatus{}
	for _, in := range s.registry.list() {
		w := workerStatus{
			Instance: in.id, Peer: in.by.String(), Model: in.model, World: in.world, ChunkBytes: in.bytes, Refused: in.refuse, CannotMapShm: in.side() == sidePickle,
			Client:    in.generations.String(),
			SilentFor: s.registry.silence(in, time.Now()).Round(time.Millisecond).Seconds(),
		}
		if in.refuse == "" {
			w.ChunkShape, w.DType, w.Mode, w.ObjectGroups = in.layout.Shape(), in.layout.DType, "engine_driven", 1
			if in.driven != nil {
				w.Mode, w.ObjectGroups = "lmcache_driven", len(in.driven.objects)
			}
		}
		workers = append(workers, w)
	}
	slices.SortFunc(workers, func(a, b workerStatus) int { return int(min(max(a.Instance-b.Instance, -1), 1)) })
	misses := map[string]uint64{}
	for i := range s.n.misses {
		if n := s.n.misses[i].Load(); n > 0 {
			misses[store.Reason(i).String()] = n
		}
	}
	return map[string]any{
		"healthy": s.Healthy(), "unhealthy": s.unhealthy(), "version": s.opts.Version, "uptime_s": time.Since(s.started).Round(time.Millisecond).Seconds(),
		"chunk_size": s.opts.ChunkTokens, "hash_algorithm": "blake3", "active_sessions": st.Sessions,
		"l1": map[string]any{
			"shm_name": s.store.PoolName(), "total_bytes": st.Bytes, "free_bytes": st.FreeBytes, "resident_bytes": st.ResidentBytes,
			"staged_bytes": st.StagedBytes, "quarantined_bytes": st.CondemnedBytes, "populated_bytes": s.memory.provided.Load(), "usable_bytes": s.usable(),
			"resident_chunks": st.Resident, "evictable_chunks": st.EvictableObjs, "evicted_chunks": st.EvictedChunks,
			"transfers": st.Transfers, "transfers_in_quarantine": st.Quarantined,
		},
		"lookup":  map[string]any{"lookups": st.Lookups, "asked_tokens": s.n.askedTokens.Load(), "hit_tokens": s.n.hitTokens.Load(), "miss_reasons": misses},
		"workers": workers,
	}
}

// Describe implements prometheus.Collector as an unchecked collector.
func (s *Server) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector. Names that begin with lmcache_mp_ are
// LMCache's, so that its dashboards keep working.
func (s *Server) Collect(ch chan<- prometheus.Metric) {
	st := s.store.Stats()
	emit := func(kind prometheus.ValueType, name, help string, v float64, labels ...string) {
		var names, values []string
		for i := 0; i+1 < len(labels); i += 2 {
			names, values = append(names, labels[i]), append(values, labels[i+1])
		}
		ch <- prometheus.MustNewConstMetric(prometheus.NewDesc(name, help, names, nil), kind, v, values...)
	}
	gauge := func(name, help string, v float64) { emit(prometheus.GaugeValue, name, help, v) }
	count := func(name, help string, v uint64) { emit(prometheus.CounterValue, name, help, float64(v)) }

	gauge("lmcache_mp_l1_memory_usage_bytes", "Pool bytes in use.", float64(st.Bytes-st.FreeBytes))
	gauge("lmcache_mp_l1_usage_ratio", "Share of the pool in use.", float64(st.Bytes-st.FreeBytes)/float64(st.Bytes))
	gauge("lmcache_mp_l1_staging_bytes", "Pool bytes reserved and not committed.", float64(st.StagedBytes))
	gauge("lmcache_mp_active_prefetch_jobs", "Lookups in progress.", 0)
	count("lmcache_mp_l1_read_chunks_total", "Chunks retrieved.", st.LoadedChunks)
	count("lmcache_mp_l1_write_chunks_total", "Chunks stored.", st.StoredChunks)
	count("lmcache_mp_l1_evicted_chunks_total", "Chunks evicted.", st.EvictedChunks)
	count("lmcache_mp_l1_allocation_failure_chunks_total", "Stores that did not fit whole.", st.AllocationFailures)
	count("lmcache_mp_l1_read_failure_chunks_total", "Retrieves declined because a chunk was gone or not pinned.", st.ReadFailures)
	count("lmcache_mp_lookups_requests_total", "Lookups.", st.Lookups)
	count("lmcache_mp_lookup_early_exit_requests_total", "Lookups answered without looking.", s.n.earlyExits.Load())
	count("kvasir_held_requests_total", "Requests that waited for a sign of their client's generation.", s.n.held.Load())
	count("lmcache_mp_lookup_requested_tokens_total", "Tokens asked for, whole chunks.", s.n.askedTokens.Load())
	count("lmcache_mp_lookup_hit_tokens_total", "Tokens hit.", s.n.hitTokens.Load())
	count("lmcache_mp_lookup_hit_l1_tokens_total", "Tokens hit in the pool.", s.n.hitTokens.Load())
	count("lmcache_mp_num_submitted_stores_total", "prepare_store calls that were tried.", s.n.storesSubmitted.Load())
	count("lmcache_mp_num_finished_stores_total", "Stores committed.", s.n.storesFinished.Load())
	count("lmcache_mp_num_submitted_retrieves_total", "prepare_retrieve calls that were tried.", s.n.retrievesSubmitted.Load())
	count("lmcache_mp_num_finished_retrieves_total", "Retrieves committed.", s.n.retrievesFinished.Load())
	count("lmcache_mp_num_chunks_loaded_total", "Chunks retrieved.", st.LoadedChunks)

	count("kvasir_pickled_stored_bytes_total", "Bytes of chunks that came through the socket.", s.n.pickledIn.Load())
	count("kvasir_pickled_retrieved_bytes_total", "Bytes of chunks that left through the socket.", s.n.pickledOut.Load())
	count("kvasir_checksummed_chunks_total", "Chunks whose checksum was recorded for the next start.", st.SummedChunks)
	count("kvasir_verified_chunks_total", "Chunks of an earlier server that were equal to their checksums.", st.VerifiedChunks)
	count("kvasir_corrupt_chunks_total", "Chunks of an earlier server that differed from their checksums: misses.", st.CorruptChunks)
	count("kvasir_evicted_dead_chunks_total", "Of the evicted, chunks of windows that no hit could load any more.", st.DeadChunks)
	gauge("kvasir_pool_populated_bytes", "Pool bytes prepared ahead of use.", float64(s.memory.provided.Load()))
	gauge("kvasir_pool_usable_bytes", "Pool bytes that may be handed out: less than the pool while it has no memory for all of it.", float64(s.usable()))
	gauge("kvasir_pool_bytes", "Size of the pool.", float64(st.Bytes))
	gauge("kvasir_pool_quarantined_bytes", "Pool bytes without a key that a worker may still touch.", float64(st.CondemnedBytes))
	gauge("kvasir_transfers", "Transfers in progress.", float64(st.Transfers))
	gauge("kvasir_transfers_quarantined", "Transfers of workers that are gone.", float64(st.Quarantined))
	gauge("kvasir_sessions", "Sessions.", float64(st.Sessions))
	gauge("kvasir_workers", "Registered workers.", float64(len(s.registry.list())))
	count("kvasir_stored_bytes_total", "Bytes stored.", st.StoredBytes)
	count("kvasir_retrieved_bytes_total", "Bytes retrieved.", st.LoadedBytes)
	count("kvasir_evicted_bytes_total", "Bytes evicted.", st.EvictedBytes)
	count("kvasir_late_commits_total", "Commits of workers that had been dropped.", st.LateCommits)
	count("kvasir_holds_expired_total", "Transfers that no commit ended.", st.HoldsExpired)
	count("kvasir_workers_reaped_total", "Workers dropped for silence, or since their process had ended.", s.n.reaped.Load())
	count("kvasir_worker_segments_removed_total", "Shared-memory segments of dead engines that were removed.", s.n.swept.Load())
	count("kvasir_note_failures_total", "Times that the registrations could not be kept for a restart.", s.n.noteFailures.Load())
	count("kvasir_panics_total", "Requests that met a bug of this server and were declined.", s.n.panics.Load())
	count("kvasir_replies_dropped_total", "Replies whose client was gone or too slow.", s.n.dropped.Load())
	for i := range s.n.requests {
		if n := s.n.requests[i].Load(); n > 0 {
			emit(prometheus.CounterValue, "kvasir_requests_total", "Requests by operation.", float64(n), "operation", lmcache.Op(i).String())
		}
	}
	for i, r := range refusalNames {
		emit(prometheus.CounterValue, "kvasir_declined_total", "Declined requests by reason.", float64(s.n.refusals[i].Load()), "reason", r.name)
	}
	for i := range s.n.misses {
		if n := s.n.misses[i].Load(); n > 0 {
			emit(prometheus.CounterValue, "kvasir_lookup_ended_total", "Lookups that were not whole hits, by why the prefix ended.",
				float64(n), "reason", store.Reason(i).String())
		}
	}
}
