// SPDX-License-Identifier: Apache-2.0

package server

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/access"
	"github.com/kvasir-kv/kvasir/server/lent"
	"github.com/kvasir-kv/kvasir/server/workers"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// noteEvery is the least time between two writes of the note. After a write that takes long the next one waits longer.
const noteEvery = 100 * time.Millisecond

// noteState is the outcome of the last write of the note, so that the next one logs only what is new. Only Server.saving, which never runs
// two writes at the same time, uses it.
type noteState struct {
	failed bool
	left   int // workers for which the note had no room
}

// save writes the registrations beside the pool, now or shortly after the last write. A server that takes over then knows the workers that
// map the pool.
func (s *Server) save() { s.saving.Changed() }

// writeNote writes the registrations beside the pool. Only saving calls it.
func (s *Server) writeNote() {
	b, left, err := s.registry.Encode(workers.Note{Remains: s.leftovers.All(), Chunks: s.sizes.announced(), Mixed: s.names.MixedModels()}, pool.MaxNote)
	if err == nil {
		err = s.store.Files().SetNote(b)
	}
	if err != nil {
		s.n.noteFailures.Add(1)
	}
	if err != nil && !s.noted.failed {
		s.log.Warn("registrations of workers are not kept for a restart", "err", err)
	}
	if left > s.noted.left {
		s.log.Warn("the largest registrations of workers do not fit into the note beside the pool: after a restart they would have to be made again",
			"registrations", left, "note_bytes", pool.MaxNote)
	}
	s.noted = noteState{err != nil, left}
}

// restore registers the workers of an earlier server's note that are still valid. The others are asked to register again at their next
// ping.
func (s *Server) restore() {
	b, err := s.store.Files().Note()
	var n workers.Note
	if err == nil && b != nil {
		n, err = workers.DecodeNote(b)
	}
	if err != nil {
		s.log.Warn("workers of the earlier server are not known: those of vLLM register again at their next heartbeat, those of SGLang when their engines are restarted", "err", err)
		return
	}
	s.complete = b != nil
	s.leftovers.Add(n.Remains)
	s.sizes.remember(n.Chunks)
	for _, model := range n.Mixed {
		s.names.Mix(model)
	}
	s.registry.PinnedOther(n.Pages)
	for i := range n.Workers {
		w, err := n.Worker(i)
		if err != nil {
			s.log.Warn("a worker of the earlier server is not taken over: one of vLLM registers again at its next heartbeat, one of SGLang when its engine is restarted", "err", err)
			s.complete = false
			continue
		}
		in, err := s.revive(w)
		if err != nil {
			s.registry.NotTaken(w, cmp.Or(w.Chunk, s.opts.ChunkTokens))
			if errors.Is(err, errGrown) {
				s.registry.PinsOther(w.ID, w.By)
				defer s.save() // the next server could not find this out, because it finds the pool at its present size
			}
			s.log.Warn("a worker of the earlier server is not taken over: one of vLLM registers again at its next heartbeat, one of SGLang when its engine is restarted", "worker", w.ID, "model", w.Model, "err", err)
			s.complete = false
			continue
		}
		// A heartbeat without an id counts only after the worker has named itself.
		in.Base = w.Base
		in.Pinged.Store(w.Pinged && !in.Generations.PingsWithoutID())
		in.BelongsTo(w.By)
		in.Taken = true
		in.TakeSide(w.Side)
		if w.Process != (peercred.Process{}) {
			in.IsOf(w.Process)
		}
		if w.Asleep {
			in.Sleep()
		}
		in.SetShard(w.Shard - 1)
		if _, _, err := s.registry.Add(in); err != nil {
			if in.Lent != nil {
				err = errors.Join(err, in.Lent.Close())
			}
			s.complete = false
			s.registry.NotTaken(w, in.Chunk)
			s.log.Warn("a worker of the earlier server is not taken over", "worker", w.ID, "model", w.Model, "err", err)
			continue
		}
		s.mixLayouts(in)
		if s.opts.Publisher != nil {
			s.opts.Publisher.IntroduceModel(in.Model)
		}
		// Its chunks may be written to the tiers before any request names the model.
		s.names.Add(in.NamespaceOf(nil), in.Model, nil)
	}
	if st := s.store.Stats(); st.RestoredChunks > 0 || len(n.Workers) > 0 {
		s.log.Info("took over the earlier server's pool", "chunks", st.RestoredChunks, "bytes", st.ResidentBytes,
			"workers", len(s.registry.List()), "quarantined_bytes", st.CondemnedBytes)
	}
}

// errGrown means that a worker's mapping is of the pool before it became larger.
var errGrown = errors.New("the pool is larger now than what the worker maps")

// revive makes a Worker of a saved registration. The memory that the worker lent must be unchanged, because a segment of another process
// may have its name by now.
func (s *Server) revive(w *workers.Saved) (*workers.Worker, error) {
	if w.World < 1 || w.World > kv.MaxWorldSize {
		return nil, fmt.Errorf("its world size %d is outside 1 to %d", w.World, kv.MaxWorldSize)
	}
	client, err := lmcache.ParseGenerations(w.Client)
	if err != nil {
		return nil, err
	}
	client = cmp.Or(client, lmcache.AllGenerations)
	chunk := cmp.Or(w.Chunk, s.opts.ChunkTokens)
	if chunk < 1 || chunk > kv.MaxChunkTokens {
		return nil, fmt.Errorf("its chunks of %d tokens are outside 1 to %d", chunk, kv.MaxChunkTokens)
	}
	if w.KV == nil {
		if why := s.callerAgain(w.By).MayOpen(); why != nil || s.opts.Pickle == PickleOnly { // judged by the present flags
			if w.Side == workers.Places {
				return nil, cmp.Or(why, access.ErrMayNotOpen)
			}
			w.Side = workers.Pickle
		}
		mapped := min(cmp.Or(w.Mapped, s.store.Files().FormerBytes()), s.store.Files().Bytes())
		pins := s.mayPin(w.Process.PID)
		if pins { // its device still has the pages that a smaller pool gave back
			mapped = min(mapped, s.store.Files().FormerBytes())
		}
		if w.Side != workers.Pickle && mapped < s.store.Files().Bytes() {
			return nil, errGrown
		}
		reg := lmcache.EngineDriven{
			InstanceID: w.ID, Model: w.Model, WorldSize: w.World, Layers: w.Layout.Layers, Hidden: w.Layout.Hidden, DType: w.Layout.DType,
			SinglePlane: w.Layout.SinglePlane, PhysicalSlots: w.Layout.Slots, Groups: w.Groups,
		}
		in, err := s.newEngineDriven(&reg, chunk)
		if err != nil {
			return nil, err
		}
		in.Generations, in.Mapped, in.Pins = client, mapped, pins
		return in, nil
	}
	if s.opts.RefuseDriven {
		return nil, errMode
	}
	var reg lmcache.KVCache
	if err := json.Unmarshal(w.KV, &reg); err != nil {
		return nil, err
	}
	in, err := s.newDrivenInstance(&reg, s.callerAgain(w.By), chunk)
	if err != nil {
		s.leftovers.Add(w.Lent)
		return nil, err
	}
	in.Generations = client
	for _, l := range w.Lent {
		if !in.Lent.Maps(l) {
			_ = in.Lent.Close()
			s.leftovers.Add(w.Lent)
			return nil, fmt.Errorf("%w: %s is no longer the file that the worker registered: it was replaced while the server was down", lent.ErrMemory, l.Name)
		}
	}
	in.Lent.Recognise(w.Lent)
	return in, nil
}
