// SPDX-License-Identifier: Apache-2.0

// Package arch has the rules of the repository's structure, as tests: which room may import which, which packages
// may exist, and the form of log lines. ARCHITECTURE.md shows the rooms.
package arch
