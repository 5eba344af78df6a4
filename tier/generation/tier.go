// SPDX-License-Identifier: Apache-2.0

package generation

import (
	"context"
	"crypto/sha256"
	"fmt"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// Moment returns how many times the generations have changed. Write refuses an object whose context has a smaller moment.
func (b *Book) Moment() uint64 {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return b.mu.moment
}

// own returns the namespace in the tier for the namespace ns, and the Moment for which it holds. It reports false if that namespace is not
// known, because some model has a generation of its own, and the model of ns was not named since the start.
func (b *Book) own(ns kv.Namespace) (kv.Namespace, uint64, bool) {
	b.mu.RLock()
	defer b.mu.RUnlock()
	moment := b.mu.moment
	own, tag, ok := b.ownIn(&b.mu.state, ns)
	if name, named := b.names.Of(ns); ok && named && tag != "" {
		b.names.Add(own, name.Kept()+"~"+tag, []byte(name.Salt))
	}
	return own, moment, ok
}

// ownIn is own for the generations of s, current or earlier ones. tag names the generation; it is empty before the first clear.
func (b *Book) ownIn(s *state, ns kv.Namespace) (own kv.Namespace, tag string, ok bool) {
	if s.isZero() {
		return ns, "", true
	}
	name, named := b.names.Of(ns)
	if !named && len(s.Models) > 0 {
		return ns, "", false
	}
	if g := s.All; g != (Generation{}) {
		tag = g.String()
	}
	if g := s.Models[name.Model]; named && g != (Generation{}) {
		tag += "-" + g.String()
	}
	if tag == "" {
		return ns, "", true
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "kvasir generation\x00%s%s", ns[:], tag))
	return kv.Namespace(sum[:len(ns)]), tag, true
}

// first reports whether no clear has happened yet.
func (b *Book) first() bool {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return b.mu.All == (Generation{}) && len(b.mu.Models) == 0
}

// key returns the key that the object k has in the tier, and the Moment for which it holds. It reports false if that key is not known: as
// own does, and while notReady.
func (b *Book) key(k kv.Key) (kv.Key, uint64, bool) {
	if b.notReady() {
		return k, 0, false
	}
	own, moment, ok := b.own(k.Namespace)
	if ok && own != k.Namespace {
		b.learn(own, k.Namespace, moment)
	}
	k.Namespace = own
	return k, moment, ok
}

// learn remembers that `own` is the namespace in the tier for ns, unless the generations have changed since moment.
func (b *Book) learn(own, ns kv.Namespace, moment uint64) {
	b.mu.RLock()
	_, ok := b.mu.known[own]
	b.mu.RUnlock()
	if ok {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.moment != moment {
		return
	}
	for other := range b.mu.known {
		if len(b.mu.known) < maxKnown {
			break
		}
		delete(b.mu.known, other)
	}
	b.mu.known[own] = ns
}

// Back returns the object's own key for a key in a tier. It reports false for an object of an
// earlier generation, and for an object whose namespace was not used since the start.
func (b *Book) Back(k kv.Key) (kv.Key, bool) {
	b.mu.RLock()
	ns, ok := b.mu.known[k.Namespace]
	b.mu.RUnlock()
	if ok {
		k.Namespace = ns
		return k, true
	}
	own, _, ok := b.own(k.Namespace)
	return k, ok && own == k.Namespace
}

// Tier returns a tier that finds in `of` only the objects of the present generations.
func (b *Book) Tier(of tier.Tier) *Tier { return &Tier{of, b} }

// Tier is a tier that finds only the objects of the present generations.
type Tier struct {
	of   tier.Tier
	book *Book
}

// Stat implements tier.Tier.
func (t *Tier) Stat(ctx context.Context, keys []kv.Key, metas []tier.Meta) error {
	t.book.syncIfStale(ctx)
	if t.book.notReady() {
		clear(metas[:len(keys)])
		return ctx.Err()
	}
	if t.book.first() {
		return t.of.Stat(ctx, keys, metas)
	}
	clear(metas[:len(keys)])
	own, at := make([]kv.Key, 0, len(keys)), make([]int, 0, len(keys))
	for i := range keys {
		if k, _, ok := t.book.key(keys[i]); ok {
			own, at = append(own, k), append(at, i)
		}
	}
	found := make([]tier.Meta, len(own))
	if len(own) == 0 {
		return ctx.Err()
	}
	if err := t.of.Stat(ctx, own, found); err != nil {
		return err
	}
	for i, to := range at {
		metas[to] = found[i]
	}
	return nil
}

// Read implements tier.Tier.
func (t *Tier) Read(ctx context.Context, k kv.Key, dst []byte) (tier.Meta, error) {
	own, _, ok := t.book.key(k)
	if !ok {
		return tier.Meta{}, tier.ErrMissing
	}
	return t.of.Read(ctx, own, dst)
}

// ReadSummed implements tier.Summing.
func (t *Tier) ReadSummed(ctx context.Context, k kv.Key, dst []byte) (tier.Meta, uint64, error) {
	own, _, ok := t.book.key(k)
	if !ok {
		return tier.Meta{}, 0, tier.ErrMissing
	}
	return tier.ReadSummed(ctx, t.of, own, dst)
}

// errClosed means that no generation is known.
var errClosed = fmt.Errorf("%w: the generation of the last clear is not known yet", tier.ErrResting)

// Write implements tier.Tier. It returns tier.ErrNotKept if a generation began since
// the moment of the context. While no generation is known it returns tier.ErrResting: the object can be written later,
// unless the generation that is found then is later than that of the server's start. In that case objects in memory may be older than a
// clear of another server, and the server forgets them.
func (t *Tier) Write(ctx context.Context, k kv.Key, m tier.Meta, src []byte) error {
	if t.book.notReady() {
		return errClosed
	}
	own, moment, ok := t.book.key(k)
	if was, said := tier.MomentOf(ctx); !ok || said && was != moment {
		return fmt.Errorf("%w: a clear began a new generation", tier.ErrNotKept)
	}
	return t.of.Write(ctx, own, m, src)
}

// Delete implements tier.Tier. While no generation is known it returns tier.ErrResting: the names of the objects are not known.
func (t *Tier) Delete(ctx context.Context, keys []kv.Key) error {
	if t.book.notReady() {
		return errClosed
	}
	var own []kv.Key
	for i := range keys {
		if k, _, ok := t.book.key(keys[i]); ok {
			own = append(own, k)
		}
	}
	if len(own) == 0 {
		return nil
	}
	return t.of.Delete(ctx, own)
}

// Hottest implements tier.Ranking. It leaves out objects of namespaces that were not used since the
// start and the last clear.
func (t *Tier) Hottest(ctx context.Context, n int, f func(kv.Key, tier.Meta) bool) error {
	if t.book.notReady() {
		return ctx.Err()
	}
	return tier.Hottest(ctx, t.of, n, func(own kv.Key, m tier.Meta) bool {
		k, ok := t.book.Back(own)
		return !ok || f(k, m)
	})
}

// Close implements tier.Tier.
func (t *Tier) Close() error { return t.of.Close() }
