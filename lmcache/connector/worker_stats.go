// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/histogram"
	"github.com/kvasir-kv/kvasir/lmcache"
)

type workerCounters struct {
	stores, storesFailed, storesDropped atomic.Uint64
	loads, loadsFailed                  atomic.Uint64
	storedBytes, loadedBytes            atomic.Uint64
	merged, registrations               atomic.Uint64
	storeTimes, loadTimes               *histogram.Histogram
}

// observe counts an operation that was carried out.
func (n *workerCounters) observe(j *job, ok bool, d time.Duration) {
	switch {
	case j.Direction == lmcache.Store && ok:
		n.stores.Add(1)
		n.storeTimes.Took(d)
	case j.Direction == lmcache.Store:
		n.storesFailed.Add(1)
	case ok:
		n.loads.Add(1)
		n.loadTimes.Took(d)
	default:
		n.loadsFailed.Add(1)
	}
}

// WorkerStats has the counts of a Worker since OpenWorker.
type WorkerStats struct {
	Healthy       bool             `gauge:"kvasir_connector_worker_healthy" help:"1 while the server is believed to serve this worker."`
	Queued        int              `gauge:"kvasir_connector_worker_queued" help:"Operations that wait."`
	Running       int              `gauge:"kvasir_connector_worker_running" help:"Operations in progress."`
	Stores        uint64           `counter:"kvasir_connector_worker_stores_total" help:"STORE operations that ended well; merged ones count once."`
	StoresFailed  uint64           `counter:"kvasir_connector_worker_stores_failed_total" help:"STORE operations that were tried and failed."`
	StoresDropped uint64           `counter:"kvasir_connector_worker_stores_dropped_total" help:"STORE operations that were not tried: unhealthy server, full queue, refused."`
	StoredBytes   uint64           `counter:"kvasir_connector_worker_stored_bytes_total" help:"Bytes copied into the pool."`
	Loads         uint64           `counter:"kvasir_connector_worker_loads_total" help:"RETRIEVE operations that ended well."`
	LoadsFailed   uint64           `counter:"kvasir_connector_worker_loads_failed_total" help:"RETRIEVE operations that failed, tried or not."`
	LoadedBytes   uint64           `counter:"kvasir_connector_worker_loaded_bytes_total" help:"Bytes copied out of the pool."`
	Merged        uint64           `counter:"kvasir_connector_worker_stores_merged_total" help:"STORE operations that joined the one before them."`
	Registrations uint64           `counter:"kvasir_connector_worker_registrations_total" help:"Registrations after the first: the server was new or had forgotten the worker."`
	StoreTimes    histogram.Counts `histogram:"kvasir_connector_worker_store_duration_seconds" help:"Time of STORE operations that ended well, copying included."`
	LoadTimes     histogram.Counts `histogram:"kvasir_connector_worker_load_duration_seconds" help:"Time of RETRIEVE operations that ended well, copying included."`
	EventsLost    int              // since the last call of Events
}

// Stats returns the counts.
func (a *Worker) Stats() WorkerStats {
	n := &a.n
	s := WorkerStats{
		Healthy: a.Healthy(),
		Stores:  n.stores.Load(), StoresFailed: n.storesFailed.Load(), StoresDropped: n.storesDropped.Load(), StoredBytes: n.storedBytes.Load(),
		Loads: n.loads.Load(), LoadsFailed: n.loadsFailed.Load(), LoadedBytes: n.loadedBytes.Load(),
		Merged: n.merged.Load(), Registrations: n.registrations.Load(), StoreTimes: n.storeTimes.Counts(), LoadTimes: n.loadTimes.Counts(),
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	s.Queued, s.Running, s.EventsLost = len(a.mu.queue), len(a.mu.running), a.mu.lost
	return s
}
