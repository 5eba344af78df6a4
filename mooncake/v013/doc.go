// SPDX-License-Identifier: Apache-2.0

// Package v013 is the worker's half of MooncakeConnector as vLLM 0.13 has it.
//
// That connector knows no transfer ids and no bootstrap server. Both engines know a request
// by the same id. P's answer to the proxy names the side channel of its TP rank 0, D asks
// there for all requests of one engine step in one pull, and one answer, trans_done or
// trans_error, ends it. Memory is a list of base addresses; block sizes are not sent.
//
// The scheduler's half is [github.com/kvasir-kv/kvasir/mooncake/scheduler] with RequestIDs.
// vLLM 0.14 and 0.15 speak the same protocol but cannot pair, not even with themselves:
// they append random characters to request ids.
//
// Source: MooncakeConnector of vLLM 0.13.0; vectors in
// internal/testkit/testdata/mooncake-connector.
package v013
