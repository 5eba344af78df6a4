//go:build !race

package store_test

const raceAllocs = 0
