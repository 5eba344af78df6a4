// SPDX-License-Identifier: Apache-2.0

//go:build race

package transfer

// raceDetector says that this build has the race detector, which does not know of
// vectored writes.
const raceDetector = true
