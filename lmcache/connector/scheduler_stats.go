// SPDX-License-Identifier: Apache-2.0

package connector

import "sync/atomic"

type schedulerCounters struct {
	live                                atomic.Int64
	requests, polls, hits, hitTokens    atomic.Uint64
	retrieves, retrieveTokens           atomic.Uint64
	stores, storeTokens                 atomic.Uint64
	freedTokens, preempted, failedLoads atomic.Uint64
}

// SchedulerStats has the counts of a Scheduler since NewScheduler.
type SchedulerStats struct {
	Live           int    `gauge:"kvasir_connector_requests_live" help:"Requests that are tracked now."`
	Requests       uint64 `counter:"kvasir_connector_requests_total" help:"Requests begun; a preempted one counts again."`
	Polls          uint64 `counter:"kvasir_connector_lookup_polls_total" help:"Times a lookup's result was asked for; many per request mean a slow server."`
	Hits           uint64 `counter:"kvasir_connector_hits_total" help:"Requests with a hit in the cache."`
	HitTokens      uint64 `counter:"kvasir_connector_hit_tokens_total" help:"Tokens hit in the cache, the engine's own hits included."`
	Retrieves      uint64 `counter:"kvasir_connector_retrieves_total" help:"RETRIEVE operations given to the workers."`
	RetrieveTokens uint64 `counter:"kvasir_connector_retrieve_tokens_total" help:"Tokens of RETRIEVE operations."`
	Stores         uint64 `counter:"kvasir_connector_stores_total" help:"STORE operations given to the workers."`
	StoreTokens    uint64 `counter:"kvasir_connector_store_tokens_total" help:"Tokens of STORE operations."`
	FreedTokens    uint64 `counter:"kvasir_connector_freed_tokens_total" help:"Tokens that a lookup pinned and that were given back unused."`
	Preempted      uint64 `counter:"kvasir_connector_preempted_total" help:"Requests that began anew after a preemption."`
	FailedLoads    uint64 `counter:"kvasir_connector_failed_loads_total" help:"Requests whose load failed and that were computed instead."`
}

// Stats returns the counts. It may be called from any goroutine.
func (t *Scheduler) Stats() SchedulerStats {
	n := &t.n
	return SchedulerStats{
		Live: int(n.live.Load()), Requests: n.requests.Load(), Polls: n.polls.Load(), Hits: n.hits.Load(), HitTokens: n.hitTokens.Load(),
		Retrieves: n.retrieves.Load(), RetrieveTokens: n.retrieveTokens.Load(), Stores: n.stores.Load(), StoreTokens: n.storeTokens.Load(),
		FreedTokens: n.freedTokens.Load(), Preempted: n.preempted.Load(), FailedLoads: n.failedLoads.Load(),
	}
}
