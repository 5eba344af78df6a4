// SPDX-License-Identifier: Apache-2.0

package tier

import "context"

type useKey struct{}

// WithoutUse returns a context for calls that are no use of an object: a place that evicts what is used least keeps what it knows of the
// object's use, also when a Write replaces it.
func WithoutUse(ctx context.Context) context.Context { return context.WithValue(ctx, useKey{}, true) }

// IsUse reports whether a call with this context is a use of its object.
func IsUse(ctx context.Context) bool { return ctx.Value(useKey{}) == nil }
