// Package mooncake couples a prefill engine (P) and a decode engine (D) as vLLM's
// MooncakeConnector does: P pushes the KV blocks of a request straight into D's
// memory over the transfer engine, and D asks for the push over a side channel.
//
// It has both halves of the connector. [Scheduler] decides, in the scheduler's
// process, what a request pulls and which blocks outlive it. A worker holds the
// KV memory: [Sender] answers pulls and pushes, [Receiver] pulls; an engine with
// the role kv_both has both over one transfer target.
//
//	D                                    P
//	Scheduler.Allocated → Metadata.Pulls  Scheduler.Finish → Metadata.Sends
//	Receiver ── GET /query ──> bootstrap <── POST /register ── Sender
//	Receiver ── pull {bases, block ids} ──> Sender: align, plan
//	region  <══ transfer.Write ══════════ Sender
//	Receiver <── {FINISH, ok, failed} ─── Sender
//
// Two dialects exist. V1 is the connector of vLLM 0.13 to 0.15, V2 that of 0.16 to
// 0.33, which grew; Release names a point of it. Facts are from those releases;
// vectors in internal/vectors/testdata/mooncake-connector.
//
// docs/mooncake.md draws the messages and states the rules of time: what waits for
// what, how long, and who is told.
package mooncake
