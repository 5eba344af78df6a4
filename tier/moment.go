// SPDX-License-Identifier: Apache-2.0

package tier

import "context"

type momentKey struct{}

// AtMoment returns a context that says when a Write was decided: at which moment of
// generation.Book.
func AtMoment(ctx context.Context, moment uint64) context.Context {
	return context.WithValue(ctx, momentKey{}, moment)
}

// MomentOf returns what AtMoment was given; false where nothing was.
func MomentOf(ctx context.Context) (uint64, bool) {
	m, ok := ctx.Value(momentKey{}).(uint64)
	return m, ok
}
