// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/histogram"
	"github.com/kvasir-kv/kvasir/lmcache"
)

// ServerCacheOptions configures a ServerCache. A zero field means its default.
type ServerCacheOptions struct {
	Model       string
	Parallel    lmcache.Parallel // of the engine; Rank does not matter
	ChunkTokens int              // required; Client.ChunkTokens returns the server's
	InstanceID  int64            // instance under which block allocations are reported

	CallTimeout time.Duration // longest time of one call, and of one lookup; default 30 s
	Heartbeat   time.Duration // between pings; default 10 s
	NoHeartbeat bool          // the server counts as healthy until a call fails
	MaxLookups  int           // lookups in progress; a lookup beyond gets no hit; default 1024
	MaxNotices  int           // queued calls whose result is not needed; calls beyond are dropped; default 4096
	Log         *slog.Logger  // nil discards
}

// ServerCache is the Cache of one server. Lookups run in the background. Calls whose result is not needed are sent in order by one
// goroutine. While the server is unhealthy every lookup has a hit of 0, and nothing is sent. Its methods are safe for concurrent use.
type ServerCache struct {
	client *lmcache.Client // immutable, the caller's
	o      ServerCacheOptions
	health *lmcache.Health
	ctx    context.Context
	stop   context.CancelFunc
	wg     sync.WaitGroup
	notice chan notice

	times                             *histogram.Histogram
	lookups, failed, refused, dropped atomic.Uint64

	mu struct {
		sync.Mutex
		closed  bool
		lookups map[string]*lookup
		leaving map[string]*lookup // by request: its last abandoned lookup, while that still runs
		running int
	}
}

// lookup is one lookup of a request. The ServerCache's mutex guards all fields but key.
type lookup struct {
	key       *lmcache.Key
	done      bool
	reported  bool // LookupResult returned it
	abandoned bool // the scheduler will not ask for the result: the pins must be released
	ended     bool // the session must end, once its pins are released
	hit       int  // tokens

	before *lookup       // an abandoned lookup of the same request, whose calls must be sent first; nil: none
	over   chan struct{} // closed when the lookup has run
}

// notice is a call whose result no caller waits for.
type notice struct {
	what string
	call func(context.Context) error
}

// NewServerCache returns a ServerCache for the server of client, and starts its goroutines, which Close ends.
func NewServerCache(client *lmcache.Client, o ServerCacheOptions) (*ServerCache, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	o.Parallel, _ = o.Parallel.Check() // with its defaults
	o.CallTimeout = cmp.Or(o.CallTimeout, 30*time.Second)
	o.Heartbeat = cmp.Or(o.Heartbeat, 10*time.Second)
	o.MaxLookups = cmp.Or(o.MaxLookups, 1024)
	o.MaxNotices = cmp.Or(o.MaxNotices, 4096)
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	s := &ServerCache{client: client, o: o, notice: make(chan notice, o.MaxNotices), times: histogram.Times()}
	s.mu.lookups, s.mu.leaving = make(map[string]*lookup), make(map[string]*lookup)
	s.ctx, s.stop = context.WithCancel(context.Background())
	s.health = lmcache.NewHealth(lmcache.HealthOptions{
		Interval: o.Heartbeat, Ping: client.PingServer,
		Changed: func(healthy bool, why error) {
			o.Log.Warn("the cache server's health changed: lookups", "healthy", healthy, "err", why)
		},
	})
	if !o.NoHeartbeat {
		s.wg.Go(func() { s.health.Run(s.ctx) })
	}
	s.wg.Go(s.sendNotices)
	return s, nil
}

// Close abandons the lookups and calls in progress, and returns after the last goroutine has ended. The client stays open.
func (s *ServerCache) Close() {
	s.mu.Lock()
	s.mu.closed = true
	s.mu.Unlock()
	s.stop()
	s.wg.Wait()
}

// Healthy reports whether the server answered the last ping.
func (s *ServerCache) Healthy() bool { return s.health.Healthy() }

func (s *ServerCache) key(id string, tokens []uint32, start, end int, salt string) *lmcache.Key {
	return &lmcache.Key{
		Model: s.o.Model, WorldSize: s.o.Parallel.Shards(), Worker: lmcache.AllWorkers, Tokens: tokens, Start: start, End: end,
		RequestID: id, Salt: salt, Readers: s.o.Parallel.Readers(),
	}
}

