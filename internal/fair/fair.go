// SPDX-License-Identifier: Apache-2.0

// Package fair divides what is limited among users and addresses. With Shares each may have half of what the others leave;
// with Turns each has its turn.
package fair
