// SPDX-License-Identifier: Apache-2.0

// Package mooncake couples a prefill engine (P) and a decode engine (D) as vLLM's
// MooncakeConnector does: P pushes the KV blocks of a request straight into D's
// memory over the transfer engine, and D asks for the push over a side channel.
//
// It has the worker's half of the connector, which holds the KV memory: [Sender] answers pulls and pushes, [Receiver] pulls; an engine
// with the role kv_both has both over one transfer target. The other half, mooncake/scheduler, runs in the scheduler's process. It
// decides which blocks a request pulls, and which blocks stay after the request has ended.
//
//	D                                    P
//	Scheduler.Allocated → Metadata.Pulls  Scheduler.Finish → Metadata.Sends
//	Receiver ── GET /query ──> bootstrap <── POST /register ── Sender
//	Receiver ── pull {bases, block ids} ──> Sender: align, plan
//	region  <══ transfer.Write ══════════ Sender
//	Receiver <── {FINISH, ok, failed} ─── Sender
//
// This is the connector of vLLM 0.16 to 0.33. Its messages grew from release to release;
// wire.Release names one of them. Package v013 has the workers of 0.13, whose protocol
// differs. Facts are from those releases; the vectors are in
// internal/testkit/testdata/mooncake-connector.
//
// docs/how/mooncake.md draws the messages and states the time limits: which wait has which limit, and how each side learns of the end.
package mooncake
