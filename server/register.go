package server

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvasir-kv/kvasir/internal/safelog"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
)

func (s *Server) ping(sc *scratch, p [][]byte) error {
	var id int64
	ok, answer, news := false, true, false // without a worker: true
	if len(p) == 0 {
		id, ok, answer = s.pinger(sc.conn)
	} else {
		var err error
		if id, ok, err = lmcache.DecodeOptionalInt(p[0]); err != nil {
			return fmt.Errorf("instance_id: %w", err)
		}
	}
	if ok {
		answer, news = s.registry.ping(id, sc.caller().by)
	}
	if news {
		s.save()
	}
	sc.out = lmcache.AppendBool(sc.out, answer)
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
	if s.opts.RefuseEngine {
		return fmt.Errorf("%w: --supported-transfer-mode excludes engine_driven", errUnsupported)
	}
	in, err := s.newInstance(reg.InstanceID, reg.Model, reg.WorldSize, reg.Layout(s.opts.ChunkTokens))
	if err == nil {
		err = s.sameChunks(sc)
	}
	if err == nil && reg.PhysicalSlots > s.opts.ChunkTokens {
		err = fmt.Errorf("%w: it cuts chunks of %d tokens, this server of %d; restart the engine, or the server with --chunk-size %d",
			errChunkSize, reg.PhysicalSlots, s.opts.ChunkTokens, reg.PhysicalSlots)
	}
	if err != nil {
		s.log.Error(fmt.Sprintf("refused worker %d of %s: %v", in.id, in.model, err))
		return fmt.Errorf("%w: %w", errUnsupported, err)
	}
	in.cameFrom(sc.caller())
	in.generations = sc.conn.generations
	sc.conn.name(in.id)
	if in.generations.PickleOnly() {
		return s.registerPickleOnly(sc, in)
	}
	why := sc.caller().mayOpen()
	if why == nil {
		why = s.seesPool(sc.caller())
	}
	must := why != nil || s.opts.Pickle == PickleOnly
	if must {
		in.takeSide(sidePickle)
	}
	if err := s.admit(in); err != nil {
		return err
	}
	sc.mark()
	if why != nil {
		s.sayNotTold(in, why)
	}
	if must {
		sc.out = lmcache.Pool{}.Append(sc.out)
		return nil
	}
	sc.out = lmcache.Pool{ShmName: s.store.PoolName(), Bytes: s.store.PoolBytes()}.Append(sc.out)
	return nil
}

// admit adds a worker and settles what an earlier registration left. A worker that
// is not admitted is one that never was: its memory is closed.
func (s *Server) admit(in *instance) error {
	newest := s.registry.newestOf(in.model, in.world, in.by)
	s.makeRoom(in)
	old, lender, err := s.registry.add(in)
	for lender != nil && lender.driven.dead() {
		s.drop(lender, fmt.Sprintf("its process %d has ended", lender.driven.segments[0].Owner.PID))
		old, lender, err = s.registry.add(in)
	}
	if err != nil {
		if in.driven != nil {
			err = errors.Join(err, in.driven.memory.close())
		}
		s.registry.forgetStranger(in.id, in.by) // it may try again after its next pings
		return err
	}
	if old != nil {
		s.left(old, "registered again")
	}
	s.save()
	if old != nil && old.refuse == "" {
		return nil
	}
	s.log.Info(fmt.Sprintf("worker %d registered: %s, world size %d, chunk %v %s = %s",
		in.id, in.model, in.world, in.layout.Shape(), in.layout.DType, kv.FormatBytes(in.bytes)))
	if in.driven != nil {
		s.sayGroups(in)
	}
	if newest != nil && newest.fingerprint != in.fingerprint && !newest.groups().Like(in.groups()) {
		s.log.Warn(fmt.Sprintf("workers of %s have unlike object groups (windows, states): they cannot hit together; "+
			"as stages of a pipeline, start the server without --separate-object-groups", in.model))
	} else if newest != nil && newest.fingerprint != in.fingerprint {
		s.log.Warn(fmt.Sprintf("workers of %s have unlike layouts: chunk %s, and now %s. Stages of a pipeline may; of two engines, "+
			"lookups follow the newer one and the other one's chunks are misses", in.model, newest.fingerprint, in.fingerprint))
	}
	return nil
}

// makeRoom drops a worker for in where too many are registered.
func (s *Server) makeRoom(in *instance) {
	if silent := s.registry.crowd(in); silent != nil {
		s.drop(silent, fmt.Sprintf("%d workers are registered, most of them by %v", s.opts.MaxInstances, silent.by))
	}
}

