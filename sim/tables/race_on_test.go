//go:build race

package tables_test

const raceDetector = true
