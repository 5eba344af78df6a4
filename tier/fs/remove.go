// SPDX-License-Identifier: Apache-2.0

package fs

import (
	"context"

	"github.com/kvasir-kv/kvasir/tier"
)

// RemoveIf implements tier.Emptying.
func (d *Dir) RemoveIf(ctx context.Context, f func(tier.Content) bool, pace tier.Pace) (removed int, err error) {
	var names []string
	err = d.files(ctx, func(file File) bool {
		if f(tier.Content{Key: file.Key, Model: file.Object.Model}) {
			names = append(names, file.Name)
		}
		return true
	})
	if err != nil {
		return 0, err
	}
	return tier.RemoveNamed(ctx, names, pace, func(part []string) error {
		for _, name := range part {
			if err := d.Discard(name); err != nil {
				return err
			}
		}
		return nil
	})
}
