package server

import (
	"encoding/json"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

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

	lastSeen atomic.Int64 // unix ns
	pinged   atomic.Bool
	pickle   atomic.Bool // it could not map the pool
}

// namespace returns where the worker's chunks of one tenant live.
func (in *instance) namespace(salt []byte) kv.Namespace {
	if len(salt) == 0 {
		return in.unsalt
	}
	return kv.NewNamespace(in.model, string(salt), in.layout)
}

// registry knows the workers.
type registry struct {
	max int
	mu  struct {
		sync.RWMutex
		instances map[int64]*instance
		byModel   map[modelKey][]*instance // newest last
		dropped   map[int64]*instance      // gone with transfers in progress
		strangers map[int64]struct{}       // unknown ids that got their false ping
		order     []int64                  // of strangers, oldest first
	}
}

type modelKey struct {
	model string
	world int
}

const maxStrangers = 1024

func (r *registry) init(max int) {
	r.max = max
	r.mu.instances = make(map[int64]*instance)
	r.mu.byModel = make(map[modelKey][]*instance)
	r.mu.dropped = make(map[int64]*instance)
	r.mu.strangers = make(map[int64]struct{})
}

// get returns a registered worker and notes that it lives. The error wraps
// errInstance, or errRefused for one whose mode is not served.
func (r *registry) get(id int64) (*instance, error) {
	r.mu.RLock()
	in := r.mu.instances[id]
	r.mu.RUnlock()
	if in == nil {
		return nil, fmt.Errorf("%w: %d", errInstance, id)
	}
	in.lastSeen.Store(time.Now().UnixNano())
	if in.refuse != "" {
		return nil, fmt.Errorf("%w: %s", errRefused, in.refuse)
	}
	return in, nil
}

// dropped returns a worker that is gone and left transfers in quarantine, or nil.
func (r *registry) dropped(id int64) *instance {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.mu.dropped[id]
}

// bury remembers a worker that left transfers in quarantine, for its late
// commits. Beyond as many as may be registered, any one is forgotten: its slots
// then wait for the end of the quarantine.
func (r *registry) bury(in *instance) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.instances[in.id] != nil {
		return // registered again: its commits find it there
	}
	for id := range r.mu.dropped {
		if len(r.mu.dropped) < r.max {
			break
		}
		delete(r.mu.dropped, id)
	}
	r.mu.dropped[in.id] = in
}

// layoutOf returns the newest worker of a model: its layout is the one lookups
// are answered for.
func (r *registry) layoutOf(model []byte, world int) (*instance, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	of := r.mu.byModel[modelKey{string(model), world}]
	if len(of) == 0 {
		return nil, false
	}
	return of[len(of)-1], true
}

// add registers in, in place of an earlier worker of the same id. old is that
// one, or nil. It reports false when there are too many workers.
func (r *registry) add(in *instance) (old *instance, ok bool) {
	in.lastSeen.Store(time.Now().UnixNano())
	r.mu.Lock()
	defer r.mu.Unlock()
	old = r.mu.instances[in.id]
	if old == nil && len(r.mu.instances) >= r.max {
		return nil, false
	}
	if old != nil {
		r.forgetLocked(old)
		in.pinged.Store(old.pinged.Load())
	}
	delete(r.mu.dropped, in.id)
	r.mu.instances[in.id] = in
	if in.refuse == "" {
		k := modelKey{in.model, in.world}
		r.mu.byModel[k] = append(r.mu.byModel[k], in)
	}
	return old, true
}

// remove forgets a worker; nil when it is not registered.
func (r *registry) remove(id int64) *instance {
	r.mu.Lock()
	defer r.mu.Unlock()
	in := r.mu.instances[id]
	if in != nil {
		r.forgetLocked(in)
	}
	return in
}

func (r *registry) forgetLocked(in *instance) {
	delete(r.mu.instances, in.id)
	k := modelKey{in.model, in.world}
	of := r.mu.byModel[k]
	for i := range of {
		if of[i] == in {
			of = append(of[:i:i], of[i+1:]...)
			break
		}
	}
	if len(of) == 0 {
		delete(r.mu.byModel, k)
	} else {
		r.mu.byModel[k] = of
	}
}

