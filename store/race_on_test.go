//go:build race

package store_test

const raceAllocs = 1 // of a lookup, by the race detector
