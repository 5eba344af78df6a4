//go:build invariants

package zmtp

// mangleLent overwrites frames once the handler that borrowed them returned.
const mangleLent = true
