// Package relay stands between a prefill engine and decode engines: towards D it is
// a P with a bootstrap directory and side channels of its own, towards P it is a D.
// It keeps the KV that passes, so that D can have it again without P.
//
//	D ── GET /query ──> Relay ── GET /query ──> P's bootstrap server
//	D ── pull T ──> front ── pull T, D's layout ──> P
//	                memory <══════ push ═══════════ P
//	D <══ push ════ memory
//	D ── pull T#2 ─> front                (P is not asked)
//
// A pull makes the relay mirror D's regions (layers, groups, payloads) in its own
// memory and pull the same transfer from the real P under D's rank, so that P sends
// exactly what it would have sent to D. Then the relay pushes to D.
//
// Only the protocol of package mooncake is spoken: both neighbours may be unmodified
// vLLM engines (V2, 0.20 and later).
package relay

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvasir-kv/kvasir/arena"
	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/shm"
	"github.com/kvasir-kv/kvasir/transfer"
)

// Options configures a Relay. A zero field means its default.
type Options struct {
	Upstream string // P's bootstrap server, http://host:port
	Host     string // address that P and D dial; default 127.0.0.1

	// MemoryPath is a file on a memory file system that is made, mapped and removed
	// at once; it needs no name afterwards. MemoryBytes is its size; default 1 GiB.
	MemoryPath  string
	MemoryBytes int64

	Timeout        time.Duration // of a pull from P; default 120 s
	RefreshTimeout time.Duration // of a query of Upstream; default 5 s
	RefreshEvery   time.Duration // how old the view of Upstream may be; default 1 s
	MaxPulls       int           // of D, at once per P engine; default 1024

	Metrics *mooncake.Metrics // default none
	Log     *slog.Logger      // default none
}

// Relay is a KV relay for the engines of one bootstrap server. Its methods are safe
// for concurrent use.
type Relay struct {
	o      Options // immutable
	log    *slog.Logger
	up     *bootstrap.Client
	target *transfer.Target // P's pushes arrive here
	client *transfer.Client // pushes to D
	memory *shm.Segment
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	refresh chan struct{} // one token: who holds it asks Upstream

	mu struct {
		sync.Mutex
		closed bool
		asked  time.Time          // when engines was true
		fronts map[string]*front  // by P's engine id
		text   []byte             // the directory for D
		arena  *arena.Arena       // of memory
		kept   map[keptKey]*kept  // loading or loaded
		order  int64              // last use handed out
		free   map[*kept]struct{} // loaded, not in use: may be evicted
	}
	stats stats
}

// Stats are counters since Open, but for the first three.
type Stats struct {
	Engines   int64 // of P, that have a front now
	Kept      int64 // transfers in memory
	KeptBytes int64

	Pulled      int64 // transfers pulled from P
	PulledBytes int64 // of memory that they fill
	Served      int64 // requests of D
	FromMemory  int64 // of them, without asking P
	PushedBytes int64
	Failed      int64 // requests of D
	Evicted     int64 // transfers
}

type stats struct {
	pulled, pulledBytes, served, fromMemory, pushed, failed, evicted atomic.Int64
}

