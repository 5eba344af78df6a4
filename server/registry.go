package server

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
)

// instance is one registered worker. What is not atomic is immutable.
type instance struct {
	id     int64
	model  string
	world  int
	layout kv.Layout
	bytes  int64 // per chunk
	unsalt kv.Namespace
	refuse string // why its transfers are declined; empty when they are not
	by     principal
	key    int64 // names it in the store

	generations lmcache.Generations // that its client can be of

	fingerprint string  // of the layout
	driven      *driven // what the server copies itself; nil for a worker that copies

	seq      uint64       // of the registration, counted up
	shard    atomic.Int32 // 1 + the shard it keeps, 0 while unknown
	lastSeen atomic.Int64 // ns since registry.clock.epoch
	pinged   atomic.Bool
	sided    sided
	socket   uint64                           // inode of the one it registered over; 0 unknown
	process  atomic.Pointer[peercred.Process] // which registered it, once that is proved
	proofs   int                              // tries so far; this and the next, of dropDead's goroutine
	maps     bool                             // process was seen to map the pool
	looks    int                              // for that
}

// namespace returns where the worker's chunks of one tenant live.
func (in *instance) namespace(salt []byte) kv.Namespace {
	if len(salt) == 0 {
		return in.unsalt
	}
	return kv.NamespaceOf(in.model, string(salt), in.fingerprint)
}

// registry knows the workers.
type registry struct {
	max         int
	maxMappings int
	clock       clock // its epoch is immutable, the rest belongs to Tick
	mu          struct {
		sync.RWMutex
		seq       uint64
		instances map[workerID]*instance
		byModel   map[modelKey]*modelLayouts
		departed  map[modelKey][]shardLayout // of models without a worker
		dropped   map[workerID]*instance     // gone with transfers in progress
		lenders   map[uint64][]*instance     // by inode of a segment
		mappings  map[principal]int          // segments mapped for somebody
		strangers map[workerID]struct{}      // unknown ones that got their false ping
		order     []workerID                 // of strangers, oldest first
	}
}

// modelKey names the workers of one model: those of one peer, or everybody's.
type modelKey struct {
	model string
	world int
	by    principal // zero for everybody's
}

func (in *instance) modelKeys() [2]modelKey {
	return [2]modelKey{{in.model, in.world, in.by}, {in.model, in.world, principal{}}}
}

// workerID names a worker: clients choose their ids, so the same one of somebody else
// is another worker.
type workerID struct {
	id int64
	by principal
}

// key stands for the worker in the store and in the pool's index, where a number
// must be enough. Nobody can choose an id that has another's.
func (w workerID) key() int64 {
	sum := sha256.Sum256(fmt.Appendf(nil, "%d %v", w.id, w.by))
	return int64(binary.LittleEndian.Uint64(sum[:]))
}

const (
	maxStrangers = 1024
	maxDeparted  = 1024
)

func (r *registry) init(max int) {
	r.max, r.maxMappings = max, maxMappings()
	r.clock.epoch = time.Now()
	r.mu.instances = make(map[workerID]*instance)
	r.mu.byModel = make(map[modelKey]*modelLayouts)
	r.mu.departed = make(map[modelKey][]shardLayout)
	r.mu.dropped = make(map[workerID]*instance)
	r.mu.lenders = make(map[uint64][]*instance)
	r.mu.mappings = make(map[principal]int)
	r.mu.strangers = make(map[workerID]struct{})
}

// saw notes that a worker lives.
func (r *registry) saw(in *instance) { in.lastSeen.Store(int64(r.clock.at(time.Now()))) }

// silence is how long a worker has said nothing.
func (r *registry) silence(in *instance, now time.Time) time.Duration {
	return r.clock.at(now) - time.Duration(in.lastSeen.Load())
}

// get returns the worker that by registered as id, and notes that it lives. The
// error wraps errInstance, or errRefused for one whose mode is not served.
func (r *registry) get(id int64, by principal) (*instance, error) {
	r.mu.RLock()
	in := r.mu.instances[workerID{id, by}]
	r.mu.RUnlock()
	if in == nil {
		return nil, fmt.Errorf("%w: %d of %v", errInstance, id, by)
	}
	r.saw(in)
	if in.refuse != "" {
		return nil, fmt.Errorf("%w: %s", errRefused, in.refuse)
	}
	return in, nil
}

// dropped returns a worker of by's that is gone and left transfers in quarantine,
// or nil.
func (r *registry) dropped(id int64, by principal) *instance {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.mu.dropped[workerID{id, by}]
}

// bury remembers a worker that left transfers in quarantine, for its late
// commits. Beyond as many as may be registered, any one is forgotten: its slots
// then wait for the end of the quarantine.
func (r *registry) bury(in *instance) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.instances[in.who()] != nil {
		return // registered again: its commits find it there
	}
	for id := range r.mu.dropped {
		if len(r.mu.dropped) < r.max {
			break
		}
		delete(r.mu.dropped, id)
	}
	r.mu.dropped[in.who()] = in
}

// newestOf returns the worker whose layout by's lookups of a model follow, or nil.
func (r *registry) newestOf(model string, world int, by principal) *instance {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if m := r.layoutsLocked(model, world, by); m != nil {
		return m.newest()
	}
	return nil
}

