// SPDX-License-Identifier: Apache-2.0

//go:build race

package transfer

// raceDetector means that this build has the race detector, which does not see vectored writes.
const raceDetector = true
