// SPDX-License-Identifier: Apache-2.0

// Package takeover waits for resources that a process killed a moment ago may still hold: file locks (LockAfter) and listening
// addresses (ListenTCP).
package takeover