// registerKVCache takes a worker whose KV the server copies. The protocol has no
// negative reply to it, so a refused worker is remembered and its transfers are
// declined.
func (s *Server) registerKVCache(sc *scratch, p [][]byte) error {
	reg, err := lmcache.DecodeKVCache(p)
	if err != nil {
		return err
	}
	if s.draining.Load() {
		return errDraining
	}
	sc.conn.name(reg.InstanceID)
	if sc.conn.generations.NeedsEvent(reg.OnCPU()) {
		return s.refuseEvents(sc, &reg)
	}
	var in *instance
	if s.opts.RefuseDriven {
		err = fmt.Errorf("%w: --supported-transfer-mode excludes lmcache_driven: "+
			"set lmcache.mp.mp_transfer_mode=engine_driven in kv_connector_extra_config", errDriven)
	} else if err = s.sameChunks(sc); err == nil {
		in, err = s.newDrivenInstance(&reg, sc.caller())
	}
	if err == nil {
		in.generations = sc.conn.generations
		return s.admit(in)
	}
	in = &instance{id: reg.InstanceID, model: reg.Model, world: reg.WorldSize, refuse: safelog.Text(err.Error(), safelog.MaxText)}
	in.cameFrom(sc.caller())
	s.makeRoom(in)
	old, _, aerr := s.registry.add(in)
	if aerr != nil {
		return errors.Join(err, aerr)
	}
	s.log.Error(fmt.Sprintf("refused worker %d of %s: %v", in.id, in.model, err))
	if old != nil {
		s.left(old, "registered again")
		s.save()
	}
	return nil
}

// newDrivenInstance opens the memory of a worker whose transfers are served.
func (s *Server) newDrivenInstance(reg *lmcache.KVCache, who *caller) (*instance, error) {
	d, err := newDriven(reg, s.opts.ChunkTokens, s.opts.SeparateGroups, s.opts.ShmDir, who)
	if err != nil {
		return nil, err
	}
	if d.bytes > s.store.PoolBytes() {
		return nil, errors.Join(fmt.Errorf("%w: %w", errDriven, s.tooLarge(d.bytes)), d.memory.close())
	}
	s.lendOnce.Do(func() { close(s.lending) })
	fp := d.fingerprint()
	in := &instance{
		id: reg.InstanceID, model: reg.Model, world: reg.WorldSize, layout: d.layout, bytes: d.bytes,
		fingerprint: fp, unsalt: kv.NamespaceOf(reg.Model, "", fp), driven: d,
	}
	in.cameFrom(who)
	return in, nil
}

func (s *Server) unregister(sc *scratch, p [][]byte) error {
	id, err := lmcache.DecodeInt(p[0])
	if err != nil {
		return fmt.Errorf("instance_id: %w", err)
	}
	if in := s.registry.remove(id, sc.caller().by); in != nil {
		s.log.Info(fmt.Sprintf("worker %d of %s unregistered", in.id, in.model))
		s.left(in, "unregistered")
		s.save()
	}
	return nil
}

func (s *Server) reap(now time.Time) {
	for _, in := range s.registry.silent(now, s.opts.WorkerReap, s.opts.RegistrationGrace) {
		s.n.reaped.Add(1)
		s.log.Warn(fmt.Sprintf("worker %d of %s dropped: silent for %v", in.id, in.model,
			s.registry.silence(in, now).Round(time.Second)))
		s.left(in, "fell silent")
		s.save()
	}
}

// drop ends the registration of a worker that can no longer end it itself.
func (s *Server) drop(in *instance, why string) {
	if !s.registry.removeThis(in) {
		return // it has registered anew meanwhile, or somebody else has dropped it
	}
	s.n.reaped.Add(1)
	s.log.Warn(fmt.Sprintf("worker %d of %s dropped: %s", in.id, in.model, why))
	s.left(in, "was dropped")
	s.save()
}

// left settles what a worker leaves that is no longer registered.
func (s *Server) left(in *instance, how string) {
	if n := s.store.Detach(in.key); n > 0 {
		s.log.Warn(fmt.Sprintf("worker %d %s with %d transfers in progress: their slots are in quarantine", in.id, how, n))
		s.registry.bury(in)
	}
	if in.driven == nil {
		return
	}
	s.remains.add(in.driven.memory.list())
	if err := in.driven.memory.close(); err != nil {
		s.log.Warn("unmap a worker's memory", "error", err)
	}
}

// sweep removes what dead engines left in shared memory. Only segments that a
// worker had registered with this server, and that its process made, are touched.
func (s *Server) sweep() {
	inUse := func(l lent) bool {
		for _, in := range s.registry.list() {
			if in.driven != nil && in.driven.memory.has(l) {
				return true
			}
		}
		return false
	}
	removed := func(l lent) {
		s.n.swept.Add(1)
		s.log.Info(fmt.Sprintf("removed /dev/shm/%s: the engine (process %d) is gone", l.Name, l.Owner.PID))
	}
	if s.remains.sweep(s.opts.ShmDir, inUse, removed) {
		s.save()
	}
}

// sayGroups tells what a worker's KV groups become.
func (s *Server) sayGroups(in *instance) {
	for i, o := range in.driven.objects {
		s.log.Info(fmt.Sprintf("worker %d object group %d: KV groups %v, window %d tokens, %s per chunk", in.id, i, o.kernels, o.rule.Window, kv.FormatBytes(o.bytes)))
	}
	if in.driven.merged() {
		s.log.Warn(fmt.Sprintf("worker %d of %s has windows or states; without --separate-object-groups a hit needs all chunks of all groups", in.id, in.model))
	}
}
