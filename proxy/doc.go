// SPDX-License-Identifier: Apache-2.0

// Package proxy stands in front of engines: it sends each request of the OpenAI API to one
// engine, or, where prefill and decode are apart, to a prefill engine (P) and a decode engine
// (D) at the same time.
//
//	client ── request ──> proxy ── do_remote_decode, transfer id, one token ──> P
//	                        └───── do_remote_prefill, P's engine id ─────────> D
//	client <── D's answer ── proxy                            D <══ KV ══ P
//
// Until the first byte of the answer a request is tried again with other engines; after it, what
// D says is what the client hears. A client that leaves ends the request at both engines. Which
// engine P is now, its registry says: a P that is started again is found without a restart of
// anything else.
//
// docs/operate/proxy.md has the rules. Source of the dialect: MooncakeConnector of vLLM 0.16 to 0.33.
package proxy