// Open makes the memory and the transfer ports. It does not ask Upstream yet.
func Open(o Options) (*Relay, error) {
	o.Host = cmp.Or(o.Host, "127.0.0.1")
	o.MemoryBytes = cmp.Or(o.MemoryBytes, 1<<30)
	o.Timeout = cmp.Or(o.Timeout, 120*time.Second)
	o.RefreshTimeout = cmp.Or(o.RefreshTimeout, 5*time.Second)
	o.RefreshEvery = cmp.Or(o.RefreshEvery, time.Second)
	o.MaxPulls = cmp.Or(o.MaxPulls, 1024)
	r := &Relay{o: o, log: cmp.Or(o.Log, slog.New(slog.DiscardHandler)), refresh: make(chan struct{}, 1)}
	var err error
	if r.up, err = bootstrap.NewClient(o.Upstream, bootstrap.ClientOptions{Attempts: 1, Timeout: o.RefreshTimeout}); err != nil {
		return nil, err
	}
	if r.memory, err = shm.Create(o.MemoryPath, o.MemoryBytes); err != nil {
		return nil, fmt.Errorf("relay: memory: %w", err)
	}
	if err := r.memory.Unlink(); err != nil { // the mapping stays; a killed relay leaves nothing
		return nil, errors.Join(fmt.Errorf("relay: memory: %w", err), r.memory.Close())
	}
	if r.target, err = transfer.Listen(transfer.TargetOptions{Host: o.Host, Log: r.log}, transfer.NewTable()); err != nil {
		return nil, errors.Join(fmt.Errorf("relay: %w", err), r.memory.Close())
	}
	r.client = transfer.New(transfer.Options{})
	r.ctx, r.cancel = context.WithCancel(context.Background())
	r.mu.fronts = make(map[string]*front)
	r.mu.kept = make(map[keptKey]*kept)
	r.mu.free = make(map[*kept]struct{})
	r.mu.arena = arena.New(o.MemoryBytes, memoryAlign)
	r.mu.text = []byte("{}")
	return r, nil
}

// memoryAlign is a page, so that transfers share none.
const memoryAlign = 4096

// Close ends all pulls, waits for the pushes to stop, and frees the memory.
func (r *Relay) Close() error {
	r.mu.Lock()
	r.mu.closed = true
	fronts := r.mu.fronts
	r.mu.fronts = make(map[string]*front)
	r.mu.Unlock()
	r.cancel()
	for _, f := range fronts {
		_ = f.router.Close() // nothing is left to say
	}
	r.wg.Wait()
	r.client.Close()
	err := errors.Join(r.target.Close(), r.up.Close())
	return errors.Join(err, r.memory.Close())
}

// Stats returns the counters.
func (r *Relay) Stats() Stats {
	r.mu.Lock()
	s := Stats{
		Engines: int64(len(r.mu.fronts)), Kept: int64(len(r.mu.kept)),
		KeptBytes: r.mu.arena.Size() - r.mu.arena.Free(),
	}
	r.mu.Unlock()
	c := &r.stats
	s.Pulled, s.PulledBytes, s.Served, s.FromMemory = c.pulled.Load(), c.pulledBytes.Load(), c.served.Load(), c.fromMemory.Load()
	s.PushedBytes, s.Failed, s.Evicted = c.pushed.Load(), c.failed.Load(), c.evicted.Load()
	return s
}

// ServeHTTP answers D as a bootstrap server: GET /query lists the relay's own
// engines, one for each of P's. GET /healthz says whether P's server answers.
func (r *Relay) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	answer := func(status int, body []byte) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_, _ = w.Write(body) // a client that went away needs no answer
	}
	detail := func(status int, text string) {
		body, _ := json.Marshal(map[string]string{"detail": text})
		answer(status, body)
	}
	switch {
	case req.URL.Path != "/query" && req.URL.Path != "/healthz":
		detail(http.StatusNotFound, "Not Found")
	case req.Method != http.MethodGet:
		w.Header().Set("Allow", "GET")
		detail(http.StatusMethodNotAllowed, "Method Not Allowed")
	default:
		text, err := r.directory(req.Context())
		switch {
		case err != nil:
			detail(http.StatusServiceUnavailable, err.Error())
		case req.URL.Path == "/healthz":
			answer(http.StatusOK, []byte(`{"status":"ok"}`))
		default:
			answer(http.StatusOK, text)
		}
	}
}

