// SPDX-License-Identifier: Apache-2.0

// Package connector is the engine's side of LMCache: what vLLM's LMCacheMPConnector
// does in an engine's scheduler and in its workers.
//
// A Scheduler decides for each request what to look up, load and store, and returns this as operations for the workers. It does no I/O: it
// asks a cache through the interface Cache, none of whose methods waits. ServerCache implements this interface with a server.
//
//	PREFETCHING → WAITING_FOR_LOAD → READY, or PREFETCHING → READY
//
// A Worker carries out the operations on one worker's paged KV. It copies chunks in and out of the server's shared-memory pool with a
// PoolClient, which registers the worker, maps the pool and does the copies.
//
// Source: the connector's class in vLLM 0.18 to 0.20 and 0.33.0; vectors in
// internal/testkit/testdata/lmcache-tracker. docs/how/lmcache-connector.md teaches the
// rules and lists where published releases differ.
package connector
