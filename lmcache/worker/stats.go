package worker

import (
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvasir-kv/kvasir/lmcache"
)

type counters struct {
	stores, storesFailed, storesDropped atomic.Uint64
	loads, loadsFailed                  atomic.Uint64
	storedBytes, loadedBytes            atomic.Uint64
	merged, registrations               atomic.Uint64
	storeSeconds, loadSeconds           prometheus.Histogram
}

func (n *counters) init() {
	buckets := prometheus.ExponentialBuckets(0.0002, 2, 16)
	n.storeSeconds = prometheus.NewHistogram(prometheus.HistogramOpts{Name: "kvasir_worker_store_seconds", Help: "STORE operations, copying included.", Buckets: buckets})
	n.loadSeconds = prometheus.NewHistogram(prometheus.HistogramOpts{Name: "kvasir_worker_load_seconds", Help: "RETRIEVE operations, copying included.", Buckets: buckets})
}

// observe counts an operation that was carried out.
func (n *counters) observe(j *job, ok bool, d time.Duration) {
	switch {
	case j.Direction == lmcache.Store && ok:
		n.stores.Add(1)
		n.storeSeconds.Observe(seconds(d))
	case j.Direction == lmcache.Store:
		n.storesFailed.Add(1)
	case ok:
		n.loads.Add(1)
		n.loadSeconds.Observe(seconds(d))
	default:
		n.loadsFailed.Add(1)
	}
}

// Stats counts since OpenAdapter.
type Stats struct {
	Queued        int    // operations that wait now
	Running       int    // in progress now
	Stores        uint64 // ended well; merged ones count once
	StoresFailed  uint64
	StoresDropped uint64 // not tried: unhealthy server, full queue, refused
	StoredBytes   uint64
	Loads         uint64
	LoadsFailed   uint64 // tried or not
	LoadedBytes   uint64
	Merged        uint64 // stores that joined the one before them
	Registrations uint64 // again, after the first
	EventsLost    int    // since the last call of Events
}

// Stats returns the counts.
func (a *Adapter) Stats() Stats {
	n := &a.n
	s := Stats{
		Stores: n.stores.Load(), StoresFailed: n.storesFailed.Load(), StoresDropped: n.storesDropped.Load(), StoredBytes: n.storedBytes.Load(),
		Loads: n.loads.Load(), LoadsFailed: n.loadsFailed.Load(), LoadedBytes: n.loadedBytes.Load(),
		Merged: n.merged.Load(), Registrations: n.registrations.Load(),
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	s.Queued, s.Running, s.EventsLost = len(a.mu.queue), len(a.mu.running), a.mu.lost
	return s
}

// Describe implements prometheus.Collector as an unchecked collector.
func (a *Adapter) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (a *Adapter) Collect(ch chan<- prometheus.Metric) {
	s := a.Stats()
	emit := func(kind prometheus.ValueType, name, help string, v float64) {
		ch <- prometheus.MustNewConstMetric(prometheus.NewDesc("kvasir_worker_"+name, help, nil, nil), kind, v)
	}
	gauge := func(name, help string, v float64) { emit(prometheus.GaugeValue, name, help, v) }
	count := func(name, help string, v uint64) { emit(prometheus.CounterValue, name, help, float64(v)) }
	healthy := 0.0
	if a.Healthy() {
		healthy = 1
	}
	gauge("healthy", "Whether the server is believed to serve this worker.", healthy)
	gauge("queued", "Operations that wait.", float64(s.Queued))
	gauge("running", "Operations in progress.", float64(s.Running))
	count("stores_total", "STORE operations that ended well.", s.Stores)
	count("stores_failed_total", "STORE operations that were tried and failed.", s.StoresFailed)
	count("stores_dropped_total", "STORE operations that were not tried.", s.StoresDropped)
	count("stores_merged_total", "STORE operations that joined the one before them.", s.Merged)
	count("stored_bytes_total", "Bytes stored.", s.StoredBytes)
	count("loads_total", "RETRIEVE operations that ended well.", s.Loads)
	count("loads_failed_total", "RETRIEVE operations that failed.", s.LoadsFailed)
	count("loaded_bytes_total", "Bytes loaded.", s.LoadedBytes)
	count("registrations_total", "Registrations after the first.", s.Registrations)
	a.n.storeSeconds.Collect(ch)
	a.n.loadSeconds.Collect(ch)
}
