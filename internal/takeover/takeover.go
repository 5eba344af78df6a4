// SPDX-License-Identifier: Apache-2.0

// Package takeover waits for resources that a just killed process may still have: file locks (LockAfter) and
// listening addresses (ListenTCP).
package takeover
