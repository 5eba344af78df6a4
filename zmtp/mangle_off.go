//go:build !invariants

package zmtp

// mangleLent is false: frames are left as they are after the handler returned.
const mangleLent = false
