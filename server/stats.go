// SPDX-License-Identifier: Apache-2.0

package server

import (
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/kvasir-kv/kvasir/internal/histogram"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/explain"
	"github.com/kvasir-kv/kvasir/server/usage"
	"github.com/kvasir-kv/kvasir/store/hitcurve"
	"github.com/kvasir-kv/kvasir/store/miss"
)

// counters count since the start.
type counters struct {
	requests           [256]atomic.Uint64        // by lmcache.Op
	refusals           map[string]*atomic.Uint64 // by label; the map is immutable
	unsigned           [256]atomic.Uint64        // by lmcache.Op: requests that would be refused because of their unsigned salts
	tierMisses         explain.TierMisses
	times              [256]*histogram.Histogram // by lmcache.Op; immutable
	otherTimes         *histogram.Histogram
	dropped            atomic.Uint64 // replies that could not be sent: the client was gone or too slow
	askedTokens        atomic.Uint64
	hitTokens          atomic.Uint64
	badTTLs            atomic.Uint64 // stores whose lmcache.ttl was ignored
	salted             atomic.Uint64 // lookups with a cache salt
	hits               atomic.Uint64 // lookups that found at least one chunk
	pickledIn          atomic.Uint64 // bytes
	pickledOut         atomic.Uint64
	storesSubmitted    usage.Transfers
	storesFinished     usage.Transfers
	retrievesSubmitted usage.Transfers
	retrievesFinished  usage.Transfers
	reaped             atomic.Uint64
	swept              atomic.Uint64 // segments of dead engines
	noteFailures       atomic.Uint64
	held               atomic.Uint64 // requests that were held until their client's generation was known
	panics             atomic.Uint64
	callers            atomic.Uint64    // connections that were identified
	misfits            sync.Map         // pairs of alignment and chunk size that did not fit, and were logged
	misfitCount        atomic.Int64     // number of misfits
	newer              atomic.Int64     // when a client of a later release was logged last, Unix seconds
	earlyClients       sync.Map         // releases that are not served and whose clients were logged
	stackShown         [256]atomic.Bool // by lmcache.Op
}

// timed are the operations that have a histogram of their times: those that a prompt needs. The others share one histogram.
var timed = []lmcache.Op{
	lmcache.OpLookup, lmcache.OpQueryPrefetchStatus, lmcache.OpWaitPrefetchStatus, lmcache.OpPrepareStore, lmcache.OpCommitStore,
	lmcache.OpPrepareRetrieve, lmcache.OpCommitRetrieve, lmcache.OpStore, lmcache.OpRetrieve, lmcache.OpEndSession,
}

func (n *counters) init() {
	n.refusals = make(map[string]*atomic.Uint64)
	for _, r := range refusals {
		n.refusals[r.label] = new(atomic.Uint64)
	}
	for _, o := range reasonsElsewhere {
		n.refusals[o.label] = new(atomic.Uint64)
	}
	n.refusals[malformed] = new(atomic.Uint64)
	n.otherTimes = histogram.Times()
	for op := range n.times {
		n.times[op] = n.otherTimes
	}
	for _, op := range timed {
		n.times[op] = histogram.Times()
	}
}

