// SPDX-License-Identifier: Apache-2.0

// Package coordinator decides prefix hits of models that mix attention kinds.
//
// Layers of one kind form a group, and each group needs other blocks of a
// prefix to continue from it: full attention all of them, a sliding window the
// last few, Mamba one state. A stored prefix is a hit of n tokens only when
// every group can continue at n. A Coordinator is built once per model from a
// [Layout] and answers four questions:
//
//   - [Coordinator.Hit]: how many leading tokens can be loaded;
//   - [Coordinator.LoadMask]: which blocks of each group such a load moves;
//   - [Coordinator.StoreMask]: which blocks of each group are worth storing;
//   - [Coordinator.LookupMask]: which blocks of each group a hit can end on.
//
// What the store holds comes in as a [Presence]: [Runs],
// or [Remote] over a store that is asked in batches. Masks come out as
// [Mask], a few numbers however long the prompt is. So a call costs time in the
// number of runs of present blocks, not in blocks, and allocates nothing once
// the caller's [Result] or slice has grown to the number of groups.
//
// It follows vLLM's MooncakeStoreCoordinator where that is right. A [Release] repeats
// a published version to the letter; recorded decisions of both are in
// internal/testkit.
//
// The package is pure: no I/O, no clock, no goroutine, no lock. A Coordinator
// is immutable and safe for concurrent use; a Result, a Remote and a set being
// written to belong to one goroutine.
package coordinator
