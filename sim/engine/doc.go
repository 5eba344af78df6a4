// SPDX-License-Identifier: Apache-2.0

// Package engine is a simulated vLLM engine: it schedules as vLLM does, has real KV bytes in paged memory, and uses the real
// connectors. Only the model is missing: the KV of a token follows from the tokens before it (package sim/kvmem), and so does the next
// token.
//
// Whatever KV a request gets, from the prefix cache, another engine or a cache server, is compared byte for byte before it is used. A
// wrong byte fails the request.
//
// An Engine runs one goroutine for its steps; the connectors have their own for transfers.
package engine
