// SPDX-License-Identifier: Apache-2.0

package server

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/internal/safelog"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/coordinator"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/lent"
	"github.com/kvasir-kv/kvasir/server/workers"
)

func (s *Server) ping(sc *scratch, r *lmcache.PingRequest) {
	id, ok := r.InstanceID, r.OfWorker
	answer, news := true, false // without a worker the answer is true
	if r.Bare {
		id, ok, answer = s.pinger(sc.conn)
	}
	if ok {
		answer, news = s.registry.Ping(id, sc.caller().By)
	}
	if news {
		s.save()
	}
	if answer && sc.conn.mustRefuseHeartbeat() {
		answer = false
	}
	if r.OfWorker { // a client that was connected to an earlier server names its worker by this
		sc.conn.name(id)
	}
	if ok {
		s.streams.notePing(streamKey{sc.caller().By, id})
	}
	sc.out = lmcache.AppendBool(sc.out, answer)
}

func (s *Server) registerEngineDriven(sc *scratch, reg *lmcache.EngineDriven) error {
	if s.draining.Load() {
		return errDraining
	}
	if s.opts.RefuseEngine {
		return fmt.Errorf("%w: --supported-transfer-mode excludes engine_driven", errUnsupported)
	}
	chunk, err := s.chunkOf(sc, reg.InstanceID, []byte(reg.Model), reg.WorldSize)
	if err == nil {
		err = reg.Unread.Err()
	}
	if err == nil {
		err = s.sameChunks(sc)
	}
	if err == nil && reg.PhysicalSlots > chunk.tokens {
		err = fmt.Errorf("%w: it cuts chunks of %d tokens, this server of %d; restart the engine, or the server with --chunk-size %d",
			errChunkSize, reg.PhysicalSlots, chunk.tokens, reg.PhysicalSlots)
	}
	var in *workers.Worker
	if err == nil {
		in, err = s.newEngineDriven(reg, chunk.tokens)
	}
	if err != nil {
		s.log.Error("a worker is refused", "worker", reg.InstanceID, "model", reg.Model, "err", err)
		return fmt.Errorf("%w: %w", errUnsupported, err)
	}
	in.CameFrom(&sc.caller().Caller)
	in.Generations, in.Envelopes, in.Base = sc.conn.generations, reg.HasGroups, sc.conn.base
	sc.conn.name(in.ID)
	if in.Generations.PickleOnly() {
		return s.registerPickleOnly(sc, in)
	}
	why := sc.caller().MayOpen()
	if why == nil {
		why = s.seesPool(sc.caller())
	}
	in.Pins = sc.caller() != self && s.mayPin(sc.caller().pid)
	if why == nil {
		why = s.pinsOther(in, sc.caller().pid)
	}
	must := why != nil || s.opts.Pickle == PickleOnly
	if must {
		in.TakeSide(workers.Pickle)
	} else {
		in.Mapped = s.store.Files().Bytes()
	}
	answer := lmcache.Pool{HasNullBlock: reg.HasGroups || sc.conn.generations.Has(lmcache.Gen057)}
	if err := s.admit(in); err != nil {
		return err
	}
	sc.mark()
	if why != nil {
		s.logNotOffered(in, why)
	}
	if !must {
		answer.ShmName, answer.Bytes = s.store.Files().Name(), in.Mapped
	}
	sc.out = answer.Append(sc.out)
	return nil
}

