// SPDX-License-Identifier: Apache-2.0

// Package wire has the messages that the parts of MooncakeConnector exchange: those of the side channel between P and D, in the forms
// of vLLM 0.13 and of 0.16 to 0.33, the kv_transfer_params of requests and responses, and what a scheduler sends to its workers.
//
// It does no I/O, so a proxy can import it without sockets or a transfer engine. Its facts come from those releases; the vectors are in
// internal/testkit/testdata/mooncake-connector.
package wire
