package server

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/pool"
)

// note is what is kept beside the pool for the server that takes over.
type note struct {
	Workers []json.RawMessage // savedWorkers, in the order of their registrations
	Remains []lent            // segments of workers that left and whose process lived on
	PIDs    string            // the PID namespace in which processes are named
}

// savedWorker is a registration.
type savedWorker struct {
	ID      int64
	Model   string
	World   int
	Layout  kv.Layout
	Pinged  bool
	Shard   int              `json:",omitempty"` // 1 + the shard it keeps
	By      principal        // who may speak for it
	Side    side             `json:",omitzero"`  // where its chunks pass
	Client  string           `json:",omitempty"` // generations that it can be of; empty: any
	Process peercred.Process `json:",omitzero"`  // which registered it, where that is proved
	KV      json.RawMessage  `json:",omitzero"`  // lmcache.KVCache of a worker whose KV the server copies
	Lent    []lent           `json:",omitempty"`
}

// noteEvery is the least time between two writes of the note. One that takes long
// makes the next wait ten times as long.
const noteEvery = 100 * time.Millisecond

// saving is when and how the note is written.
type saving struct {
	sync.Mutex           // orders the writes
	next       time.Time // not before
	due        bool      // something has changed since the last one
	wake       chan struct{}
	failed     bool // the last time
	left       int  // workers that did not fit then
}

// save keeps the registrations beside the pool, so that a server that takes over
// after this one knows the workers that map it: now, or soon when that was done
// just now.
func (s *Server) save() {
	s.saving.Lock()
	defer s.saving.Unlock()
	if time.Now().Before(s.saving.next) {
		s.saving.due = true
		select {
		case s.saving.wake <- struct{}{}:
		default:
		}
		return
	}
	s.saveLocked()
}

// saveDue writes what is still to be saved.
func (s *Server) saveDue() {
	s.saving.Lock()
	defer s.saving.Unlock()
	if s.saving.due {
		s.saveLocked()
	}
}

// keepNote saves, until ctx ends, what could not be at once.
func (s *Server) keepNote(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.saving.wake:
		}
		s.saving.Lock()
		wait := time.NewTimer(time.Until(s.saving.next))
		s.saving.Unlock()
		select {
		case <-ctx.Done():
			wait.Stop()
			return
		case <-wait.C:
			s.saveDue()
		}
	}
}

func (s *Server) saveLocked() {
	began := time.Now()
	s.saving.due = false
	b, left, err := s.note()
	if err == nil {
		err = s.store.SetNote(b)
	}
	if err != nil {
		s.n.noteFailures.Add(1)
	}
	if err != nil && !s.saving.failed {
		s.log.Warn("registrations are not kept for a restart", "error", err)
	}
	if left > s.saving.left {
		s.log.Warn(fmt.Sprintf("%d registrations do not fit into the note of %s, the largest ones: after a restart they would have to be made again",
			left, kv.FormatBytes(pool.MaxNote)))
	}
	s.saving.failed, s.saving.left = err != nil, left
	now := time.Now()
	s.saving.next = now.Add(max(noteEvery, 10*now.Sub(began)))
}

// note encodes what is to be kept. Of registrations that do not fit, the largest
// are left out.
func (s *Server) note() (b []byte, left int, err error) {
	n := note{Remains: s.remains.all(), PIDs: peercred.Namespace()}
	total := 1 << 10 // braces and names
	for _, l := range n.Remains {
		total += len(l.Name) + 128
	}
	for _, in := range s.registry.list() {
		if in.refuse != "" {
			continue
		}
		w, err := json.Marshal(in.saved())
		if err != nil {
			return nil, 0, err
		}
		n.Workers = append(n.Workers, w)
		total += len(w) + 1
	}
	for total > pool.MaxNote && len(n.Workers) > 0 {
		i := 0
		for j := range n.Workers {
			if len(n.Workers[j]) > len(n.Workers[i]) {
				i = j
			}
		}
		total -= len(n.Workers[i]) + 1
		n.Workers = slices.Delete(n.Workers, i, i+1)
		left++
	}
	b, err = json.Marshal(&n)
	return b, left, err
}

