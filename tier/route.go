// SPDX-License-Identifier: Apache-2.0

package tier

import (
	"context"
	"errors"

	"github.com/kvasir-kv/kvasir/kv"
)

// Routing is a Tier that stores each object in one of several tiers.
type Routing struct {
	tiers []Tier
	pick  func(kv.Key) int
}

// Route makes one Tier of several: an object is stored in tiers[pick(its key)]. pick must always
// return the same index for a key. With an index out of range the object is stored nowhere.
func Route(pick func(kv.Key) int, tiers ...Tier) *Routing { return &Routing{tiers, pick} }

// of returns the tier of an object, nil for none.
func (r *Routing) of(k kv.Key) Tier {
	if i := r.pick(k); i >= 0 && i < len(r.tiers) {
		return r.tiers[i]
	}
	return nil
}

// split returns the keys of each tier, and their indices in keys.
func (r *Routing) split(keys []kv.Key) (of [][]kv.Key, at [][]int) {
	of, at = make([][]kv.Key, len(r.tiers)), make([][]int, len(r.tiers))
	for j, k := range keys {
		if i := r.pick(k); i >= 0 && i < len(r.tiers) {
			of[i], at[i] = append(of[i], k), append(at[i], j)
		}
	}
	return of, at
}

// Stat implements Tier. A tier that fails counts as empty. If all tiers that were asked fail, Stat
// returns their errors.
func (r *Routing) Stat(ctx context.Context, keys []kv.Key, metas []Meta) error {
	clear(metas[:len(keys)])
	var errs []error
	asked := 0
	of, at := r.split(keys)
	for i, t := range r.tiers {
		if len(of[i]) == 0 {
			continue
		}
		asked++
		found := make([]Meta, len(of[i]))
		if err := t.Stat(ctx, of[i], found); err != nil {
			errs = append(errs, err)
			continue
		}
		for j, to := range at[i] {
			metas[to] = found[j]
		}
	}
	if asked > 0 && len(errs) == asked {
		return errors.Join(errs...)
	}
	return ctx.Err()
}

// Read implements Tier.
func (r *Routing) Read(ctx context.Context, k kv.Key, dst []byte) (Meta, error) {
	if t := r.of(k); t != nil {
		return t.Read(ctx, k, dst)
	}
	return Meta{}, ErrMissing
}

// ReadSummed implements Summing.
func (r *Routing) ReadSummed(ctx context.Context, k kv.Key, dst []byte) (Meta, uint64, error) {
	if t := r.of(k); t != nil {
		return ReadSummed(ctx, t, k, dst)
	}
	return Meta{}, 0, ErrMissing
}

// Write implements Tier.
func (r *Routing) Write(ctx context.Context, k kv.Key, m Meta, src []byte) error {
	if t := r.of(k); t != nil {
		return t.Write(ctx, k, m, src)
	}
	return ErrNotKept
}

// Delete implements Tier.
func (r *Routing) Delete(ctx context.Context, keys []kv.Key) error {
	var errs []error
	of, _ := r.split(keys)
	for i, t := range r.tiers {
		if len(of[i]) > 0 {
			errs = append(errs, t.Delete(ctx, of[i]))
		}
	}
	return errors.Join(errs...)
}

// List implements Lister.
func (r *Routing) List(ctx context.Context, f func(kv.Key, Meta) bool) error {
	more := true
	for _, t := range r.tiers {
		if !more {
			break
		}
		if err := list(ctx, t, func(k kv.Key, m Meta) bool { more = f(k, m); return more }); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// Close implements Tier.
func (r *Routing) Close() error { return closeAll(r.tiers) }
