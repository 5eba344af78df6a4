package server

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
)

// note is what is kept beside the pool for the server that takes over.
type note struct {
	Workers []savedWorker
	Remains []lent // segments of workers that left and whose process lived on
}

// savedWorker is a registration.
type savedWorker struct {
	ID     int64
	Model  string
	World  int
	Layout kv.Layout
	Pinged bool
	Shard  int              `json:",omitempty"` // 1 + the shard it keeps
	By     principal        // who may speak for it
	Side   side             `json:",omitzero"`  // where its chunks pass
	KV     *lmcache.KVCache `json:",omitempty"` // of a worker whose KV the server copies
	Lent   []lent           `json:",omitempty"`
}

// save keeps the registrations beside the pool, so that a server that takes over
// after this one knows the workers that map it.
func (s *Server) save() {
	s.saving.Lock()
	defer s.saving.Unlock()
	n := note{Remains: s.remains.all()}
	for _, in := range s.registry.list() {
		if in.refuse != "" {
			continue
		}
		w := savedWorker{ID: in.id, Model: in.model, World: in.world, Layout: in.layout, Pinged: in.pinged.Load(), Shard: int(in.shard.Load()), By: in.by, Side: in.side()}
		if in.driven != nil {
			w.KV, w.Lent = &in.driven.reg, in.driven.memory.list()
		}
		n.Workers = append(n.Workers, w)
	}
	b, err := json.Marshal(&n)
	if err == nil {
		err = s.store.SetNote(b)
	}
	if err != nil {
		s.log.Warn("registrations are not kept for a restart", "error", err)
	}
}

// restore registers the workers that an earlier server knew, as far as they
// still make sense. The others are asked to register again by their next ping.
func (s *Server) restore() {
	b, err := s.store.Note()
	var n note
	if err == nil && b != nil {
		err = json.Unmarshal(b, &n)
	}
	if err != nil {
		s.log.Warn("workers of the earlier server are not known; they register again at their next heartbeat", "error", err)
		return
	}
	s.remains.add(n.Remains)
	for i := range n.Workers {
		w := &n.Workers[i]
		in, err := s.revive(w)
		if err != nil {
			s.log.Warn(fmt.Sprintf("worker %d of %s is not taken over; it registers again at its next heartbeat", w.ID, w.Model), "error", err)
			continue
		}
		in.pinged.Store(w.Pinged)
		in.by = w.By
		in.takeSide(w.Side)
		in.shard.Store(int32(min(max(w.Shard, 0), w.World)))
		if _, _, err := s.registry.add(in); err != nil {
			if in.driven != nil {
				err = errors.Join(err, in.driven.memory.close())
			}
			s.log.Warn(fmt.Sprintf("worker %d of %s is not taken over", w.ID, w.Model), "error", err)
		}
	}
	if st := s.store.Stats(); st.RestoredChunks > 0 || len(n.Workers) > 0 {
		s.log.Info(fmt.Sprintf("took over %d chunks (%s) and %d workers of the earlier server; %s wait in quarantine",
			st.RestoredChunks, kv.FormatBytes(st.ResidentBytes), len(s.registry.list()), kv.FormatBytes(st.CondemnedBytes)))
	}
}

// revive makes a saved worker's instance again. The memory it lent must still be
// the same: under the name of a segment there may be another process' by now.
func (s *Server) revive(w *savedWorker) (*instance, error) {
	if w.World < 1 || w.World > kv.MaxWorldSize {
		return nil, fmt.Errorf("world size %d", w.World)
	}
	if w.KV == nil {
		return s.newInstance(w.ID, w.Model, w.World, w.Layout)
	}
	if s.opts.RefuseDriven {
		return nil, errMode
	}
	in, err := s.newDrivenInstance(w.KV, s.callerAgain(w.By))
	if err != nil {
		s.remains.add(w.Lent)
		return nil, err
	}
	for _, l := range w.Lent {
		if !in.driven.memory.has(l) {
			_ = in.driven.memory.close()
			s.remains.add(w.Lent)
			return nil, fmt.Errorf("%w: %s is another one by now", errLent, l.Name)
		}
	}
	in.driven.memory.prove(w.Lent)
	in.driven.segments = in.driven.memory.list()
	return in, nil
}

// newInstance makes a worker that copies itself.
func (s *Server) newInstance(id int64, model string, world int, layout kv.Layout) (*instance, error) {
	bytes, err := layout.Bytes()
	if err == nil && bytes > s.store.PoolBytes() {
		err = s.tooLarge(bytes)
	}
	fp := layout.Fingerprint()
	return &instance{
		id: id, model: model, world: world, layout: layout, bytes: bytes, fingerprint: fp, unsalt: kv.NamespaceOf(model, "", fp),
	}, err
}

func (s *Server) tooLarge(bytes int64) error {
	return fmt.Errorf("a chunk takes %s, the pool has %s: raise --l1-size-gb", kv.FormatBytes(bytes), kv.FormatBytes(s.store.PoolBytes()))
}

// callerAgain is the caller that a worker of the note registered as.
func (s *Server) callerAgain(by principal) *caller {
	if by.User {
		return &caller{peer: peercred.Peer{UID: by.UID}, by: by}
	}
	return s.callerOf(peercred.Peer{Addr: by.Addr, Err: peercred.ErrNotHere})
}