// Stats are the figures of a Server, for metrics. Names that begin with lmcache_mp_
// are LMCache's, so that its dashboards keep working.
type Stats struct {
	UsedBytes          int64             `gauge:"lmcache_mp_l1_memory_usage_bytes" always:"backend=shm,l1_tag=_default" help:"Pool bytes in use: chunks, stores in progress and quarantine."`
	UsageRatio         float64           `gauge:"lmcache_mp_l1_usage_ratio" always:"backend=shm,l1_tag=_default" help:"Share of the pool in use. A cache that has run for a while stays near 1: room is made when it is needed."`
	StagedBytes        int64             `gauge:"lmcache_mp_l1_staging_bytes" always:"backend=shm,l1_tag=_default" help:"Pool bytes that workers may fill and have not committed yet. Large for long: workers that stall or die."`
	PrefetchJobs       int               `gauge:"lmcache_mp_active_prefetch_jobs" help:"Lookups that are pending: what they found is not ready to be served yet. Each is for 2 s at most."`
	LoadedChunks       uint64            `counter:"lmcache_mp_l1_read_chunks_total" always:"l1_tag=_default" help:"Chunks that engines retrieved."`
	StoredChunks       uint64            `counter:"lmcache_mp_l1_write_chunks_total" always:"l1_tag=_default" help:"Chunks that engines stored and that were not there before."`
	EvictedChunks      uint64            `counter:"lmcache_mp_l1_evicted_chunks_total" always:"l1_tag=_default" help:"Chunks dropped to make room. Fast growth with falling hits: the pool is too small for the working set."`
	AllocationFailures uint64            `counter:"lmcache_mp_l1_allocation_failure_chunks_total" always:"during=l1_store" help:"Stores that did not fit whole, since everything else was pinned, being transferred or in quarantine."`
	ReadFailures       uint64            `counter:"lmcache_mp_l1_read_failure_chunks_total" always:"during=l1_retrieve" help:"Retrieves declined because a chunk was gone or no lookup had pinned it; the engine computes it again."`
	StoresSubmitted    map[string]uint64 `counter:"lmcache_mp_num_submitted_stores_total" label:"device" help:"Stores begun: prepare_store and store calls of registered workers."`
	StoresFinished     map[string]uint64 `counter:"lmcache_mp_num_finished_stores_total" label:"device" help:"Stores that ended well, also those that found all chunks there."`
	RetrievesSubmitted map[string]uint64 `counter:"lmcache_mp_num_submitted_retrieves_total" label:"device" help:"Retrieves begun: prepare_retrieve and retrieve calls of registered workers."`
	RetrievesFinished  map[string]uint64 `counter:"lmcache_mp_num_finished_retrieves_total" label:"device" help:"Retrieves that ended well."`

	P2PJobs       int            `gauge:"lmcache_mp_active_p2p_lookup_jobs" help:"Lookups of other nodes whose result was not taken yet."`
	BelowChunks   uint64         `counter:"lmcache_mp_l2_prefetch_load_completed_chunks_total" help:"Objects that came from the tiers below the pool."`
	WrittenChunks uint64         `counter:"lmcache_mp_l2_store_completed_objects_chunks_total" help:"Objects that were written to the tiers below, or found there."`
	LoadAdapters  map[string]int `gauge:"lmcache_mp_l2_prefetch_adapters" label:"state" help:"Tiers below the pool that lookups ask."`
	StoreAdapters map[string]int `gauge:"lmcache_mp_l2_store_adapters" label:"state" always:"l1_tag=_default" help:"Tiers below the pool that are written to."`

	HeldRequests      uint64  `counter:"kvasir_held_requests_total" help:"Requests that waited until their client showed which lmcache release it is. Only after an upgrade or restart of the server."`
	PickledStored     uint64  `counter:"kvasir_pickled_stored_bytes_total" help:"Chunk bytes that came through the socket, from workers that cannot map the pool: slow."`
	PickledRetrieved  uint64  `counter:"kvasir_pickled_retrieved_bytes_total" help:"Chunk bytes that left through the socket, to workers that cannot map the pool: slow."`
	PendingLookups    uint64  `counter:"kvasir_lookups_pending_total" help:"Lookups that did not have their result at once: what they found was not ready to be served."`
	LateLookups       uint64  `counter:"kvasir_lookups_late_total" help:"Of those, the ones that were answered with what was there when their time was over."`
	BelowBytes        uint64  `counter:"kvasir_below_read_bytes_total" help:"Bytes that came from the tier below the pool."`
	BelowWarmed       uint64  `counter:"kvasir_below_warmed_bytes_total" help:"Of these, what was read after the start before anybody asked for it (--warm)."`
	BelowFailures     uint64  `counter:"kvasir_below_failures_total" help:"Calls of the tier below that failed, and objects of it that were lost, too long or wrong."`
	BelowWritten      uint64  `counter:"kvasir_below_written_bytes_total" help:"Bytes that were written to the tier below the pool, or found there."`
	BelowWriteFailed  uint64  `counter:"kvasir_below_write_failures_total" help:"Chunks that the tier below failed to write. They are offered again at their next hit."`
	BelowNotKept      uint64  `counter:"kvasir_below_not_kept_total" help:"Chunks that the tier below did not take: no room, budget used up, or seen for the first time."`
	BelowSkipped      uint64  `counter:"kvasir_below_skipped_total" help:"Chunks that were not offered to the tier below because too many bytes waited for it. Growth: it is slower than engines store."`
	BelowLost         uint64  `counter:"kvasir_below_lost_total" help:"Chunks that were evicted before they were below. Growth: the tier is slower than engines store, or full."`
	BelowAnswers      uint64  `counter:"kvasir_below_answers_total" help:"Chunks with generated tokens that were not written to the tier below when they were stored (--l2-write-answers)."`
	BelowGone         uint64  `counter:"kvasir_below_gone_total" help:"Chunks that were below when an earlier server ended and are not any more. They are offered again."`
	LoadRate          float64 `gauge:"kvasir_below_load_bytes_per_second" help:"How fast chunks come from tiers for one lookup, lately; 0 while not known."`
	ComputeRate       float64 `gauge:"kvasir_compute_bytes_per_second" help:"How fast engines compute and store chunks of one request, lately; 0 while not known. Above the rate of loading: tiers slow requests down."`
	BelowWaiting      int64   `gauge:"kvasir_below_waiting_bytes" help:"Bytes of the chunks that wait to be written to the tier below."`
	SummedChunks      uint64  `counter:"kvasir_checksummed_chunks_total" help:"Chunks whose checksum was recorded for the next start."`
	VerifiedChunks    uint64  `counter:"kvasir_verified_chunks_total" help:"Chunks of an earlier server that were equal to their checksums."`
	UnsummedChunks    uint64  `counter:"kvasir_unsummed_chunks_total" help:"Chunks of an earlier server that was killed before they had a checksum, and became misses (--trust-unsummed serves them)."`
	CorruptChunks     uint64  `counter:"kvasir_corrupt_chunks_total" help:"Chunks of an earlier server that differed from their checksums, and became misses. Any: something wrote into the pool, or memory is faulty."`
	DeadChunks        uint64  `counter:"kvasir_evicted_dead_chunks_total" help:"Of the evicted chunks, those of sliding windows that no hit could load any more."`
	PopulatedBytes    int64   `gauge:"kvasir_pool_populated_bytes" help:"Pool bytes for which the kernel has provided memory ahead of use."`
	UsableBytes       int64   `gauge:"kvasir_pool_usable_bytes" help:"Pool bytes that may be handed out. Less than kvasir_pool_bytes for long: /dev/shm has no memory for the whole pool."`
	PoolBytes         int64   `gauge:"kvasir_pool_bytes" help:"Size of the pool."`
	QuarantinedBytes  int64   `gauge:"kvasir_pool_quarantined_bytes" help:"Pool bytes that hold no chunk and wait because a worker that is gone may still write there; they come back after the quarantine."`
	Transfers         int     `gauge:"kvasir_transfers" help:"Chunks being written or read by workers."`
	Quarantined       int     `gauge:"kvasir_transfers_quarantined" help:"Of the transfers, those of workers that are gone."`
	Sessions          int     `gauge:"kvasir_sessions" help:"Requests of engines that have looked up and not ended. Growth without end: an engine that does not end its requests."`
	Workers           int     `gauge:"kvasir_workers" help:"Registered workers, refused ones included."`
	AsleepWorkers     int     `gauge:"kvasir_workers_asleep" help:"Registered workers that are silent and of which no process is seen: no lookup counts on them before their next request."`
	RefusedWorkers    int     `gauge:"kvasir_workers_refused" help:"Registered workers whose transfers are all declined; /status says why."`
	Healthy           bool    `gauge:"kvasir_healthy" help:"1 while hits can be served and stores taken; /healthcheck says why not."`
	StoredBytes       uint64  `counter:"kvasir_stored_bytes_total" help:"Bytes of the chunks that engines stored."`
	RetrievedBytes    uint64  `counter:"kvasir_retrieved_bytes_total" help:"Bytes of the chunks that engines retrieved."`
	EvictedBytes      uint64  `counter:"kvasir_evicted_bytes_total" help:"Bytes of the chunks dropped to make room."`
	EndedChunks       uint64  `counter:"kvasir_request_ttl_chunks_total" help:"Chunks dropped because the time to live that their request gave them (lmcache.ttl) was over."`
	EndedBytes        uint64  `counter:"kvasir_request_ttl_bytes_total" help:"The same in bytes."`
	BadTTLs           uint64  `counter:"kvasir_request_ttls_ignored_total" help:"Stores whose lmcache.ttl was ignored: it was not a number of seconds from 0.001 to ten years."`
	LateCommits       uint64  `counter:"kvasir_late_commits_total" help:"Commits of workers that had been dropped or had registered anew: nothing of them is used."`
	HoldsExpired      uint64  `counter:"kvasir_holds_expired_total" help:"Transfers that no commit ended; their memory was taken back after the quarantine."`
	WorkersReaped     uint64  `counter:"kvasir_workers_reaped_total" help:"Workers dropped for silence, because their process had ended, or to make room for others."`
	SegmentsRemoved   uint64  `counter:"kvasir_worker_segments_removed_total" help:"Shared-memory segments that dead engines had left and that were removed."`
	NoteFailures      uint64  `counter:"kvasir_note_failures_total" help:"Times that the registrations could not be written beside the pool: after a restart engines would have to register again."`
	Panics            uint64  `counter:"kvasir_panics_total" help:"Requests that met a bug of this server and were declined. Any: please report the stack in the log."`
	RepliesDropped    uint64  `counter:"kvasir_replies_dropped_total" help:"Replies whose client was gone or read too slowly."`
	EventsKept        int     `gauge:"lmcache_mp_kv_events_log_depth" help:"KV-event records that readers can still ask for."`
	EventStreams      int     `gauge:"kvasir_kv_event_streams" help:"Open subscribe_kv_events streams."`
	EventRecords      uint64  `counter:"kvasir_kv_events_total" help:"KV-event records: chunks that became available, or went. 0 before the first subscription."`
	EventTokenBytes   int64   `gauge:"kvasir_kv_event_token_bytes" help:"Memory of the tokens of resident chunks, for KV events."`
	EventsUnbound     uint64  `counter:"kvasir_kv_events_unbound_total" help:"Times that a stored chunk was not announced because that memory is used up. Growth: raise --kv-events-memory."`
	EventScans        uint64  `counter:"kvasir_kv_event_scans_total" help:"Times that KV events were made from a comparison with the whole pool: at the start, and when they came faster than they were read."`
	SessionsExpired   uint64  `counter:"kvasir_sessions_expired_total" help:"Sessions ended because their engine said nothing about them for --session-ttl-seconds."`
	ChangedTokens     uint64  `counter:"kvasir_changed_beginning_tokens_total" help:"Tokens that were not found because what is before them in the prompt changes (a date, an id), while earlier prompts have the same text behind it; estimated from a sample. Much of what is asked for: kvasir advise says what to do."`
	SessionsDisplaced uint64  `counter:"kvasir_sessions_displaced_total" help:"Sessions ended early because their peer had more than its share."`

	Requests    map[string]uint64           `counter:"kvasir_requests_total" label:"operation" help:"Requests by operation."`
	Declined    map[string]uint64           `counter:"kvasir_declined_total" label:"reason" help:"Requests answered negatively, by reason; the log has one line for each, a few per second."`
	Unsigned    map[string]uint64           `counter:"kvasir_unsigned_salts_total" label:"operation" help:"Requests that --require-signed-salts would refuse, with --count-unsigned-salts."`
	LookupEnded map[string]uint64           `counter:"kvasir_lookup_ended_total" label:"reason" help:"Lookups that were not whole hits, by why the next chunk could not be served."`
	Durations   map[string]histogram.Counts `histogram:"kvasir_request_duration_seconds" label:"operation" help:"Time from a request's last byte to its answer, without the way through the network."`
}

