// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/server/workers"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/evict"
	"github.com/kvasir-kv/kvasir/store/hitcurve"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/adapter"
)

// tiersOf returns the tiers with their limits, for the estimate of hit rates.
func tiersOf(list []*tier.Counting) (out []hitcurve.Tier) {
	for _, t := range list {
		out = append(out, hitcurve.Tier{Name: t.Name(), Bytes: max(t.Stats().Limit, 0)})
	}
	return out
}

// readableNote returns an error if a later release wrote the pool's note of registrations: this release would overwrite that note.
func readableNote(o pool.Options) error {
	path, err := shm.Path(o.Dir, o.Name)
	if err != nil || o.Cold {
		return nil // pool.Open reports what is wrong with the name
	}
	b, err := shm.Read(path+pool.NoteSuffix, pool.MaxNote)
	if err != nil {
		return nil // there is no note, or it is not used
	}
	if _, err := workers.DecodeNote(b); errors.Is(err, workers.ErrNewer) {
		return fmt.Errorf("%s: %w: start the release that wrote it, or start with --cold to discard the pool", path+pool.NoteSuffix, err)
	}
	return nil
}

// openStore opens the tiers and the pool. It refuses a pool that this process may not use before it opens or resizes anything.
func (c *serverCmd) openStore(o *serverOptions) (_ *store.Store, err error) {
	if err := fitsLimit("/", "--l1-size-gb", c.L1SizeGB); err != nil {
		return nil, err
	}
	if len(o.tiers.Adapters)+len(o.tiers.Disk.Dirs) > 0 {
		o.tiers.Names = tier.NewNames()
		o.tiers.Names.SetRevisions(o.server.Revisions)
	}
	below, err := adapter.Open(o.tiers)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil && below.Tier != nil {
			err = errors.Join(err, below.Tier.Close())
		}
	}()
	if err := readableNote(o.pool); err != nil {
		return nil, err
	}
	p, err := pool.Open(o.pool)
	if err != nil {
		return nil, explainPool(err, "--shm-name or --port")
	}
	if o.store.Policy, err = evict.New(c.policyName(), p.Bytes()); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	o.server.Lifetimes = evict.NewLifetimes()
	o.store.Policy = o.server.Lifetimes.Watch(o.store.Policy)
	o.store.TenantPolicy = func(quota int64) evict.Policy {
		policy, _ := evict.New(c.policyName(), max(quota, p.Bytes()/64)) // the name was checked
		return o.server.Lifetimes.Watch(policy)
	}
	o.store.Curves = &hitcurve.Options{Policy: c.policyName(), Tiers: tiersOf(below.Each)}
	if err = c.openGenerations(o, below); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	o.store.Place = below.Place
	if below.Disk != nil {
		o.store.BelowOpened = below.Disk.Opened()
	}
	o.server.ProbeTiers = below.Probe
	o.server.Names, o.server.Tiers, o.server.Disk, o.server.Clusters, o.server.Contents = o.tiers.Names, below.Each, below.Disk, below.Clusters, below.Contents
	o.server.Numbers, o.server.Seals, c.tierKeys = below.Numbers, below.Seals, below.Keys
	st := store.New(p, o.store)
	if book := o.server.Generations; book != nil {
		if err := book.Repair(); err != nil {
			o.store.Log.Warn("the generations that the tiers have cannot be written to a file", "err", err)
		}
	}
	if err = c.terms.Apply(st); err != nil {
		below.Tier = nil // the store closes the tiers
		return nil, errors.Join(err, st.Close())
	}
	return st, nil
}
