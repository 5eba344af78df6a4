// SPDX-License-Identifier: Apache-2.0

package generation

import (
	"strconv"
	"strings"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// Stale reports whether an object is of an earlier generation, so that no server of the tier finds it any more. If
// the tier names objects by models, the generation in the name decides. Otherwise only objects of namespaces that this server knew when
// a generation began are stale. Objects that LMCache servers may have written are never stale.
func (b *Book) Stale(c tier.Content) bool {
	if c.Model == "" && b.hasBegun() {
		b.outdate()
	}
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
		base, _, _ := strings.Cut(model, "~") // cut off a revision
		now = b.mu.Models[base]
	}
	return own.Time < now.Time
}

func (b *Book) hasBegun() bool {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return len(b.mu.begun) > 0
}

// HasStale reports whether a generation began, so that there can be stale objects.
func (b *Book) HasStale() bool { return !b.first() }

// begun is one change of the generations that count.
type begun struct {
	before, after state
	known         map[kv.Namespace]kv.Namespace // Book.mu.known before the change
}

// outdate adds to stale the namespaces that tiers no longer find since generations began. A clear does not call it, because there may be
// many such namespaces, and lookups wait for a clear. The first question about stale objects calls it.
func (b *Book) outdate() {
	b.outdating.Lock()
	defer b.outdating.Unlock()
	for _, g := range b.takeBegun() {
		b.addStale(b.earlier(&g))
	}
}

// catchUp calls outdate if half of maxBegun generations have begun since it ran: after many clears in a row begun would lose the first.
func (b *Book) catchUp() {
	b.mu.RLock()
	many := len(b.mu.begun) >= maxBegun/2
	b.mu.RUnlock()
	if many {
		b.outdate()
	}
}

func (b *Book) takeBegun() []begun {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := b.mu.begun
	b.mu.begun = nil
	return all
}

// earlier returns the namespaces in tiers before the change g, of those objects whose namespace in tiers changed.
func (b *Book) earlier(g *begun) (out []kv.Namespace) {
	note := func(ns kv.Namespace) {
		was, _, ok1 := b.ownIn(&g.before, ns)
		is, _, ok2 := b.ownIn(&g.after, ns)
		if ok1 && ok2 && was != is {
			out = append(out, was)
		}
	}
	b.names.Each(func(ns kv.Namespace, n tier.Name) {
		if _, _, _, tagged := parseTag(n.Model); !tagged {
			note(ns)
		}
	})
	for _, ns := range g.known {
		note(ns)
	}
	return out
}

// addStale adds namespaces to stale. If there are too many, it drops the oldest, whose objects were removed long ago.
func (b *Book) addStale(list []kv.Namespace) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, ns := range list {
		if b.mu.stale[ns] {
			continue
		}
		if len(b.mu.order) == maxKnown {
			delete(b.mu.stale, b.mu.order[0])
			b.mu.order = b.mu.order[1:]
		}
		b.mu.stale[ns] = true
		b.mu.order = append(b.mu.order, ns)
	}
}

// earliest is the least time of a generation, Unix ns. A smaller number after a ~ belongs to the model's own name.
const earliest = 1_600_000_000_000_000_000

// parseTag splits the name of a model in a tier, MODEL~ALL, MODEL~ALL-OWN or MODEL~-OWN, into the model and the generations of all models
// and of its own. ok is false for a name without generations.
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
