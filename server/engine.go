package server

import (
	"errors"
	"fmt"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/store"
)

// transferOf decodes the [key, instance_id] that begin every transfer's call
// and names the transfer it speaks of. A commit may come from a worker that was
// dropped in between: it still tells that the worker is done with the slots.
func (s *Server) transferOf(sc *scratch, p [][]byte, commit bool) (*instance, store.Transfer, error) {
	var t store.Transfer
	if err := s.memo.DecodeKey(p[0], &sc.key); err != nil {
		return nil, t, err
	}
	if err := s.sameChunks(sc); err != nil {
		return nil, t, err
	}
	id, err := lmcache.DecodeInt(p[1])
	if err != nil {
		return nil, t, fmt.Errorf("instance_id: %w", err)
	}
	k := &sc.key
	from, to, err := k.ChunkRange(s.opts.ChunkTokens)
	if err != nil {
		return nil, t, err
	}
	if k.Worker == lmcache.AllWorkers {
		return nil, t, fmt.Errorf("%w: worker_id is nil", lmcache.ErrKey)
	}
	s.memo.Hash(k, to)
	t = store.Transfer{By: sc.caller().name, Shard: store.Shard{World: k.WorldSize, Index: k.Worker}, From: from, To: to}
	if to > 0 {
		t.Last = k.Hashes[to-1]
	}
	sc.conn.name(id)
	by := sc.caller().by
	in, err := s.registry.get(id, by)
	known := in
	if err != nil {
		known = s.registry.dropped(id, by)
	}
	if known != nil {
		t.Instance = known.key
		t.Shard.Namespace = known.namespace(k.Salt)
	}
	if err != nil && commit {
		in = known
	}
	if in == nil {
		return nil, t, err
	}
	if in.generations&sc.conn.generations == 0 {
		return nil, t, fmt.Errorf("%w by a client of %s", errInstance, sc.conn.generations)
	}
	if in.world != k.WorldSize || in.model != string(k.Model) {
		return nil, t, fmt.Errorf("%w as %s, world size %d", errInstance, k.Model, k.WorldSize)
	}
	t.Shard.Groups = in.groups()
	sc.mark()
	if s.registry.keeps(in, k.Worker) {
		s.save()
	}
	return in, t, nil
}

// slotsOf is transferOf for a worker that copies itself: only such a one may be
// told offsets.
func (s *Server) slotsOf(sc *scratch, p [][]byte, commit bool) (*instance, store.Transfer, error) {
	in, t, err := s.transferOf(sc, p, commit)
	if err == nil && in.driven != nil {
		err = errMode
	}
	return in, t, err
}

func noRoom(got store.Reserved, t store.Transfer, chunkBytes int64) error {
	why := "everything else is pinned, being transferred or in quarantine"
	if got.Share {
		why = "the worker, or all of " + t.By + ", have their share of the pool staged and not committed"
	}
	return fmt.Errorf("%w: %d of %d chunks of %d bytes; %s", errRoom, got.NoRoom, t.To-t.From, chunkBytes, why)
}

// nothingToStore answers a prepare_store that stores nothing: the worker takes
// it as "all cached" and sends no commit.
func nothingToStore(sc *scratch) {
	sc.out = lmcache.AppendPrepareStore(sc.out[:0], &lmcache.Slots{})
}

func (s *Server) prepareStore(sc *scratch, p [][]byte) error {
	in, t, err := s.slotsOf(sc, p, false)
	if err != nil {
		return err
	}
	if s.draining.Load() {
		return errDraining
	}
	pickles := in.side() == sidePickle
	if pickles && s.opts.Pickle == PickleOff {
		return errPickle
	}
	s.n.storesSubmitted.Add(1)
	if pickles { // the chunks come with the commit
		sc.out = lmcache.AppendPrepareStore(sc.out, nil)
		return nil
	}
	s.provide(t.To-t.From, in.bytes)
	got, err := s.store.Reserve(t, sc.key.RequestID, sc.key.Hashes, in.bytes, &sc.place)
	if err != nil {
		return err
	}
	if got.NoRoom > 0 {
		s.refuse(lmcache.OpPrepareStore, noRoom(got, t, in.bytes))
	}
	if len(sc.place.Offsets) == 0 { // no commit will come
		s.n.storesFinished.Add(1)
		nothingToStore(sc)
		return nil
	}
	sc.slots = lmcache.Slots{Layout: in.layout, Length: in.bytes, Offsets: sc.place.Offsets, Indices: sc.place.Indices}
	sc.out = lmcache.AppendPrepareStore(sc.out, &sc.slots)
	return nil
}

