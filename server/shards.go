package server

import (
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store"
)

// modelLayouts is what the registry knows of one model and world size: who is
// registered, and which layout the worker of each shard has.
//
// A registration does not say which shard its worker keeps; transfers do. The
// workers of a pipeline's stages hold unlike numbers of layers, so each shard is
// looked up under the layout of its own worker.
type modelLayouts struct {
	workers []*instance // newest last
	shards  []shardLayout
}

// shardLayout is the layout of a shard's newest worker that transferred anything.
type shardLayout struct {
	fingerprint string // empty while no worker did
	seq         uint64 // of that worker's registration
}

// newest is the worker that registered last.
func (m *modelLayouts) newest() *instance { return m.workers[len(m.workers)-1] }

// fits reports whether a registered worker has that layout, and can be looked up
// together with in: its object groups follow the same rules. Else a hit would be what
// one of them cannot load.
func (m *modelLayouts) fits(fingerprint string, in *instance) bool {
	for _, o := range m.workers {
		if o.fingerprint == fingerprint {
			return o.groups().Like(in.groups())
		}
	}
	return false
}

// groups returns the worker's object groups; nil is one of full attention.
func (in *instance) groups() *store.Groups {
	if in.driven == nil {
		return nil
	}
	return in.driven.groups
}

// learn notes that in keeps that shard. A worker that registered before the one
// that is known changes nothing: lookups follow the newer engine.
func (m *modelLayouts) learn(in *instance, shard int) {
	if shard < 0 || shard >= in.world {
		return
	}
	if m.shards == nil {
		m.shards = make([]shardLayout, in.world)
	}
	if in.seq >= m.shards[shard].seq {
		m.shards[shard] = shardLayout{in.fingerprint, in.seq}
	}
}

// fingerprints returns the layout of each shard, or one for all: the one that is
// known, as long as a registered worker has it that fits and the newest registration is of
// a known layout too; else that of the newest registration.
func (m *modelLayouts) fingerprints() []string {
	newest := m.newest().fingerprint
	known, unlike := false, false
	for i := range m.shards {
		fp := m.shards[i].fingerprint
		known = known || fp == newest
		unlike = unlike || fp != "" && fp != newest
	}
	if !known || !unlike {
		return []string{newest}
	}
	out := make([]string, len(m.shards))
	for i := range m.shards {
		if out[i] = m.shards[i].fingerprint; !m.fits(out[i], m.newest()) {
			out[i] = newest
		}
	}
	return out
}

// layoutsLocked returns what by's lookups of a model go by: by's own workers where
// there is one for each shard, else everybody's. So a layout that somebody else
// registers under a model's name does not make another's lookups misses.
func (r *registry) layoutsLocked(model string, world int, by principal) *modelLayouts {
	if m := r.mu.byModel[modelKey{model, world, by}]; m != nil && len(m.workers) >= world {
		return m
	}
	return r.mu.byModel[modelKey{model, world, principal{}}]
}

// shardsOf says where the shards of a model are to be looked up: in the layouts
// of their workers. It reports false when no worker of that model is registered.
func (r *registry) shardsOf(model, salt []byte, world int, by principal) (store.Shard, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	m := r.layoutsLocked(string(model), world, by)
	if m == nil {
		return store.Shard{}, false
	}
	in := m.newest()
	sh := store.Shard{World: world, Namespace: in.namespace(salt), Groups: in.groups()}
	of := m.fingerprints()
	if len(of) == 1 {
		return sh, true
	}
	each := make(store.Namespaces, world)
	for i := range each {
		switch {
		case of[i] == in.fingerprint:
			each[i] = sh.Namespace
		case i > 0 && of[i] == of[i-1]:
			each[i] = each[i-1]
		default:
			each[i] = kv.NamespaceOf(in.model, string(salt), of[i])
		}
	}
	sh.Each = &each
	return sh, true
}

// keeps notes which shard a worker keeps, from the first transfer that says it.
// It reports whether that was news.
func (r *registry) keeps(in *instance, shard int) bool {
	if int(in.shard.Load()) == shard+1 {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	in.shard.Store(int32(shard + 1))
	if r.mu.instances[in.who()] == in {
		for _, k := range in.modelKeys() {
			if m := r.mu.byModel[k]; m != nil {
				m.learn(in, shard)
			}
		}
	}
	return true
}

// clock tells how long workers have been silent. It goes by the monotonic time of
// this process: a step of the wall clock makes nobody silent.
type clock struct {
	epoch  time.Time
	last   time.Duration // of the Tick before
	ticked bool
}

func (c *clock) at(now time.Time) time.Duration { return now.Sub(c.epoch) }

// stoodStill is how much longer than its second a Tick may take before the time
// is not held against anybody: the process or the machine did not run.
const stoodStill = 10 * time.Second

// gap reports whether this process did not run for a while before now.
func (c *clock) gap(now time.Duration) bool {
	gap := c.ticked && now-c.last > stoodStill
	c.last, c.ticked = now, true
	return gap
}
