// SPDX-License-Identifier: Apache-2.0

// Package proxy stands in front of engines: it sends each request of the OpenAI API to one
// engine, or, where prefill and decode are apart, to a prefill engine (P) and a decode engine
// (D) at the same time.
//
//	client ── request ──> proxy ── do_remote_decode, transfer id, one token ──> P
//	                        └───── do_remote_prefill, P's engine id ─────────> D
//	client <── D's answer ── proxy                            D <══ KV ══ P
//
// Until the first byte of the answer, the proxy can repeat a request at other engines; after that byte the client gets D's answer. A
// client that leaves ends the request at both engines. P's registry names P's current engine id, so that the proxy finds a restarted P,
// and nothing else must be restarted.
//
// docs/operate/proxy.md has the rules. Source of the dialect: MooncakeConnector of vLLM 0.16 to 0.33.
package proxy