func (in *instance) saved() *savedWorker {
	w := &savedWorker{
		ID: in.id, Model: in.model, World: in.world, Layout: in.layout, Pinged: in.pinged.Load(), Shard: int(in.shard.Load()), By: in.by, Side: in.side(),
		Client: in.generations.String(),
	}
	if p := in.process.Load(); p != nil {
		w.Process = *p
	}
	if in.driven != nil {
		w.KV, w.Lent = in.driven.encoded(), in.driven.segments
	}
	return w
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
	s.complete = b != nil
	here := n.PIDs == peercred.Namespace()
	s.remains.add(known(n.Remains, here))
	for _, raw := range n.Workers {
		var w savedWorker
		if err := json.Unmarshal(raw, &w); err != nil {
			s.log.Warn("a worker of the earlier server is not taken over; it registers again at its next heartbeat", "error", err)
			s.complete = false
			continue
		}
		w.Lent = known(w.Lent, here)
		in, err := s.revive(&w)
		if err != nil {
			s.log.Warn(fmt.Sprintf("worker %d of %s is not taken over; it registers again at its next heartbeat", w.ID, w.Model), "error", err)
			s.complete = false
			continue
		}
		// A heartbeat without an id counts once the worker has named itself.
		in.pinged.Store(w.Pinged && !in.generations.PingsWithoutID())
		in.owned(w.By)
		in.takeSide(w.Side)
		if here && w.Process != (peercred.Process{}) {
			in.process.Store(&w.Process)
		}
		in.shard.Store(int32(min(max(w.Shard, 0), w.World)))
		if _, _, err := s.registry.add(in); err != nil {
			if in.driven != nil {
				err = errors.Join(err, in.driven.memory.close())
			}
			s.complete = false
			s.log.Warn(fmt.Sprintf("worker %d of %s is not taken over", w.ID, w.Model), "error", err)
		}
	}
	if st := s.store.Stats(); st.RestoredChunks > 0 || len(n.Workers) > 0 {
		s.log.Info(fmt.Sprintf("took over %d chunks (%s) and %d workers of the earlier server; %s wait in quarantine",
			st.RestoredChunks, kv.FormatBytes(st.ResidentBytes), len(s.registry.list()), kv.FormatBytes(st.CondemnedBytes)))
	}
}

// known returns segments as the note names them. The numbers of processes mean
// something only in the PID namespace where they were noted.
func known(list []lent, here bool) []lent {
	if !here {
		for i := range list {
			list[i].Owner = peercred.Process{}
		}
	}
	return list
}

// revive makes a saved worker's instance again. The memory it lent must still be
// the same: under the name of a segment there may be another process' by now.
func (s *Server) revive(w *savedWorker) (*instance, error) {
	if w.World < 1 || w.World > kv.MaxWorldSize {
		return nil, fmt.Errorf("world size %d", w.World)
	}
	client, err := lmcache.ParseGenerations(w.Client)
	if err != nil {
		return nil, err
	}
	client = cmp.Or(client, lmcache.AllGenerations)
	if w.KV == nil {
		if why := s.callerAgain(w.By).mayOpen(); why != nil || s.opts.Pickle == PickleOnly { // by the flags of now
			if w.Side == sidePlaces {
				return nil, cmp.Or(why, errNotTold)
			}
			w.Side = sidePickle
		}
		in, err := s.newInstance(w.ID, w.Model, w.World, w.Layout)
		in.generations = client
		return in, err
	}
	if s.opts.RefuseDriven {
		return nil, errMode
	}
	var reg lmcache.KVCache
	if err := json.Unmarshal(w.KV, &reg); err != nil {
		return nil, err
	}
	in, err := s.newDrivenInstance(&reg, s.callerAgain(w.By))
	if err != nil {
		s.remains.add(w.Lent)
		return nil, err
	}
	in.generations = client
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
