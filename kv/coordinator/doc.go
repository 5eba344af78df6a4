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
// The caller says what the store has with a [Presence]: [Runs], or [Remote] for a
// store that answers in batches. A [Mask] in the answer is a few numbers, however long
// the prompt is. So the time of a call grows with the number of runs of present
// blocks, not with the number of blocks. A call allocates nothing once the caller's
// [Result] or slice has grown to the number of groups.
//
// The rules follow vLLM's MooncakeStoreCoordinator, without its defects. With a [Release]
// a Coordinator repeats a published version of vLLM, defects included. Decisions recorded
// from these versions are test vectors (internal/testkit).
//
// The package is pure: no I/O, no clock, no goroutine, no lock. A Coordinator
// is immutable and safe for concurrent use. One goroutine owns a Result, a Remote, and
// Runs that are being written.
package coordinator
