// SPDX-License-Identifier: Apache-2.0

package workers

import (
	"cmp"
	"time"

	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/server/access"
)

// modelLayouts is what the registry knows of one model and world size: who is
// registered, and which layout the worker of each shard has.
//
// A registration does not say which shard its worker keeps; transfers do. The
// workers of a pipeline's stages hold unlike numbers of layers, so each shard is
// looked up under the layout of its own worker.
type modelLayouts struct {
	workers []*Worker // newest last
	shards  []shardLayout
}

// shardLayout is the layout of a shard's newest worker that transferred anything.
type shardLayout struct {
	fingerprint string // empty while no worker did
	seq         uint64 // of that worker's registration
}

// newest is the worker that registered last.
func (m *modelLayouts) newest() *Worker { return m.workers[len(m.workers)-1] }

// fitting returns a registered worker that has that layout and can be looked up
// together with in: its object groups follow the same rules. Else a hit would be what
// one of them cannot load. It is nil when there is none.
func (m *modelLayouts) fitting(fingerprint string, in *Worker) *Worker {
	for _, o := range m.workers {
		if o.Fingerprint == fingerprint && o.Groups.Like(in.Groups) {
			return o
		}
	}
	return nil
}

// learn notes that in keeps that shard. A worker that registered before the one
// that is known changes nothing: lookups follow the newer engine.
func (m *modelLayouts) learn(in *Worker, shard int) {
	if shard < 0 || shard >= in.World {
		return
	}
	if m.shards == nil {
		m.shards = make([]shardLayout, in.World)
	}
	if in.seq >= m.shards[shard].seq {
		m.shards[shard] = shardLayout{in.Fingerprint, in.seq}
	}
}

// each returns, for each shard, a worker of the layout that it is looked up in: the one
// that is known, as long as a registered worker has it that fits and the newest
// registration is of a known layout too; else the newest worker. It is nil when that is
// the newest worker for all.
func (m *modelLayouts) each() []*Worker {
	newest := m.newest()
	known, unlike := false, false
	for i := range m.shards {
		fp := m.shards[i].fingerprint
		known = known || fp == newest.Fingerprint
		unlike = unlike || fp != "" && fp != newest.Fingerprint
	}
	if !known || !unlike {
		return nil
	}
	out := make([]*Worker, len(m.shards))
	for i := range m.shards {
		fp := m.shards[i].fingerprint
		if i > 0 && fp == m.shards[i-1].fingerprint {
			out[i] = out[i-1]
			continue
		}
		out[i] = cmp.Or(m.fitting(fp, newest), newest)
	}
	return out
}

// layoutsLocked returns the layouts for by's lookups of a model: those of by's own workers
// where there is one for each shard, else those of all workers. So a layout that another user
// registers under a model's name does not turn by's lookups into misses.
func (r *Registry) layoutsLocked(model string, world, chunk int, by access.Principal) *modelLayouts {
	if m := r.mu.byModel[modelKey{model, world, chunk, by}]; m != nil && len(m.workers) >= world {
		return m
	}
	return r.mu.byModel[modelKey{model, world, chunk, access.Principal{}}]
}

// ShardsOf says where the shards of a model are to be looked up in chunks of chunk tokens: in the layouts
// of their workers. It reports false when no such worker of that model is registered.
func (r *Registry) ShardsOf(model, salt []byte, world, chunk int, by access.Principal) (object.Shard, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	m := r.layoutsLocked(string(model), world, chunk, by)
	if m == nil {
		return object.Shard{}, false
	}
	in := m.newest()
	sh := object.Shard{World: world, Namespace: in.NamespaceOf(salt), Groups: in.Groups}
	of := m.each()
	if of == nil {
		return sh, true
	}
	each := make(object.Layouts, world)
	for i := range each {
		if i > 0 && of[i] == of[i-1] {
			each[i] = each[i-1]
			continue
		}
		each[i] = object.Layout{Namespace: of[i].NamespaceOf(salt), Groups: of[i].Groups}
	}
	sh.Each = &each
	return sh, true
}

// NoteShard notes which shard a worker keeps, from the first transfer that says it.
// It reports whether that was news.
func (r *Registry) NoteShard(in *Worker, shard int) bool {
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

// clock measures how long workers have been silent. It uses the monotonic time of
// this process: wall-clock steps do not count as silence.
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
