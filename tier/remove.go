// SPDX-License-Identifier: Apache-2.0

package tier

import (
	"context"
	"errors"

	"github.com/kvasir-kv/kvasir/kv"
)

// Content is what the name of an object in a tier says about the object.
type Content struct {
	Key   kv.Key // without a namespace if the tier names objects by models
	Model string // with its revision and generation; empty if the tier names objects by namespaces
}

// Emptying is a Tier that can remove objects by their names, also objects that Stat does not find.
type Emptying interface {
	// RemoveIf removes the objects for which f returns true, and calls pace before each removal of n objects. It returns how many
	// objects it removed. Error: ErrNoList.
	RemoveIf(ctx context.Context, f func(Content) bool, pace Pace) (removed int, err error)
}

// Pace waits until n more objects may be removed. An error ends the removal.
type Pace func(ctx context.Context, n int) error

// removeBatch is how many objects one call removes. removePass is how many keys are collected before they are removed.
const removeBatch, removePass = 256, 1 << 16

// RemoveIf removes the objects of a tier for which f returns true. Error: ErrNoList if the tier cannot list its objects.
func RemoveIf(ctx context.Context, t Tier, f func(Content) bool, pace Pace) (removed int, err error) {
	if e, ok := t.(Emptying); ok {
		return e.RemoveIf(ctx, f, pace)
	}
	l, ok := t.(Lister)
	if !ok {
		return 0, ErrNoList
	}
	for {
		var keys []kv.Key
		err := l.List(ctx, func(k kv.Key, _ Meta) bool {
			if f(Content{Key: k}) {
				keys = append(keys, k)
			}
			return len(keys) < removePass
		})
		if err != nil {
			return removed, err
		}
		for at := 0; at < len(keys); at += removeBatch {
			part := keys[at:min(at+removeBatch, len(keys))]
			if err := errors.Join(pace(ctx, len(part)), ctx.Err()); err != nil {
				return removed, err
			}
			if err := t.Delete(ctx, part); err != nil {
				return removed, err
			}
			removed += len(part)
		}
		if len(keys) < removePass {
			return removed, nil
		}
	}
}

// RemoveNamed calls pace and remove for each batch of names. removed is the number of names in batches that succeeded; the first error ends
// the loop. Implementations of Emptying call it.
func RemoveNamed(ctx context.Context, names []string, pace Pace, remove func(part []string) error) (removed int, err error) {
	for at := 0; at < len(names); at += removeBatch {
		part := names[at:min(at+removeBatch, len(names))]
		if err := errors.Join(pace(ctx, len(part)), ctx.Err()); err != nil {
			return removed, err
		}
		if err := remove(part); err != nil {
			return removed, err
		}
		removed += len(part)
	}
	return removed, nil
}
