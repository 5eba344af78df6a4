// SPDX-License-Identifier: Apache-2.0

// Package fair divides limited resources among users and addresses. With Shares, each of them may have half of what the others leave.
// With Turns, they take turns.
package fair
