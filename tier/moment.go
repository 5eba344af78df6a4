// SPDX-License-Identifier: Apache-2.0

package tier

import "context"

type momentKey struct{}

// AtMoment returns a context for a Write. moment is the value of generation.Book.Moment at the time when the store decided to write: a
// clear since then makes the Write fail.
func AtMoment(ctx context.Context, moment uint64) context.Context {
	return context.WithValue(ctx, momentKey{}, moment)
}

// MomentOf returns the moment of AtMoment. It reports false for a context without one.
func MomentOf(ctx context.Context) (uint64, bool) {
	m, ok := ctx.Value(momentKey{}).(uint64)
	return m, ok
}
