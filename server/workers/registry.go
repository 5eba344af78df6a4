// SPDX-License-Identifier: Apache-2.0

package workers

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/access"
)

// NamespaceOf returns the namespace of the worker's chunks for a salt.
func (in *Worker) NamespaceOf(salt []byte) kv.Namespace {
	if len(salt) == 0 {
		return in.unsalted
	}
	return kv.NamespaceOf(in.kept, string(salt), in.Fingerprint)
}

// Registry has the registered workers. Its methods are safe for concurrent use.
type Registry struct {
	max         int
	maxMappings int
	nextSearch  time.Time                   // used only by FindProcesses' goroutine
	clock       clock                       // its epoch is immutable, the rest belongs to Tick
	gone        func(peercred.Process) bool // Process.Gone; tests have their own
	woke        atomic.Bool                 // a worker woke since the last call of Woke
	mu          struct {
		sync.RWMutex
		seq       uint64
		instances map[workerID]*Worker
		byModel   map[modelKey]*modelLayouts
		departed  map[layoutKey][]shardLayout // of layouts that have no worker any more
		gone      map[workerID]*Worker        // workers that are gone and left transfers in progress
		lenders   map[uint64][]*Worker        // by inode of a segment
		mappings  map[access.Principal]int    // number of mapped segments, by user or address
		unknown   map[workerID]unregisteredID // ids without a registration whose first ping was answered false
		order     []workerID                  // keys of unknown, oldest first; see firstOfMost
		clients   map[*Client]struct{}        // clients whose process is looked for
		former    map[workerID]formerWorker   // workers of an earlier server that were not taken over
		pages     pages                       // which pages the devices of workers may have pinned
	}
}

// formerWorker is what is remembered of a worker of an earlier server that was not taken over.
type formerWorker struct {
	model              string
	world, chunk, base int
}

// modelKey identifies the workers of one model and chunk size: those of one user or address, or of all.
type modelKey struct {
	model string
	world int
	chunk int              // tokens
	by    access.Principal // zero: of all
}

func (in *Worker) modelKeys() [2]modelKey {
	return [2]modelKey{{in.Model, in.World, in.Chunk, in.By}, {in.Model, in.World, in.Chunk, access.Principal{}}}
}

// layoutKey identifies a layout among those of a modelKey.
type layoutKey struct {
	modelKey
	print string // fingerprint of one of its workers
}

// workerID identifies a worker. Clients choose their ids, so the same id from another user or address is another worker.
type workerID struct {
	id int64
	by access.Principal
}

// key returns the number of the worker in the store and in the pool's index. No client can choose an id that has another worker's key.
func (w workerID) key() int64 {
	sum := sha256.Sum256(fmt.Appendf(nil, "%d %v", w.id, w.by))
	return int64(binary.LittleEndian.Uint64(sum[:]))
}

const (
	maxUnknown  = 1024 // ids in unknown; beyond it the oldest id of the user or address with the most ids is forgotten
	maxDeparted = 1024 // layouts in departed; further ones are not remembered
)

// NewRegistry returns a Registry of at most max workers.
func NewRegistry(max int) *Registry {
	r := &Registry{}
	r.max, r.maxMappings = max, maxMappings()
	r.clock.epoch = time.Now()
	r.gone = peercred.Process.Gone
	r.mu.instances = make(map[workerID]*Worker)
	r.mu.byModel = make(map[modelKey]*modelLayouts)
	r.mu.departed = make(map[layoutKey][]shardLayout)
	r.mu.gone = make(map[workerID]*Worker)
	r.mu.lenders = make(map[uint64][]*Worker)
	r.mu.mappings = make(map[access.Principal]int)
	r.mu.unknown = make(map[workerID]unregisteredID)
	r.mu.clients = make(map[*Client]struct{})
	r.mu.former = make(map[workerID]formerWorker)
	r.mu.pages.of = make(map[workerID]page)
	return r
}

// Saw records a sign of life of a worker.
func (r *Registry) Saw(in *Worker, now time.Time) { in.lastSeen.Store(int64(r.clock.at(now))) }

// Silence returns how long a worker has been silent.
func (r *Registry) Silence(in *Worker, now time.Time) time.Duration {
	return r.clock.at(now) - time.Duration(in.lastSeen.Load())
}

