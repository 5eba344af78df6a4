// SPDX-License-Identifier: Apache-2.0

// Package takeover takes what a process that was just killed may still hold: the locks of files (LockAfter) and the
// addresses that it listened on (ListenTCP).
package takeover
