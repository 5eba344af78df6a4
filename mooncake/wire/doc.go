// SPDX-License-Identifier: Apache-2.0

// Package wire has what the parts of MooncakeConnector say to each other: the messages of
// the side channel between P and D in the forms of vLLM 0.13 and of 0.16 to 0.33, the
// kv_transfer_params of requests and responses, and what a scheduler sends its workers.
//
// It does no I/O, so a proxy can import it without sockets or a transfer engine. Facts are
// from those releases; vectors in internal/testkit/testdata/mooncake-connector.
package wire
