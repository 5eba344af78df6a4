// SPDX-License-Identifier: Apache-2.0

// Package transfer moves bytes between the memories of two processes on
// Mooncake's transfer engine wire over TCP (P2PHANDSHAKE mode), as the target
// of reads and writes and as their initiator.
//
// A [Target] publishes regions: byte slices, or ranges answered by callbacks, each under a base address that is a name and not a
// pointer. Peers write into regions and read from them without asking their owner. Before the owner reuses memory, it fences that
// memory: when [Table.Fence] returns, no write can touch the ranges any more.
//
// A [Client] writes into targets and reads from them, ours and the C++ engine's, in batches with a result per entry. It merges
// neighbouring entries and keeps many requests in flight on a few connections per peer. A call returns only when it touches no memory
// any more; an entry of which the peer may still apply bytes has the error [ErrUnsettled].
//
// Framing follows Mooncake 0.3.7 to 0.3.13; docs/how/transfer.md draws it.
// Lock order: Client.mu before peer.mu, Table.mu before claims.mu; peer.mu,
// claims.mu, Target.mu and job.mu are leaves.
package transfer
