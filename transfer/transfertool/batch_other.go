//go:build !linux

package transfertool

// scheduleBatch does nothing: there is no such policy.
func scheduleBatch() error { return nil }