func (s *Server) commitStore(sc *scratch, p [][]byte) error {
	in, t, err := s.slotsOf(sc, p, true)
	if err != nil {
		return err
	}
	data, err := lmcache.DecodeBytes(p[2])
	if err != nil {
		return fmt.Errorf("data: %w", err)
	}
	if len(data) > 0 {
		return s.commitPickle(sc, in, t, data)
	}
	got, ok := in.commitPlaces(func(publish bool) store.Committed {
		return s.store.CommitStore(t, sc.key.RequestID, sc.key.Hashes, publish)
	})
	switch {
	case !got.Found:
		return errNoCommit
	case got.Late:
		return errLate
	case !ok:
		return errSide
	}
	sc.out = lmcache.AppendBool(sc.out, got.Chunks > 0)
	s.n.storesFinished.Add(1)
	if got.Chunks > 0 {
		s.sayMoved("stored", got.Chunks, int64(got.Chunks)*in.bytes, sc.key.RequestID)
	}
	return nil
}

func (s *Server) prepareRetrieve(sc *scratch, p [][]byte) error {
	in, t, err := s.slotsOf(sc, p, false)
	if err == nil && s.draining.Load() {
		err = errDraining
	}
	t.Load = true
	if err != nil {
		if t.Shard.Namespace != (kv.Namespace{}) { // stock workers send the commit of a refused prepare, too
			s.store.Refuse(sc.key.RequestID, t)
		}
		return err
	}
	s.n.retrievesSubmitted.Add(1)
	if in.side() == sidePickle {
		return s.retrievePickle(sc, in, t)
	}
	if why := s.store.Load(sc.key.RequestID, t, sc.key.Hashes, &sc.place); why != store.None {
		return fmt.Errorf("%w: %s", errMiss, why)
	}
	sc.slots = lmcache.Slots{Layout: in.layout, Length: in.bytes, Offsets: sc.place.Offsets}
	sc.out = lmcache.AppendPrepareRetrieve(sc.out, &sc.slots)
	return nil
}

func (s *Server) commitRetrieve(sc *scratch, p [][]byte) error {
	in, t, err := s.slotsOf(sc, p, true)
	if err != nil {
		return err
	}
	t.Load = true
	got := s.store.CommitLoad(t, sc.key.RequestID)
	switch {
	case !got.Found && in.side() == sidePickle: // it was told no places
		sc.out = lmcache.AppendBool(sc.out, true)
		return nil
	case !got.Found:
		return errNoCommit
	case got.Late:
		return errLate
	}
	sc.out = lmcache.AppendBool(sc.out, true)
	if got.Chunks == 0 {
		return nil // the commit that clients send after a refused prepare, too
	}
	s.n.retrievesFinished.Add(1)
	s.sayMoved("retrieved", got.Chunks, int64(got.Chunks)*in.bytes, sc.key.RequestID)
	return nil
}