// Get returns the worker that `by` registered as id, and records that it lives. The error wraps ErrUnknown, or ErrRefused for a worker
// whose registration was refused.
func (r *Registry) Get(id int64, by access.Principal) (*Worker, error) {
	r.mu.RLock()
	in := r.mu.instances[workerID{id, by}]
	r.mu.RUnlock()
	if in == nil {
		return nil, fmt.Errorf("%w: instance_id %d of %v", ErrUnknown, id, by)
	}
	r.Saw(in, time.Now())
	r.wake(in)
	if in.Refused != "" {
		return nil, fmt.Errorf("%w: %s", ErrRefused, in.Refused)
	}
	return in, nil
}

// Departed returns the worker that the user or address `by` registered as id, if it is gone and left transfers in quarantine; else nil.
func (r *Registry) Departed(id int64, by access.Principal) *Worker {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.mu.gone[workerID{id, by}]
}

// KeepDeparted remembers a worker that left transfers in quarantine, for its late commits. Beyond as many as may be registered it forgets
// an arbitrary one: the slots of that worker then wait for the end of the quarantine.
func (r *Registry) KeepDeparted(in *Worker) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.instances[in.who()] != nil {
		return // it has registered again, and its commits find it there
	}
	for id := range r.mu.gone {
		if len(r.mu.gone) < r.max {
			break
		}
		delete(r.mu.gone, id)
	}
	r.mu.gone[in.who()] = in
}

// NewestOf returns the newest worker of the layout that a lookup is for, or nil.
func (r *Registry) NewestOf(q *Query) *Worker {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if l, err := r.layoutLocked(q); err == nil {
		return l.newest()
	}
	return nil
}

// Add registers in, and replaces an earlier worker of the same id and owner, which it returns as old. Errors: access.ErrLender, with the
// worker that lends the same segment as lender; ErrMappings; ErrTooMany.
func (r *Registry) Add(in *Worker) (old, lender *Worker, err error) {
	r.Saw(in, time.Now())
	in.knowFamily()
	r.mu.Lock()
	defer r.mu.Unlock()
	old = r.mu.instances[in.who()]
	if old == nil && len(r.mu.instances) >= r.max {
		return nil, nil, fmt.Errorf("%w: %d", ErrTooMany, r.max)
	}
	if lender, err = r.mayLendLocked(in, old); err != nil {
		return nil, lender, err
	}
	if old != nil {
		r.forgetLocked(old)
		in.Pinged.Store(old.Pinged.Load())
		if old.Side() == Places {
			in.TakeSide(Places)
		}
	}
	if _, former := r.mu.former[in.who()]; former || old != nil && old.Taken {
		in.Taken = true
	}
	delete(r.mu.gone, in.who())
	delete(r.mu.former, in.who())
	r.forgetUnknownLocked(in.who())
	r.notePagesLocked(in)
	r.mu.seq++
	in.seq = r.mu.seq
	r.mu.instances[in.who()] = in
	r.lendLocked(in)
	if in.Refused == "" && !in.asleep.Load() {
		r.knowLocked(in)
	}
	return old, nil, nil
}

// knowLocked adds in to the workers of its model.
func (r *Registry) knowLocked(in *Worker) {
	for _, k := range in.modelKeys() {
		m := r.mu.byModel[k]
		if m == nil {
			m = &modelLayouts{}
			r.mu.byModel[k] = m
		}
		l := m.joining(in)
		if l == nil {
			l = &engineLayout{first: in.Fingerprint, shards: r.mu.departed[layoutKey{k, in.Fingerprint}]}
			for _, print := range l.fingerprints() {
				delete(r.mu.departed, layoutKey{k, print})
			}
			m.of = append(m.of, l)
		}
		l.workers = append(l.workers, in)
		slices.SortFunc(l.workers, func(a, b *Worker) int { return cmp.Compare(a.seq, b.seq) })
		if shard := int(in.shard.Load()) - 1; shard >= 0 {
			l.learn(in, shard)
		}
	}
}

// Remove removes and returns the worker that the user or address `by` registered as id. It returns nil if there is none.
func (r *Registry) Remove(id int64, by access.Principal) *Worker {
	r.mu.Lock()
	defer r.mu.Unlock()
	in := r.mu.instances[workerID{id, by}]
	if in != nil {
		r.forgetLocked(in)
	}
	return in
}

// RemoveThis removes in. It reports false if in is no longer registered.
func (r *Registry) RemoveThis(in *Worker) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.instances[in.who()] != in {
		return false
	}
	r.forgetLocked(in)
	return true
}

