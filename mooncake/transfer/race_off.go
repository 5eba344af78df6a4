//go:build !race

package transfer

const raceDetector = false