// whole returns n rounded down to whole chunks.
func (s *ServerCache) whole(n int) int { return n / s.o.ChunkTokens * s.o.ChunkTokens }

// SubmitLookup implements Cache. The result is no hit for a prompt shorter than a chunk, and while too many lookups run or the server is
// unhealthy.
func (s *ServerCache) SubmitLookup(id string, tokens []uint32, salt string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.lookups[id] != nil {
		return
	}
	l := &lookup{key: s.key(id, tokens, 0, s.whole(len(tokens)), salt)}
	s.mu.lookups[id] = l
	if l.key.End == 0 || s.mu.closed || !s.health.Healthy() || s.mu.running >= s.o.MaxLookups {
		if l.key.End > 0 {
			s.refused.Add(1)
		}
		l.done = true
		return
	}
	l.before, l.over = s.mu.leaving[id], make(chan struct{})
	s.mu.running++
	s.lookups.Add(1)
	s.wg.Go(func() { s.run(l) })
}

// run carries out one lookup.
func (s *ServerCache) run(l *lookup) {
	ctx, cancel := s.callContext()
	start := time.Now()
	chunks, err := 0, s.follow(ctx, l)
	if err == nil {
		chunks, err = s.client.Lookup(ctx, l.key)
	}
	cancel()
	if err != nil {
		s.failed.Add(1)
		s.o.Log.Debug("lookup", "request", l.key.RequestID, "err", err)
	} else {
		s.times.Took(time.Since(start))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.running--
	l.done, l.before = true, nil
	if s.mu.leaving[l.key.RequestID] == l {
		delete(s.mu.leaving, l.key.RequestID)
	}
	if err == nil {
		l.hit = min(chunks, l.key.End/s.o.ChunkTokens) * s.o.ChunkTokens
	}
	if l.abandoned {
		s.giveBackLocked(l)
	}
	close(l.over)
}

// follow waits until an abandoned lookup of the same request has run and the release of its pins has been sent, because the server cannot
// tell the two lookups apart.
func (s *ServerCache) follow(ctx context.Context, l *lookup) error {
	if l.before == nil {
		return nil
	}
	select {
	case <-l.before.over:
		return s.Flush(ctx)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// callContext returns a context that ends with the ServerCache, when the server becomes unhealthy, and after CallTimeout.
func (s *ServerCache) callContext() (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(s.health.Context(), s.o.CallTimeout)
	stop := context.AfterFunc(s.ctx, cancel)
	return ctx, func() { stop(); cancel() }
}

// LookupResult implements Cache.
func (s *ServerCache) LookupResult(id string) (hitTokens int, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.mu.lookups[id]
	if l == nil || !l.done {
		return 0, false
	}
	l.reported = true
	return l.hit, true
}

// answered reports whether LookupResult has a result. Unlike LookupResult it does not mark the result as reported.
func (s *ServerCache) answered(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.mu.lookups[id]
	return l != nil && l.done
}

// CleanupLookup implements Cache.
func (s *ServerCache) CleanupLookup(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.mu.lookups[id]
	if l == nil {
		return
	}
	delete(s.mu.lookups, id)
	if l.reported {
		return
	}
	s.abandonLocked(id, l, false)
}

// abandonLocked gives up a lookup that was removed from s.mu.lookups. ended says that the request's session must end after it.
func (s *ServerCache) abandonLocked(id string, l *lookup, ended bool) {
	l.abandoned, l.ended = true, ended
	if l.done {
		s.giveBackLocked(l)
		return
	}
	s.mu.leaving[id] = l
}

// giveBackLocked releases the pins of an abandoned lookup, and ends its session if that was to end.
func (s *ServerCache) giveBackLocked(l *lookup) {
	if l.hit > 0 {
		k := *l.key
		k.End = l.hit
		s.sendLocked("free_lookup_locks", func(ctx context.Context) error { return s.client.FreeLookupLocks(ctx, &k) })
	}
	if l.ended {
		s.endLocked(l.key.RequestID)
	}
}

// FreeLookupLocks implements Cache. start must be a multiple of the chunk size, as it is in a Scheduler's calls.
func (s *ServerCache) FreeLookupLocks(id string, tokens []uint32, start, end int, salt string) {
	if end = s.whole(end); start >= end {
		return
	}
	k := s.key(id, tokens, start, end, salt)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sendLocked("free_lookup_locks", func(ctx context.Context) error { return s.client.FreeLookupLocks(ctx, k) })
}

// EndSession implements Cache. It forgets the request's lookup. While a lookup of the request still runs, even one that was cleaned up, the
// session ends only after that lookup.
func (s *ServerCache) EndSession(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.mu.lookups[id]; l != nil {
		delete(s.mu.lookups, id)
		if !l.done {
			s.abandonLocked(id, l, true)
			return
		}
	}
	if l := s.mu.leaving[id]; l != nil {
		l.ended = true
		return
	}
	s.endLocked(id)
}

func (s *ServerCache) endLocked(id string) {
	s.sendLocked("end_session", func(ctx context.Context) error { return s.client.EndSession(ctx, id) })
}

// ReportBlockAllocations implements Cache.
func (s *ServerCache) ReportBlockAllocations(records []lmcache.BlockAllocation) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sendLocked("report_block_allocation", func(ctx context.Context) error {
		return s.client.ReportBlockAllocations(ctx, s.o.InstanceID, s.o.Model, records)
	})
}

// sendLocked queues a call, or counts it as dropped if the queue is full, the server unhealthy or the ServerCache closed. `what` names the
// call if it fails.
func (s *ServerCache) sendLocked(what string, call func(context.Context) error) {
	if s.mu.closed || !s.health.Healthy() {
		s.dropped.Add(1)
		return
	}
	select {
	case s.notice <- notice{what, call}:
	default:
		s.dropped.Add(1)
	}
}

func (s *ServerCache) sendNotices() {
	for {
		select {
		case <-s.ctx.Done():
			return
		case n := <-s.notice:
			err := s.notify(n)
			if err != nil && !errors.Is(err, context.Canceled) {
				s.o.Log.Debug("call without an answer", "call", n.what, "err", err)
			}
		}
	}
}

// noticeWait bounds the wait for the answer to a notice. The answer itself is not needed, but the wait keeps the calls in order.
const noticeWait = time.Second

func (s *ServerCache) notify(n notice) error {
	ctx, cancel := s.callContext()
	defer cancel()
	ctx, stop := context.WithTimeout(ctx, noticeWait)
	defer stop()
	return n.call(ctx)
}

// Flush waits until all calls that were queued before it are answered, or ctx ends. An engine should call it before Close.
func (s *ServerCache) Flush(ctx context.Context) error {
	done := make(chan struct{})
	select {
	case s.notice <- notice{"flush", func(context.Context) error { close(done); return nil }}:
	case <-ctx.Done():
		return ctx.Err()
	case <-s.ctx.Done():
		return s.ctx.Err()
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-s.ctx.Done():
		return s.ctx.Err()
	}
}

// ServerCacheStats has the counts of a ServerCache since NewServerCache. The histogram has vLLM's name.
type ServerCacheStats struct {
	Healthy        bool             `gauge:"kvasir_connector_server_healthy" help:"1 while the server answers pings."`
	Lookups        uint64           `counter:"kvasir_connector_lookups_total" help:"Lookups sent to the server."`
	LookupsFailed  uint64           `counter:"kvasir_connector_lookups_failed_total" help:"Lookups that ended without an answer; they hit nothing."`
	LookupsRefused uint64           `counter:"kvasir_connector_lookups_refused_total" help:"Lookups not sent: the server was unhealthy, or too many were running."`
	CallsDropped   uint64           `counter:"kvasir_connector_calls_dropped_total" help:"Calls without an answer that were not sent: the server was unhealthy, or too many waited."`
	LookupTimes    histogram.Counts `histogram:"vllm:lmcache_mp_lookup_duration_seconds" help:"Time from a lookup to its result, as the scheduler sees it."`
}

// Stats returns the counts.
func (s *ServerCache) Stats() ServerCacheStats {
	return ServerCacheStats{
		Healthy: s.Healthy(), Lookups: s.lookups.Load(), LookupsFailed: s.failed.Load(), LookupsRefused: s.refused.Load(),
		CallsDropped: s.dropped.Load(), LookupTimes: s.times.Counts(),
	}
}
