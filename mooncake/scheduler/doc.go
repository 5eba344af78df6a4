// SPDX-License-Identifier: Apache-2.0

// Package scheduler is the scheduler's half of vLLM's MooncakeConnector: it decides what
// a request pulls from P, which blocks P keeps for D, and what the workers do at each
// engine step. It does no I/O; the workers are in package mooncake.
//
// docs/how/mooncake-scheduler.md shows the calls of a request's life.
package scheduler
