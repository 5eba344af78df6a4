//go:build !linux

package bench

func prepare([]byte) {}