func (s *Server) lookup(sc *scratch, p [][]byte) error {
	if err := s.memo.DecodeKey(p[0], &sc.key); err != nil {
		return err
	}
	k := &sc.key
	asked := min(k.End/s.opts.ChunkTokens, k.Chunks)
	sh, ok := s.registry.shardsOf(k.Model, k.Salt, k.WorldSize, sc.caller().by)
	if err := s.settleReaders(k, p[1], sc.caller().by); err != nil {
		return err
	}
	var err error
	same := s.sameChunks(sc)
	switch {
	case asked == 0: // shorter than a chunk: a hit of 0, not an error
	case !ok:
		err = fmt.Errorf("%w: %s, %d", errModel, k.Model, k.WorldSize)
	case k.Readers == 0:
		err = errReaders
	case s.draining.Load():
		err = errDraining
	case same != nil:
		err = same
	default:
		sc.mark()
		prompt := store.Prompt{Chunks: asked, Owner: sc.caller().owner(), Hashes: func(n int) []kv.Hash {
			s.memo.Hash(k, n)
			return k.Hashes
		}}
		s.looked(k, asked, s.store.Lookup(k.RequestID, sh, prompt, k.Readers))
		return nil
	}
	s.store.NoHit(k.RequestID, sc.caller().owner())
	s.n.earlyExits.Add(1)
	return err
}

// looked counts a lookup and says why it was not a whole hit.
func (s *Server) looked(k *lmcache.KeyView, asked int, got store.Looked) {
	c := s.opts.ChunkTokens
	s.n.askedTokens.Add(uint64(asked * c))
	s.n.hitTokens.Add(uint64(got.Hit * c))
	if got.Reason != store.None {
		s.n.misses[got.Reason].Add(1)
	}
	if !s.debug() {
		return
	}
	if got.Reason == store.None {
		s.log.Debug(fmt.Sprintf("hit %d of %d tokens for req %s", got.Hit*c, asked*c, k.RequestID))
		return
	}
	s.log.Debug(fmt.Sprintf("hit %d of %d tokens for req %s; the next chunk of shard %d: %s",
		got.Hit*c, asked*c, k.RequestID, got.Shard, got.Reason))
}

// prefetchStatus answers query_prefetch_status and wait_prefetch_status, which
// has nothing to wait for: lookups are done when they are acknowledged.
func (s *Server) prefetchStatus(sc *scratch, p [][]byte) error {
	id, err := requestID(p[0])
	if err != nil {
		return err
	}
	if len(p) == 2 {
		if _, err := lmcache.DecodeFloat(p[1]); err != nil {
			return fmt.Errorf("timeout: %w", err)
		}
	}
	sc.out = lmcache.AppendInt(sc.out, int64(s.store.TakeHit(id, sc.caller().owner())))
	return nil
}

func (s *Server) freeLookupLocks(sc *scratch, p [][]byte) error {
	if err := s.memo.DecodeKey(p[0], &sc.key); err != nil {
		return err
	}
	k := &sc.key
	from, to, err := k.ChunkRange(s.opts.ChunkTokens)
	if err != nil {
		return err
	}
	if err := s.settleReaders(k, p[1], sc.caller().by); err != nil {
		return err
	}
	s.store.FreePins(k.RequestID, sc.caller().owner(), from, to, max(k.Readers, 1))
	return nil
}

func (s *Server) endSession(sc *scratch, p [][]byte) error {
	id, err := requestID(p[0])
	if err == nil {
		s.store.EndSession(id, sc.caller().owner())
	}
	return err
}

func (s *Server) clear(p [][]byte) error {
	force := false
	if len(p) == 1 {
		var err error
		if force, err = lmcache.DecodeBool(p[0]); err != nil {
			return err
		}
	}
	s.Clear(force)
	return nil
}

// Clear drops every chunk that nothing needs, and with force every chunk.
func (s *Server) Clear(force bool) int {
	n := s.store.Clear(force)
	s.log.Info(fmt.Sprintf("cleared %d chunks", n), "force", force)
	return n
}

func requestID(frame []byte) ([]byte, error) {
	id, err := lmcache.DecodeString(frame)
	if err == nil && len(id) > lmcache.MaxRequestBytes {
		err = errors.New("too long")
	}
	if err != nil {
		return nil, fmt.Errorf("request_id: %w", err)
	}
	return id, nil
}

func (s *Server) sayMoved(verb string, chunks int, bytes int64, request []byte) {
	s.log.Info(fmt.Sprintf("%s %d tokens (%d chunks, %s) for req %s", verb, chunks*s.opts.ChunkTokens, chunks, kv.FormatBytes(bytes), request))
}
