// SPDX-License-Identifier: Apache-2.0

package redis

import (
	"context"
	"strings"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// RemoveIf implements tier.Emptying. In LMCache's layouts it also removes objects that LMCache servers wrote, if f accepts them.
func (t *Tier) RemoveIf(ctx context.Context, f func(tier.Content) bool, pace tier.Pace) (removed int, err error) {
	if err := t.topology.ask(ctx); err != nil {
		return 0, err
	}
	for _, s := range t.topology.all() {
		_, err := t.scanAs(ctx, s, t.pattern(), t.contentOf, func(names []string, contents []tier.Content) (bool, error) {
			var gone []string
			var keys []kv.Key
			for i, c := range contents {
				if f(c) {
					gone, keys = append(gone, names[i]), append(keys, c.Key)
				}
			}
			if len(gone) == 0 {
				return true, nil
			}
			if err := pace(ctx, len(gone)); err != nil {
				return false, err
			}
			removed += len(gone)
			if t.o.Layout == Native {
				return true, t.Delete(ctx, keys)
			}
			var queries []query
			for _, name := range gone {
				queries = unlink(queries, name, []string{name})
			}
			return true, t.ask(ctx, queries)
		})
		if err != nil {
			return removed, err
		}
	}
	return removed, nil
}

// pattern matches the names of objects.
func (t *Tier) pattern() string {
	if t.o.Layout == Native {
		return t.o.Prefix + "{*}"
	}
	return escapeGlob(t.before()) + "*"
}

// before is the prefix of LMCache's names.
func (t *Tier) before() string {
	if t.o.Prefix == "" {
		return ""
	}
	return t.o.Prefix + "@"
}

func escapeGlob(s string) string {
	return strings.NewReplacer("\\", "\\\\", "*", "\\*", "?", "\\?", "[", "\\[", "]", "\\]").Replace(s)
}

// contentOf returns the object whose first value has this name.
func (t *Tier) contentOf(name string) (tier.Content, bool) {
	if t.o.Layout == Native {
		k, ok := t.keyOf(name)
		return tier.Content{Key: k}, ok
	}
	inner, ok := strings.CutPrefix(name, t.before())
	if !ok {
		return tier.Content{}, false
	}
	n, k, ok := tier.ParseLMCache(inner)
	return tier.Content{Key: k, Model: n.Model}, ok
}