// directory returns what D shall see of P's engines now.
func (r *Relay) directory(ctx context.Context) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, r.o.RefreshTimeout)
	defer cancel()
	select {
	case r.refresh <- struct{}{}:
		defer func() { <-r.refresh }()
	case <-ctx.Done():
		return nil, fmt.Errorf("relay: ask %s: %w", r.o.Upstream, ctx.Err())
	}
	r.mu.Lock()
	text, fresh := r.mu.text, time.Since(r.mu.asked) < r.o.RefreshEvery
	r.mu.Unlock()
	if fresh {
		return text, nil
	}
	d, err := r.up.Query(ctx)
	if err != nil {
		return nil, fmt.Errorf("relay: P's bootstrap server: %w", err)
	}
	return r.adopt(d)
}

// adopt opens a front for each engine of P that has none, and closes those of
// engines that are gone. The caller holds the refresh token.
func (r *Relay) adopt(d bootstrap.Directory) ([]byte, error) {
	type entry struct {
		EngineID   string                 `json:"engine_id"`
		WorkerAddr map[int]map[int]string `json:"worker_addr"`
	}
	out := make(map[int]entry, len(d))
	alive := make(map[string]bool, len(d))
	for dp, e := range d {
		f, err := r.front(e)
		if err != nil {
			return nil, err
		}
		alive[e.ID] = true
		workers := make(map[int]map[int]string, len(e.Workers))
		for tp, stages := range e.Workers {
			workers[tp] = make(map[int]string, len(stages))
			for pp := range stages {
				workers[tp][pp] = f.addr
			}
		}
		out[dp] = entry{f.id, workers}
	}
	text, err := json.Marshal(out)
	if err != nil {
		return nil, fmt.Errorf("relay: directory: %w", err)
	}
	r.mu.Lock()
	r.mu.asked, r.mu.text = time.Now(), text
	var gone []*front
	for id, f := range r.mu.fronts {
		if !alive[id] {
			delete(r.mu.fronts, id)
			gone = append(gone, f)
		}
	}
	r.mu.Unlock()
	for _, f := range gone {
		r.log.Info("relay: engine of P is gone", "engine", f.engine.ID)
		_ = f.router.Close()
	}
	return text, nil
}

var (
	descEngines = prometheus.NewDesc("kvasir_relay_engines", "Engines of P that are relayed.", nil, nil)
	descKept    = prometheus.NewDesc("kvasir_relay_kept_transfers", "Transfers in memory.", nil, nil)
	descBytes   = prometheus.NewDesc("kvasir_relay_kept_bytes", "Memory that they take.", nil, nil)
	descPulled  = prometheus.NewDesc("kvasir_relay_pulled_total", "Transfers pulled from P.", nil, nil)
	descServed  = prometheus.NewDesc("kvasir_relay_served_total", "Requests of D, by where their KV came from.", []string{"from"}, nil)
	descFailed  = prometheus.NewDesc("kvasir_relay_failed_total", "Requests of D that failed.", nil, nil)
	descEvicted = prometheus.NewDesc("kvasir_relay_evicted_total", "Transfers evicted from memory.", nil, nil)
)

// Describe implements prometheus.Collector.
func (r *Relay) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descEngines, descKept, descBytes, descPulled, descServed, descFailed, descEvicted} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (r *Relay) Collect(ch chan<- prometheus.Metric) {
	s := r.Stats()
	put := func(d *prometheus.Desc, kind prometheus.ValueType, v int64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, kind, float64(v), labels...)
	}
	put(descEngines, prometheus.GaugeValue, s.Engines)
	put(descKept, prometheus.GaugeValue, s.Kept)
	put(descBytes, prometheus.GaugeValue, s.KeptBytes)
	put(descPulled, prometheus.CounterValue, s.Pulled)
	put(descServed, prometheus.CounterValue, s.FromMemory, "memory")
	put(descServed, prometheus.CounterValue, s.Served-s.FromMemory, "P")
	put(descFailed, prometheus.CounterValue, s.Failed)
	put(descEvicted, prometheus.CounterValue, s.Evicted)
}