// admit adds a worker to the registry and settles what its earlier registration left. On an error it closes the memory that the worker
// lends, because the worker was never registered.
func (s *Server) admit(in *workers.Worker) error {
	s.makeRoom(in)
	old, lender, err := s.registry.Add(in)
	for lender != nil && lender.Lent.Dead() {
		s.drop(lender, fmt.Sprintf("its process %d has ended", lender.Lent.Segments[0].Owner.PID))
		old, lender, err = s.registry.Add(in)
	}
	if err != nil {
		if in.Lent != nil {
			err = errors.Join(err, in.Lent.Close())
		}
		s.registry.ForgetUnknown(in.ID, in.By) // its next ping counts as its first, and makes it register again
		return err
	}
	if old != nil {
		s.detachWorker(old, "registered again")
	}
	s.mixLayouts(in)
	s.save()
	if s.opts.Publisher != nil {
		s.opts.Publisher.IntroduceModel(in.Model)
	}
	if old != nil && old.Refused == "" {
		return nil
	}
	s.log.Info("a worker registered", "worker", in.ID, "model", in.Model, "world_size", in.World, "peer", in.By.String(),
		"chunk_tokens", in.Chunk, "chunk_shape", in.Layout.Shape(), "dtype", in.Layout.DType, "chunk_bytes", in.Bytes)
	s.logGroups(in)
	s.logLayouts(in)
	return nil
}

// logLayouts logs the consequences if the model of a newly registered worker also has other layouts.
func (s *Server) logLayouts(in *workers.Worker) {
	u := s.registry.Unlike(in)
	switch {
	case u.Groups:
		s.log.Warn("workers of one model have unlike object groups (windows, states): they cannot hit together; "+
			"as stages of a pipeline, start the server without --separate-object-groups", "model", in.Model)
	case u.Declined:
		s.log.Warn("workers of one model have unlike layouts, and lookups over connections that have named no worker are declined: give the engines unlike model names, or a server each",
			"model", in.Model, "layouts", u.Layouts)
	case u.Layouts > 1:
		s.log.Info("workers of one model have unlike layouts: each layout has chunks of its own", "model", in.Model, "layouts", u.Layouts)
	}
}

// mixLayouts excludes the chunks of a worker's model from tiers that cannot tell its layouts apart.
func (s *Server) mixLayouts(in *workers.Worker) {
	if s.registry.Unlike(in).Equal {
		s.names.Mix(in.Model)
	}
}

// makeRoom drops another worker if too many are registered, to make room for the worker `in`.
func (s *Server) makeRoom(in *workers.Worker) {
	if silent := s.registry.Crowd(in); silent != nil {
		s.drop(silent, fmt.Sprintf("%d workers are registered, most of them by %v", s.opts.MaxInstances, silent.By))
	}
}

// registerKVCache registers a worker whose KV the server copies. The protocol has no negative reply to it, so a refused worker is
// remembered, and its transfers are declined.
func (s *Server) registerKVCache(sc *scratch, reg *lmcache.KVCache) (err error) {
	if s.draining.Load() {
		return errDraining
	}
	sc.conn.name(reg.InstanceID)
	if sc.conn.generations.NeedsEvent(reg.OnCPU()) {
		return s.refuseEvents(sc, reg)
	}
	var in *workers.Worker
	if s.opts.RefuseDriven {
		err = fmt.Errorf("%w: --supported-transfer-mode excludes lmcache_driven: "+
			"set lmcache.mp.mp_transfer_mode=engine_driven in kv_connector_extra_config", lent.ErrRegistration)
	} else if err = s.sameChunks(sc); err == nil {
		var chunk *chunking
		if chunk, err = s.chunkOf(sc, reg.InstanceID, []byte(reg.Model), reg.WorldSize); err == nil {
			in, err = s.newDrivenInstance(reg, sc.caller(), chunk.tokens)
		}
	}
	if err == nil {
		in.Generations, in.Base = sc.conn.generations, sc.conn.base
		return s.admit(in)
	}
	in = &workers.Worker{ID: reg.InstanceID, Model: reg.Model, World: reg.WorldSize, Refused: safelog.Text(err.Error(), safelog.MaxText)}
	in.CameFrom(&sc.caller().Caller)
	s.makeRoom(in)
	old, _, aerr := s.registry.Add(in)
	if aerr != nil {
		return errors.Join(err, aerr)
	}
	s.log.Error("a worker is refused", "worker", in.ID, "model", in.Model, "err", err)
	if old != nil {
		s.detachWorker(old, "registered again")
		s.save()
	}
	return nil
}