// ping answers a worker's heartbeat. The first one of an id that is not
// registered is answered false, later ones true: that makes a stock client
// register again, once, after the server lost its registrations.
func (r *registry) ping(id int64) bool {
	r.mu.RLock()
	in := r.mu.instances[id]
	r.mu.RUnlock()
	if in != nil {
		in.lastSeen.Store(time.Now().UnixNano())
		in.pinged.Store(true)
		return true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.mu.strangers[id]; ok {
		return true
	}
	if len(r.mu.order) >= maxStrangers {
		delete(r.mu.strangers, r.mu.order[0])
		r.mu.order = append(r.mu.order[:0], r.mu.order[1:]...)
	}
	r.mu.strangers[id] = struct{}{}
	r.mu.order = append(r.mu.order, id)
	return false
}

// silent removes and returns the workers that have been silent too long.
func (r *registry) silent(now time.Time, reap, grace time.Duration) (gone []*instance) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, in := range r.mu.instances {
		limit := grace
		if in.pinged.Load() {
			limit = reap
		}
		if limit >= 0 && now.Sub(time.Unix(0, in.lastSeen.Load())) >= limit {
			gone = append(gone, in)
		}
	}
	for _, in := range gone {
		r.forgetLocked(in)
	}
	return gone
}

func (r *registry) list() []*instance {
	r.mu.RLock()
	defer r.mu.RUnlock()
	out := make([]*instance, 0, len(r.mu.instances))
	for _, in := range r.mu.instances {
		out = append(out, in)
	}
	return out
}

// savedWorker is a registration as the pool's note keeps it.
type savedWorker struct {
	ID     int64
	Model  string
	World  int
	Layout kv.Layout
	Pinged bool
}

// save keeps the registrations beside the pool, so that a server that takes over
// after this one knows the workers that map it.
func (s *Server) save() {
	var list []savedWorker
	for _, in := range s.registry.list() {
		if in.refuse == "" {
			list = append(list, savedWorker{in.id, in.model, in.world, in.layout, in.pinged.Load()})
		}
	}
	b, err := json.Marshal(list)
	if err == nil {
		s.saving.Lock()
		defer s.saving.Unlock()
		err = s.store.SetNote(b)
	}
	if err != nil {
		s.log.Warn("registrations are not kept for a restart", "error", err)
	}
}

// restore registers the workers that an earlier server knew, as far as they
// still make sense.
func (s *Server) restore() {
	b, err := s.store.Note()
	var list []savedWorker
	if err == nil && b != nil {
		err = json.Unmarshal(b, &list)
	}
	if err != nil {
		s.log.Warn("workers of the earlier server are not known; they register again at their next heartbeat", "error", err)
		return
	}
	for _, w := range list {
		in, err := s.newInstance(w.ID, w.Model, w.World, w.Layout)
		if err != nil || w.World < 1 || w.World > kv.MaxWorldSize {
			continue
		}
		in.pinged.Store(w.Pinged)
		s.registry.add(in)
	}
	if st := s.store.Stats(); st.RestoredChunks > 0 || len(list) > 0 {
		s.log.Info(fmt.Sprintf("took over %d chunks (%s) and %d workers of the earlier server; %s wait in quarantine",
			st.RestoredChunks, kv.FormatBytes(st.ResidentBytes), len(list), kv.FormatBytes(st.CondemnedBytes)))
	}
}

// newInstance makes a worker whose transfers are served.
func (s *Server) newInstance(id int64, model string, world int, layout kv.Layout) (*instance, error) {
	bytes, err := layout.Bytes()
	if err == nil && bytes > s.store.PoolBytes() {
		err = fmt.Errorf("a chunk takes %s, the pool has %s: raise --l1-size-gb", kv.FormatBytes(bytes), kv.FormatBytes(s.store.PoolBytes()))
	}
	return &instance{
		id: id, model: model, world: world, layout: layout, bytes: bytes, unsalt: kv.NewNamespace(model, "", layout),
	}, err
}