// CurveStats has the estimates of what other amounts of memory would have found.
type CurveStats struct {
	Ceiling  map[string]float64    `gauge:"kvasir_hit_rate_ceiling" label:"window" help:"Hit rate, of chunks asked for, that a memory without end would have had in a window of time (15m, 1h, 24h). Far above kvasir_hit_rate_measured: kvasir advise says what to buy or change."`
	Measured map[string]float64    `gauge:"kvasir_hit_rate_measured" label:"window" help:"Hit rate, of chunks asked for, that the pool and the tiers had in that window."`
	Curve    map[[2]string]float64 `gauge:"kvasir_hit_rate_estimate" label:"policy,pools" help:"Hit rate that a pool of so many times this one's size would have had in the last 24 hours, with this server's eviction policy (own) or lru."`
	Tiers    map[string]float64    `gauge:"kvasir_tier_hit_rate_estimate" label:"tier" help:"The same of the pool and all tiers up to this one."`
}

// CurveStats returns the estimates; empty if nothing is estimated.
func (s *Server) CurveStats() CurveStats {
	out := CurveStats{map[string]float64{}, map[string]float64{}, map[[2]string]float64{}, map[string]float64{}}
	windows := s.store.Curves()
	for i := range windows {
		w := &windows[i]
		name := []string{"15m", "1h", "24h"}[i]
		out.Ceiling[name], out.Measured[name] = w.Ceiling, w.Hit
		if i < len(windows)-1 {
			continue
		}
		for k, p := range w.Curve {
			pools := strconv.FormatFloat(hitcurve.Factors[k], 'g', -1, 64)
			out.Curve[[2]string{"own", pools}], out.Curve[[2]string{"lru", pools}] = p.Rate, p.LRU
		}
		for _, p := range w.Tiers {
			out.Tiers[p.Name] = p.Rate
		}
	}
	return out
}