// newDrivenInstance opens the memory that a worker lends, and returns the worker.
func (s *Server) newDrivenInstance(reg *lmcache.KVCache, who *caller, chunk int) (*workers.Worker, error) {
	d, err := lent.Open(reg, lent.Options{ChunkTokens: chunk, Separate: s.opts.SeparateGroups, Dir: s.opts.ShmDir, CPUViews: s.opts.SGLangCPUViews}, &who.Caller)
	if err != nil {
		return nil, err
	}
	if d.Bytes > s.store.Files().Bytes() {
		return nil, errors.Join(fmt.Errorf("%w: %w", lent.ErrRegistration, s.tooLarge(d.Bytes)), d.Close())
	}
	s.store.Memory().MapAhead()
	in := workers.New(reg.InstanceID, reg.Model, reg.WorldSize, chunk, []kv.Layout{d.Layout}, d.Bytes, d.Fingerprint(), d.Groups).AtRevision(s.opts.Revisions[reg.Model])
	in.Lent, in.Engine = d, d.EngineType()
	in.CameFrom(&who.Caller)
	return in, nil
}

func (s *Server) unregister(sc *scratch, id int64) {
	if sc.conn.worker == id {
		sc.conn.named = false
	}
	if in := s.registry.Remove(id, sc.caller().By); in != nil {
		s.log.Info("a worker unregistered", "worker", in.ID, "model", in.Model)
		s.detachWorker(in, "unregistered")
		s.save()
	}
}

func (s *Server) reap(now time.Time) {
	pinged, never := s.opts.silences()
	if pinged > 0 {
		s.streams.end(false, func(st *stream) bool { return now.UnixNano()-st.seen.Load() > int64(pinged) })
	}
	for _, in := range s.registry.Silent(now, pinged, never) {
		silence := s.registry.Silence(in, now).Round(time.Second)
		if in.Asleep() {
			s.log.Warn("a worker is asleep: it is silent and no process of it is seen; its next request wakes it", "worker", in.ID, "model", in.Model, "silent", silence)
		} else {
			s.n.reaped.Add(1)
			s.log.Warn("a worker was dropped: it is silent and no process of it is seen", "worker", in.ID, "model", in.Model, "silent", silence)
		}
		s.detachWorker(in, "fell silent")
		s.save()
	}
	if s.registry.Woke() {
		s.save()
	}
	switch n, one := s.registry.Strangers(now); {
	case n > 0 && !s.strangers:
		s.log.Warn("a worker sends heartbeats and does not register again, as SGLang: restart its engine", "worker", one, "workers", n)
		s.strangers = true
	case n == 0:
		s.strangers = false
	}
}

// drop ends the registration of a worker that can no longer end it itself, and logs `why`. It does nothing if that registration has ended
// already.
func (s *Server) drop(in *workers.Worker, why string) {
	if !s.registry.RemoveThis(in) {
		return // it has registered again meanwhile, or another goroutine has dropped it
	}
	s.n.reaped.Add(1)
	s.log.Warn("a worker was dropped", "worker", in.ID, "model", in.Model, "why", why)
	s.detachWorker(in, "was dropped")
	s.save()
}

// detachWorker settles what a worker leaves when its registration has ended: the slots of its transfers go into quarantine, and memory
// that it lent is unmapped. `how` says in the log how the registration ended.
func (s *Server) detachWorker(in *workers.Worker, how string) {
	if n := s.store.Detach(in.Key); n > 0 {
		s.log.Warn("a worker left transfers in progress: their slots are in quarantine", "worker", in.ID, "how", how, "transfers", n)
		s.registry.KeepDeparted(in)
	}
	if in.Lent == nil {
		return
	}
	s.leftovers.Add(in.Lent.Segments)
	if err := in.Lent.Close(); err != nil {
		s.log.Warn("a worker's memory cannot be unmapped", "worker", in.ID, "err", err)
	}
}

