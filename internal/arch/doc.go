// SPDX-License-Identifier: Apache-2.0

// Package arch has the rules for the repository's structure, as tests: which room (top-level directory) may import which, which
// packages may exist, and which form log lines must have. ARCHITECTURE.md shows the rooms.
package arch