func (s *Server) ping(sc *scratch, p [][]byte) error {
	id, ok, err := lmcache.DecodeOptionalInt(p[0])
	if err != nil {
		return fmt.Errorf("instance_id: %w", err)
	}
	sc.out = lmcache.AppendBool(sc.out, !ok || s.registry.ping(id))
	return nil
}

func (s *Server) registerEngineDriven(sc *scratch, p [][]byte) error {
	reg, err := lmcache.DecodeEngineDriven(p[0])
	if err != nil {
		return err
	}
	if s.draining.Load() {
		return errDraining
	}
	in, err := s.newInstance(reg.InstanceID, reg.Model, reg.WorldSize, reg.Layout(s.opts.ChunkTokens))
	if err != nil {
		s.log.Error(fmt.Sprintf("refused worker %d of %s: %v", in.id, in.model, err))
		return fmt.Errorf("%w: %w", errUnsupported, err)
	}
	if err := s.admit(in); err != nil {
		return err
	}
	sc.out = lmcache.Pool{ShmName: s.store.PoolName(), Bytes: s.store.PoolBytes()}.Append(sc.out)
	return nil
}

// admit adds a worker and settles what an earlier registration left.
func (s *Server) admit(in *instance) error {
	newest, shared := s.registry.layoutOf([]byte(in.model), in.world)
	old, ok := s.registry.add(in)
	if !ok {
		return fmt.Errorf("%w: %d workers are registered", errUnsupported, s.opts.MaxInstances)
	}
	s.save()
	if old != nil {
		s.detached(old, "registered again")
		return nil
	}
	s.log.Info(fmt.Sprintf("worker %d registered: %s, world size %d, chunk %v %s = %s",
		in.id, in.model, in.world, in.layout.Shape(), in.layout.DType, kv.FormatBytes(in.bytes)))
	if shared && in.refuse == "" && newest.layout != in.layout {
		s.log.Warn(fmt.Sprintf("workers of %s disagree: chunk %s, and now %s; lookups follow the newest, the other layout's chunks are misses",
			in.model, newest.layout.Fingerprint(), in.layout.Fingerprint()))
	}
	return nil
}

// registerKVCache refuses a worker whose KV the server would have to copy. The
// protocol has no negative reply to it, so the worker is remembered and its
// transfers are declined.
func (s *Server) registerKVCache(p [][]byte) error {
	reg, err := lmcache.DecodeKVCache(p)
	if err != nil {
		return err
	}
	in := &instance{
		id: reg.InstanceID, model: reg.Model, world: reg.WorldSize,
		refuse: "lmcache_driven mode is not served; set lmcache.mp.mp_transfer_mode=engine_driven in kv_connector_extra_config",
	}
	if _, ok := s.registry.add(in); ok {
		s.log.Warn(fmt.Sprintf("refused worker %d of %s: %s", in.id, in.model, in.refuse))
	}
	return nil
}

func (s *Server) unregister(p [][]byte) error {
	id, err := lmcache.DecodeInt(p[0])
	if err != nil {
		return fmt.Errorf("instance_id: %w", err)
	}
	if in := s.registry.remove(id); in != nil {
		s.log.Info(fmt.Sprintf("worker %d of %s unregistered", in.id, in.model))
		s.detached(in, "unregistered")
		s.save()
	}
	return nil
}

func (s *Server) reap(now time.Time) {
	for _, in := range s.registry.silent(now, s.opts.WorkerReap, s.opts.RegistrationGrace) {
		s.n.reaped.Add(1)
		s.log.Warn(fmt.Sprintf("worker %d of %s dropped: silent for %v", in.id, in.model,
			now.Sub(time.Unix(0, in.lastSeen.Load())).Round(time.Second)))
		s.detached(in, "fell silent")
		s.save()
	}
}

func (s *Server) detached(in *instance, how string) {
	if n := s.store.Detach(in.id); n > 0 {
		s.log.Warn(fmt.Sprintf("worker %d %s with %d transfers in progress: their slots are in quarantine", in.id, how, n))
		s.registry.bury(in)
	}
}
