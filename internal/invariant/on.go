// SPDX-License-Identifier: Apache-2.0

//go:build invariants

package invariant

// Enabled is true in builds with -tags invariants.
const Enabled = true
