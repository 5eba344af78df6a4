// SPDX-License-Identifier: Apache-2.0

// Package v013 is the worker's half of the MooncakeConnector of vLLM 0.13.
//
// That connector knows no transfer ids and no bootstrap server. Both engines know a request by the same id. P's answer to the proxy
// names the side channel of P's TP rank 0. D asks there, in one pull, for all requests of one engine step. One answer, trans_done or
// trans_error, ends the pull. Memory is a list of base addresses; block sizes are not sent.
//
// The scheduler's half is [github.com/kvasir-kv/kvasir/mooncake/scheduler] with RequestIDs.
// vLLM 0.14 and 0.15 speak the same protocol but cannot pair, not even with themselves:
// they append random characters to request ids.
//
// Source: MooncakeConnector of vLLM 0.13.0; vectors in
// internal/testkit/testdata/mooncake-connector.
package v013
