// SPDX-License-Identifier: Apache-2.0

// Package scheduler is the scheduler's half of vLLM's MooncakeConnector: it decides which tokens a request pulls from P, which blocks P
// keeps for D, and what the workers do at each engine step. It does no I/O; the workers' half is package mooncake.
//
// docs/how/mooncake-scheduler.md shows which methods are called in the life of a request.
package scheduler
