// Package tracker is the scheduler's half of vLLM's LMCacheMPConnector: for each
// request of an engine it decides what to look up, what to load and what to
// store, and says so as operations for the engine's workers.
//
// A Tracker is a small state machine per request and does no I/O; what it asks of
// a cache goes through the interface Cache, none of whose methods waits.
// Scheduler is that interface over a server.
//
//	PREFETCHING → WAITING_FOR_LOAD → READY, or PREFETCHING → READY
//
// Source: the connector's class in vLLM 0.18 to 0.20 and 0.33.0; vectors in
// internal/vectors/testdata/lmcache-tracker. docs/lmcache-connector.md teaches
// the rules and lists the departures of Options.Corrected.
package tracker