// add registers in, in place of an earlier worker of the same id and owner. old is
// that one, or nil. Errors: errLender with the worker that lends the same
// segment, errMappings, errTooMany.
func (r *registry) add(in *instance) (old, lender *instance, err error) {
	r.saw(in)
	r.mu.Lock()
	defer r.mu.Unlock()
	old = r.mu.instances[in.who()]
	if old == nil && len(r.mu.instances) >= r.max {
		return nil, nil, fmt.Errorf("%w: %d", errTooMany, r.max)
	}
	if lender, err = r.mayLendLocked(in, old); err != nil {
		return nil, lender, err
	}
	if old != nil {
		r.forgetLocked(old)
		in.pinged.Store(old.pinged.Load())
		if old.side() == sidePlaces {
			in.takeSide(sidePlaces)
		}
	}
	delete(r.mu.dropped, in.who())
	r.forgetStrangerLocked(in.who())
	r.mu.seq++
	in.seq = r.mu.seq
	r.mu.instances[in.who()] = in
	r.lendLocked(in)
	if in.refuse == "" {
		r.knowLocked(in)
	}
	return old, nil, nil
}

// knowLocked makes in the newest worker of its model.
func (r *registry) knowLocked(in *instance) {
	for _, k := range in.modelKeys() {
		m := r.mu.byModel[k]
		if m == nil {
			m = &modelLayouts{shards: r.mu.departed[k]}
			delete(r.mu.departed, k)
			r.mu.byModel[k] = m
		}
		m.workers = append(m.workers, in)
		if shard := int(in.shard.Load()) - 1; shard >= 0 {
			m.learn(in, shard)
		}
	}
}

// remove forgets a worker of by's; nil when it is not registered.
func (r *registry) remove(id int64, by principal) *instance {
	r.mu.Lock()
	defer r.mu.Unlock()
	in := r.mu.instances[workerID{id, by}]
	if in != nil {
		r.forgetLocked(in)
	}
	return in
}

// removeThis forgets in; false when it is no longer the one registered.
func (r *registry) removeThis(in *instance) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.instances[in.who()] != in {
		return false
	}
	r.forgetLocked(in)
	return true
}

func (r *registry) forgetLocked(in *instance) {
	delete(r.mu.instances, in.who())
	r.unlendLocked(in)
	for _, k := range in.modelKeys() {
		m := r.mu.byModel[k]
		if m == nil {
			continue
		}
		m.workers = slices.DeleteFunc(m.workers, func(o *instance) bool { return o == in })
		if len(m.workers) > 0 {
			continue
		}
		delete(r.mu.byModel, k)
		if m.shards != nil && len(r.mu.departed) < maxDeparted {
			r.mu.departed[k] = m.shards // the next engine of the model is probably of the same layout
		}
	}
}

// ping answers a worker's heartbeat. The first one of an id that its sender has not
// registered is answered false, later ones true: that makes a stock client register
// again, once, after the server lost its registration. news says that a registered
// worker pinged for the first time.
func (r *registry) ping(id int64, by principal) (ok, news bool) {
	r.mu.RLock()
	in := r.mu.instances[workerID{id, by}]
	r.mu.RUnlock()
	if in != nil {
		r.saw(in)
		return true, !in.pinged.Swap(true)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	who := workerID{id, by}
	if _, ok := r.mu.strangers[who]; ok {
		return true, false
	}
	if len(r.mu.order) >= maxStrangers {
		delete(r.mu.strangers, r.mu.order[0])
		r.mu.order = append(r.mu.order[:0], r.mu.order[1:]...)
	}
	r.mu.strangers[who] = struct{}{}
	r.mu.order = append(r.mu.order, who)
	return false, false
}

// forgetStranger makes the next ping of an unregistered id the first one again.
func (r *registry) forgetStranger(id int64, by principal) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.forgetStrangerLocked(workerID{id, by})
}

func (r *registry) forgetStrangerLocked(who workerID) {
	if _, ok := r.mu.strangers[who]; ok {
		delete(r.mu.strangers, who)
		r.mu.order = slices.DeleteFunc(r.mu.order, func(o workerID) bool { return o == who })
	}
}

// crowd returns who gives way where the table is full and in is not in it: of the user
// or address with most workers, the one that is silent longest. It is nil when in's own
// has most.
func (r *registry) crowd(in *instance) (silent *instance) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if len(r.mu.instances) < r.max || r.mu.instances[in.who()] != nil {
		return nil
	}
	has := map[principal]int{in.by: 1}
	for who := range r.mu.instances {
		has[who.by]++
	}
	for _, o := range r.mu.instances {
		more := has[o.by] - has[in.by]
		if silent != nil {
			more = min(more, cmp.Or(has[o.by]-has[silent.by], cmp.Compare(silent.lastSeen.Load(), o.lastSeen.Load())))
		}
		if more > 0 {
			silent = o
		}
	}
	return silent
}

// silent removes and returns the workers that have been silent too long. After
// this process did not run for a while nobody was: their pings may wait unread.
func (r *registry) silent(now time.Time, reap, grace time.Duration) (gone []*instance) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if at := r.clock.at(now); r.clock.gap(at) {
		for _, in := range r.mu.instances {
			in.lastSeen.Store(int64(at))
		}
		return nil
	}
	for _, in := range r.mu.instances {
		limit := grace
		if in.pinged.Load() {
			limit = reap
		}
		if limit >= 0 && r.silence(in, now) >= limit {
			gone = append(gone, in)
		}
	}
	for _, in := range gone {
		r.forgetLocked(in)
	}
	return gone
}

// list returns the workers in the order of their registrations.
func (r *registry) list() []*instance {
	r.mu.RLock()
	defer r.mu.RUnlock()
	out := make([]*instance, 0, len(r.mu.instances))
	for _, in := range r.mu.instances {
		out = append(out, in)
	}
	slices.SortFunc(out, func(a, b *instance) int { return cmp.Compare(a.seq, b.seq) })
	return out
}
