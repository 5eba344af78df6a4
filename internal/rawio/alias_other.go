//go:build !linux

package rawio

// SlowCopy says whether the kernel copies b slowly; see alias_linux.go.
func SlowCopy(int, []byte) bool { return false }