// sweep removes the shared memory that dead engines left. It touches only segments that a worker had registered with this server and that
// the worker's process made.
func (s *Server) sweep() {
	inUse := func(l lent.Segment) bool {
		for _, in := range s.registry.List() {
			if in.Lent != nil && in.Lent.Maps(l) {
				return true
			}
		}
		return false
	}
	removed := func(l lent.Segment) {
		s.n.swept.Add(1)
		s.log.Info("removed a shared-memory segment of a dead engine", "shm", l.Name, "pid", l.Owner.PID)
	}
	if s.leftovers.Sweep(s.opts.ShmDir, inUse, removed) {
		s.save()
	}
}

// logGroups logs the object groups of a worker that has several or lends its KV.
func (s *Server) logGroups(in *workers.Worker) {
	for i, g := range in.GroupLayouts {
		s.log.Info("a worker's object group", "worker", in.ID, "group", i, "window_chunks", g.WindowChunks, "recurrent", g.Recurrent,
			"chunk_shape", in.Objects[i].Shape(), "dtype", g.DType, "chunk_bytes", in.Groups.Bytes(i))
	}
	if in.Lent == nil {
		return
	}
	for i, o := range in.Lent.Objects {
		s.log.Info("a worker's object group", "worker", in.ID, "group", i, "kv_groups", o.Groups, "window_tokens", o.Rule.Window, "chunk_bytes", o.Bytes)
	}
	if in.Lent.Merged() {
		s.log.Warn("a worker has windows or states; without --separate-object-groups a hit needs all chunks of all groups", "worker", in.ID, "model", in.Model)
	}
}

// newEngineDriven returns a worker that copies itself, for chunks of `chunk` tokens.
func (s *Server) newEngineDriven(reg *lmcache.EngineDriven, chunk int) (*workers.Worker, error) {
	layouts, err := reg.Layouts(chunk)
	if err != nil {
		return nil, err
	}
	all := int64(0)
	groups, prints := make([]object.Group, len(layouts)), make([]string, len(layouts))
	for i, l := range layouts {
		bytes, err := l.Bytes()
		if err != nil {
			return nil, err
		}
		if all += bytes; all > s.store.Files().Bytes() || all < 0 {
			return nil, s.tooLarge(all)
		}
		groups[i], prints[i] = object.Group{ChunkGroup: coordinator.ChunkGroup{Window: -1}, Bytes: bytes}, l.Fingerprint()
		if len(layouts) == 1 {
			break
		}
		if n := reg.Groups[i].WindowChunks; n > 0 {
			groups[i].Window = n * chunk
		}
		prints[i] = fmt.Sprintf("%s window %d", prints[i], reg.Groups[i].WindowChunks)
	}
	if len(layouts) == 1 {
		return workers.New(reg.InstanceID, reg.Model, reg.WorldSize, chunk, layouts, all, prints[0], object.FullAttention(chunk, all)).AtRevision(s.opts.Revisions[reg.Model]), nil
	}
	rule, err := object.NewGroups(chunk, groups)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", lmcache.ErrGroups, err)
	}
	print := fmt.Sprintf("%s, chunks of %d tokens", strings.Join(prints, "; "), chunk)
	in := workers.New(reg.InstanceID, reg.Model, reg.WorldSize, chunk, layouts, all, print, rule).AtRevision(s.opts.Revisions[reg.Model])
	in.GroupLayouts = reg.Groups
	return in, nil
}

// tooLarge returns the error for a chunk that is larger than the pool.
func (s *Server) tooLarge(bytes int64) error {
	return fmt.Errorf("a chunk takes %s, the pool has %s: raise --l1-size-gb", kv.FormatBytes(bytes), kv.FormatBytes(s.store.Files().Bytes()))
}
