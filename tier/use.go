// SPDX-License-Identifier: Apache-2.0

package tier

import "context"

type useKey struct{}

// WithoutUse returns a context for calls that do not count as a use of an object. A tier that evicts the least used objects must not change
// the object's record of uses, even when a Write replaces the object.
func WithoutUse(ctx context.Context) context.Context { return context.WithValue(ctx, useKey{}, true) }

// IsUse reports whether a call with this context is a use of its object.
func IsUse(ctx context.Context) bool { return ctx.Value(useKey{}) == nil }
