// SPDX-License-Identifier: Apache-2.0

package generation

import (
	"strconv"
	"strings"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// Stale reports whether an object is of an earlier generation, so that no server of the tier finds it any more: where
// the place names objects by models, the name has a generation, and elsewhere it is of a namespace that this server knew when
// a generation began. Objects that LMCache servers may have written are never stale.
func (b *Book) Stale(c tier.Content) bool {
	b.mu.RLock()
	defer b.mu.RUnlock()
	if c.Model == "" {
		return b.mu.stale[c.Key.Namespace]
	}
	model, all, own, ok := parseTag(c.Model)
	if !ok {
		return false
	}
	if now := b.mu.All; all != now {
		return all.Time < now.Time
	}
	now, known := b.mu.Models[model]
	if !known {
		base, _, _ := strings.Cut(model, "~") // a revision
		now = b.mu.Models[base]
	}
	return own.Time < now.Time
}

// HasStale reports whether a generation began, so that there can be stale objects.
func (b *Book) HasStale() bool { return !b.first() }

// outdateLocked notes the namespaces that tiers do not find any more when after follows before.
func (b *Book) outdateLocked(before, after *state) {
	note := func(ns kv.Namespace) {
		was, _, ok1 := b.ownIn(before, ns)
		is, _, ok2 := b.ownIn(after, ns)
		if ok1 && ok2 && was != is && len(b.mu.stale) < maxKnown {
			b.mu.stale[was] = true
		}
	}
	for _, ns := range b.mu.known {
		note(ns)
	}
	b.names.Each(func(ns kv.Namespace, n tier.Name) {
		if _, _, _, tagged := parseTag(n.Model); !tagged {
			note(ns)
		}
	})
}

// earliest is the least time of a generation, Unix ns. A smaller number behind a ~ belongs to the model's own name.
const earliest = 1_600_000_000_000_000_000

// parseTag reads MODEL~ALL, MODEL~ALL-OWN and MODEL~-OWN.
func parseTag(name string) (model string, all, own Generation, ok bool) {
	at := strings.LastIndexByte(name, '~')
	if at < 0 {
		return name, all, own, false
	}
	first, second, has := strings.Cut(name[at+1:], "-")
	ok = first != "" || has
	if first != "" {
		all, ok = parseGeneration(first)
	}
	if has && ok {
		own, ok = parseGeneration(second)
	}
	return name[:at], all, own, ok
}

func parseGeneration(text string) (g Generation, ok bool) {
	number, at, _ := strings.Cut(text, ".")
	n, err1 := strconv.ParseUint(number, 16, 64)
	t, err2 := strconv.ParseInt(at, 16, 64)
	g = Generation{n, t}
	return g, err1 == nil && err2 == nil && t >= earliest && g.String() == text
}
