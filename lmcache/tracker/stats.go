package tracker

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

type counters struct {
	live                                atomic.Int64
	requests, polls, hits, hitTokens    atomic.Uint64
	retrieves, retrieveTokens           atomic.Uint64
	stores, storeTokens                 atomic.Uint64
	freedTokens, preempted, failedLoads atomic.Uint64
}

// Stats counts since New.
type Stats struct {
	Live           int    // requests tracked now
	Requests       uint64 // requests begun, preempted ones once more
	Polls          uint64 // times a lookup's result was asked for
	Hits           uint64 // requests with a hit
	HitTokens      uint64
	Retrieves      uint64 // operations emitted
	RetrieveTokens uint64
	Stores         uint64
	StoreTokens    uint64
	FreedTokens    uint64 // whose pins were given back unused
	Preempted      uint64 // requests that began anew after a preemption
	FailedLoads    uint64
}

// Stats returns the counts. It may be called from any goroutine.
func (t *Tracker) Stats() Stats {
	n := &t.n
	return Stats{
		Live: int(n.live.Load()), Requests: n.requests.Load(), Polls: n.polls.Load(), Hits: n.hits.Load(), HitTokens: n.hitTokens.Load(),
		Retrieves: n.retrieves.Load(), RetrieveTokens: n.retrieveTokens.Load(), Stores: n.stores.Load(), StoreTokens: n.storeTokens.Load(),
		FreedTokens: n.freedTokens.Load(), Preempted: n.preempted.Load(), FailedLoads: n.failedLoads.Load(),
	}
}

// Describe implements prometheus.Collector as an unchecked collector.
func (t *Tracker) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector. It may be called from any goroutine.
func (t *Tracker) Collect(ch chan<- prometheus.Metric) {
	s := t.Stats()
	emit := func(kind prometheus.ValueType, name, help string, v float64) {
		ch <- prometheus.MustNewConstMetric(prometheus.NewDesc("kvasir_tracker_"+name, help, nil, nil), kind, v)
	}
	count := func(name, help string, v uint64) { emit(prometheus.CounterValue, name, help, float64(v)) }
	emit(prometheus.GaugeValue, "requests_live", "Requests tracked now.", float64(s.Live))
	count("requests_total", "Requests begun; a preempted one counts again.", s.Requests)
	count("lookup_polls_total", "Times a lookup's result was asked for.", s.Polls)
	count("hits_total", "Requests with a hit in the cache.", s.Hits)
	count("hit_tokens_total", "Tokens hit in the cache.", s.HitTokens)
	count("retrieves_total", "RETRIEVE operations.", s.Retrieves)
	count("retrieve_tokens_total", "Tokens of RETRIEVE operations.", s.RetrieveTokens)
	count("stores_total", "STORE operations.", s.Stores)
	count("store_tokens_total", "Tokens of STORE operations.", s.StoreTokens)
	count("freed_tokens_total", "Tokens pinned by a lookup and given back unused.", s.FreedTokens)
	count("preempted_total", "Requests that began anew after a preemption.", s.Preempted)
	count("failed_loads_total", "Requests whose load failed.", s.FailedLoads)
}