func (r *Registry) forgetLocked(in *Worker) {
	delete(r.mu.instances, in.who())
	r.unlendLocked(in)
	r.unlistLocked(in)
}

// unlistLocked removes in from the workers of its model.
func (r *Registry) unlistLocked(in *Worker) {
	for _, k := range in.modelKeys() {
		m := r.mu.byModel[k]
		l := m.holding(in)
		if l == nil {
			continue
		}
		l.workers = slices.DeleteFunc(l.workers, func(o *Worker) bool { return o == in })
		if len(l.workers) > 0 {
			continue
		}
		m.of = slices.DeleteFunc(m.of, func(o *engineLayout) bool { return o == l })
		if len(m.of) == 0 {
			delete(r.mu.byModel, k)
		}
		for _, print := range l.fingerprints() { // the model's next engine probably has the same layout
			if l.shards != nil && len(r.mu.departed) < maxDeparted {
				r.mu.departed[layoutKey{k, print}] = l.shards
			}
		}
	}
}

// Ping answers a heartbeat of the worker that the user or address `by` registered as id: ok is the answer. The first ping of an id that its
// sender has not registered is answered false, later ones true. So LMCache's client registers again, once, after the server lost its
// registration. news says that a registered worker pinged for the first time.
func (r *Registry) Ping(id int64, by access.Principal) (ok, news bool) {
	r.mu.RLock()
	in := r.mu.instances[workerID{id, by}]
	r.mu.RUnlock()
	if in != nil {
		r.Saw(in, time.Now())
		r.wake(in)
		return true, !in.Pinged.Swap(true)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	who := workerID{id, by}
	if s, ok := r.mu.unknown[who]; ok {
		s.pings, s.last = s.pings+1, time.Now()
		r.mu.unknown[who] = s
		return true, false
	}
	if len(r.mu.order) >= maxUnknown {
		i := firstOfMost(r.mu.order)
		delete(r.mu.unknown, r.mu.order[i])
		r.mu.order = slices.Delete(r.mu.order, i, i+1)
	}
	r.mu.unknown[who] = unregisteredID{1, time.Now()}
	r.mu.order = append(r.mu.order, who)
	return false, false
}

// unregisteredID has the pings of an id that is not registered.
type unregisteredID struct {
	pings int
	last  time.Time
}

// Limits of Strangers. vLLM's client registers again after its first ping.
const (
	strangerPings = 3
	strangerTime  = time.Minute // since the last ping
)

// Strangers returns how many ids keep pinging without a registration, and one of them. SGLang's clients do this, because they register only
// once.
func (r *Registry) Strangers(now time.Time) (n int, one int64) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	for who, s := range r.mu.unknown {
		if s.pings >= strangerPings && now.Sub(s.last) < strangerTime {
			n, one = n+1, who.id
		}
	}
	return n, one
}

// ForgetUnknown makes the next ping of an unregistered id from the user or address `by` count as its first.
func (r *Registry) ForgetUnknown(id int64, by access.Principal) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.forgetUnknownLocked(workerID{id, by})
}

func (r *Registry) forgetUnknownLocked(who workerID) {
	if _, ok := r.mu.unknown[who]; ok {
		delete(r.mu.unknown, who)
		r.mu.order = slices.DeleteFunc(r.mu.order, func(o workerID) bool { return o == who })
	}
}

// Crowd returns the worker that must make room for the worker `in`, if the table is full and does not contain `in`. It is a sleeping worker
// of the user of `in`, if there is one. Otherwise it is, of the user or address with the most workers, the worker that was silent for
// longest. It is nil if the user of `in` has the most workers.
func (r *Registry) Crowd(in *Worker) (silent *Worker) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if len(r.mu.instances) < r.max || r.mu.instances[in.who()] != nil {
		return nil
	}
	for _, o := range r.mu.instances {
		if o.By == in.By && o.asleep.Load() && (silent == nil || o.lastSeen.Load() < silent.lastSeen.Load()) {
			silent = o
		}
	}
	if silent != nil {
		return silent
	}
	has := map[access.Principal]int{in.By: 1}
	for who := range r.mu.instances {
		has[who.by]++
	}
	for _, o := range r.mu.instances {
		more := has[o.By] - has[in.By]
		if silent != nil {
			more = min(more, cmp.Or(has[o.By]-has[silent.By], cmp.Compare(silent.lastSeen.Load(), o.lastSeen.Load())))
		}
		if more > 0 {
			silent = o
		}
	}
	return silent
}