// LookedUp returns the number of lookups since the start. Of those that have their answer it also returns the tokens that they asked for,
// and the tokens that hit.
func (s *Server) LookedUp() (lookups, askedTokens, hitTokens uint64) {
	askedTokens, hitTokens = s.askedAndHit()
	return s.n.requests[lmcache.OpLookup].Load(), askedTokens, hitTokens
}

// askedAndHit returns the tokens that answered lookups asked for, and how many of them hit. The hits are read first, and a lookup counts
// what it asked for first, so the hits are never more.
func (s *Server) askedAndHit() (asked, hit uint64) {
	hit = s.n.hitTokens.Load()
	return s.n.askedTokens.Load(), hit
}

// ByModel are the figures by model, salt and worker.
func (s *Server) ByModel() usage.Stats { return s.tally.Stats() }

// Stats returns the figures.
func (s *Server) Stats() Stats {
	st := s.store.Stats()
	n := &s.n
	out := Stats{
		UsedBytes: st.Bytes - st.FreeBytes, UsageRatio: usedRatio(&st), StagedBytes: st.StagedBytes, PrefetchJobs: st.Pending,
		LoadedChunks: st.LoadedChunks, StoredChunks: st.StoredChunks, EvictedChunks: st.EvictedChunks,
		AllocationFailures: st.AllocationFailures, ReadFailures: st.ReadFailures,
		StoresSubmitted: n.storesSubmitted.ByDevice(), StoresFinished: n.storesFinished.ByDevice(),
		RetrievesSubmitted: n.retrievesSubmitted.ByDevice(), RetrievesFinished: n.retrievesFinished.ByDevice(),

		P2PJobs: s.p2p.Len(), BelowChunks: st.BelowChunks, WrittenChunks: st.WrittenChunks,
		LoadAdapters: map[string]int{"active": len(s.opts.Tiers)}, StoreAdapters: map[string]int{"active": len(s.opts.Tiers)},
		HeldRequests: n.held.Load(), PickledStored: n.pickledIn.Load(), PickledRetrieved: n.pickledOut.Load(),
		PendingLookups: st.PendingLookups, LateLookups: st.LateLookups,
		BelowBytes: st.BelowBytes, BelowWarmed: st.WarmedBytes, BelowFailures: st.BelowFailures, BelowWritten: st.WrittenBytes, BelowWriteFailed: st.WriteFailures, BelowNotKept: st.NotKeptBelow,
		BelowSkipped: st.Outbox.Skipped, BelowLost: st.LostChunks, BelowAnswers: st.AnswerChunks, BelowGone: st.GoneBelow, BelowWaiting: st.Outbox.WaitingBytes, LoadRate: st.Rates.LoadRate, ComputeRate: st.Rates.ComputeRate,
		SummedChunks: st.SummedChunks, VerifiedChunks: st.VerifiedChunks, UnsummedChunks: st.UnsummedChunks, CorruptChunks: st.CorruptChunks, DeadChunks: st.DeadChunks,
		PopulatedBytes: s.store.Memory().Provided(), UsableBytes: s.store.Memory().Usable(), PoolBytes: st.Bytes, QuarantinedBytes: st.CondemnedBytes,
		Transfers: st.Transfers, Quarantined: st.Quarantined, Sessions: st.Sessions, Healthy: s.Healthy(),
		StoredBytes: st.StoredBytes, RetrievedBytes: st.LoadedBytes, EvictedBytes: st.EvictedBytes,
		EndedChunks: st.EndedChunks, EndedBytes: st.EndedBytes, BadTTLs: n.badTTLs.Load(),
		LateCommits: st.LateCommits, HoldsExpired: st.HoldsExpired, WorkersReaped: n.reaped.Load(), SegmentsRemoved: n.swept.Load(),
		NoteFailures: n.noteFailures.Load(), Panics: n.panics.Load(), RepliesDropped: n.dropped.Load(),
		SessionsExpired: st.SessionsExpired, SessionsDisplaced: st.SessionsPushed, ChangedTokens: s.beginnings.Lost(),

		Requests: make(map[string]uint64), Declined: make(map[string]uint64), Unsigned: make(map[string]uint64), LookupEnded: make(map[string]uint64), Durations: make(map[string]histogram.Counts),
	}
	if book := s.opts.Events; book != nil {
		e := book.Stats()
		out.EventsKept, out.EventRecords, out.EventTokenBytes = e.Kept, e.Records, e.Bytes
		out.EventsUnbound, out.EventScans, out.EventStreams = e.Unbound, e.Scans, s.streams.count()
	}
	for _, in := range s.registry.List() {
		out.Workers++
		if in.Asleep() {
			out.AsleepWorkers++
		}
		if in.Refused != "" {
			out.RefusedWorkers++
		}
	}
	for i := range n.requests {
		if op := lmcache.Op(i); op.Known() {
			out.Requests[op.String()] = n.requests[i].Load()
			if count := n.unsigned[i].Load(); count > 0 {
				out.Unsigned[op.String()] = count
			}
		}
	}
	for label, count := range n.refusals {
		out.Declined[label] = count.Load()
	}
	for r := miss.None + 1; int(r) < miss.NumReasons; r++ {
		out.LookupEnded[r.Label()] = s.ended.Count(r)
	}
	for _, op := range timed {
		out.Durations[op.String()] = n.times[op].Counts()
	}
	out.Durations["other"] = n.otherTimes.Counts()
	return out
}
