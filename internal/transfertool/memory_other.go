//go:build !linux

package transfertool

func prepare([]byte) {}