// List returns the workers in the order of their registrations.
func (r *Registry) List() []*Worker {
	r.mu.RLock()
	defer r.mu.RUnlock()
	out := make([]*Worker, 0, len(r.mu.instances))
	for _, in := range r.mu.instances {
		out = append(out, in)
	}
	slices.SortFunc(out, func(a, b *Worker) int { return cmp.Compare(a.seq, b.seq) })
	return out
}

// GenerationsOf returns the generations that the client of worker id of the user or address `by` may be of. Without a known worker it
// returns those of all workers of `by` for the model. The set is empty if nothing is known.
func (r *Registry) GenerationsOf(id int64, by access.Principal, model []byte, world int) (g lmcache.Generations) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if in := r.mu.instances[workerID{id, by}]; in != nil && id != 0 {
		return in.Generations
	}
	for _, in := range r.mu.instances {
		if in.By == by && in.World == world && in.Model == string(model) { // workers of other peers tell nothing about this peer's clients
			g |= in.Generations
		}
	}
	return g
}

// AnyBase, as a base, means workers of all listeners.
const AnyBase = -1

// ChunksOf returns the chunk sizes, in rising order, that an engine may use, where the engine has not asked this server for its size.
// If id is not 0, and a worker of that id and of principal `by` is known, it returns only that worker's size. Otherwise it returns the
// sizes of the model's workers that registered over a listener of chunk size base (an engine uses one listener), and of these only the
// workers of `by` if `by` has one for each shard. If no such worker is registered, the workers that an earlier server knew, and that this
// server has not taken over, count instead. sure reports whether the size is that of the worker id, or of a worker that an earlier server
// knew.
func (r *Registry) ChunksOf(id int64, by access.Principal, model []byte, world, base int) (sizes []int, sure bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if id != 0 {
		who := workerID{id, by}
		if in := r.mu.instances[who]; in != nil && in.Chunk > 0 {
			return []int{in.Chunk}, true
		}
		if was, known := r.mu.former[who]; known {
			return []int{was.chunk}, true
		}
	}
	var own, all []int
	var ownSure, allSure bool
	add := func(owner access.Principal, chunk int, taken bool) {
		all, allSure = append(all, chunk), allSure || taken
		if owner == by {
			own, ownSure = append(own, chunk), ownSure || taken
		}
	}
	for _, in := range r.mu.instances {
		if in.Refused == "" && in.World == world && in.Model == string(model) && (base == AnyBase || in.Base == base) {
			add(in.By, in.Chunk, in.Taken)
		}
	}
	if len(all) == 0 {
		for who, was := range r.mu.former {
			if was.world == world && was.model == string(model) && (base == AnyBase || was.base == base) {
				add(who.by, was.chunk, true)
			}
		}
	}
	if len(own) >= max(world, 1) && base != AnyBase {
		all, allSure = own, ownSure
	}
	slices.Sort(all)
	return slices.Compact(all), allSure
}

// ChunksOfClient returns the chunk sizes, in rising order, of those workers of a model that are of a client's process or its relatives.
func (r *Registry) ChunksOfClient(from *Client, model []byte, world int) (sizes []int) {
	if from == nil {
		return nil
	}
	own := from.process.Load()
	if own == nil {
		return nil
	}
	r.mu.RLock()
	defer r.mu.RUnlock()
	for _, in := range r.mu.instances {
		if f := in.family.Load(); f != nil && in.Refused == "" && in.World == world && in.Model == string(model) && own.related(f) {
			sizes = append(sizes, in.Chunk)
		}
	}
	slices.Sort(sizes)
	return slices.Compact(sizes)
}

// NotTaken remembers a worker of an earlier server that is not registered here: its engine uses chunks of `chunk` tokens. When the worker
// registers again, its registration shows its size.
func (r *Registry) NotTaken(w *Saved, chunk int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.mu.former) < r.max && chunk > 0 && chunk <= kv.MaxChunkTokens {
		r.mu.former[workerID{w.ID, w.By}] = formerWorker{w.Model, w.World, chunk, w.Base}
	}
}

// Pickles reports whether the user or address `by` has a worker that may send pickled chunks.
func (r *Registry) Pickles(by access.Principal) bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	for _, in := range r.mu.instances {
		if in.By == by && in.Lent == nil && in.Side() != Places {
			return true
		}
	}
	return false
}
