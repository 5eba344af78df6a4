// SPDX-License-Identifier: Apache-2.0

// Package arch holds the rules of the repository's structure, as tests: which room may import which, which packages
// may be, and how log lines look. ARCHITECTURE.md shows the rooms.
package arch
