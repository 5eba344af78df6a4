// SPDX-License-Identifier: Apache-2.0

package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sort"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/safelog"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/explain"
	"github.com/kvasir-kv/kvasir/server/lookup"
	"github.com/kvasir-kv/kvasir/server/usage"
	"github.com/kvasir-kv/kvasir/server/workers"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/miss"
)

// transferOf returns the transfer that a worker's request means. A commit may come from a worker that was dropped meanwhile: it still means
// that the worker does not touch the slots any more.
func (s *Server) transferOf(sc *scratch, r *lmcache.KeyRange, commit bool) (*workers.Worker, hold.Transfer, error) {
	if err := s.sameChunks(sc); err != nil {
		return nil, hold.Transfer{}, err
	}
	k, id := r.Key, r.InstanceID
	t := hold.Transfer{By: sc.caller().Name, Shard: object.Shard{World: k.WorldSize, Index: k.Worker}, From: r.From, To: r.To}
	if r.To > 0 {
		t.Last = k.Hashes[r.To-1]
	}
	sc.conn.name(id)
	by := sc.caller().By
	in, err := s.registry.Get(id, by)
	known := in
	if err != nil {
		known = s.registry.Departed(id, by)
	}
	if known != nil {
		t.Instance = known.Key
		t.Shard.Namespace = known.NamespaceOf(k.Salt)
		if known.Model == string(k.Model) { // else it is refused below
			s.nameSpace(t.Shard.Namespace, k.Model, k.Salt)
		}
	}
	if err != nil && commit {
		in = known
	}
	if in == nil {
		return nil, t, err
	}
	if !in.Generations.SameNumbers(sc.conn.generations) {
		return nil, t, fmt.Errorf("%w by a client of %s", workers.ErrUnknown, sc.conn.generations)
	}
	if in.World != k.WorldSize || in.Model != string(k.Model) {
		return nil, t, fmt.Errorf("%w as model %s, world size %d", workers.ErrUnknown, k.Model, k.WorldSize)
	}
	if in.Chunk != sc.chunk.tokens {
		return nil, t, fmt.Errorf("%w: the worker registered chunks of %d tokens, its connection has chunks of %d; restart the engine", errChunkSize, in.Chunk, sc.chunk.tokens)
	}
	t.Shard.Groups = in.Groups
	sc.mark()
	if s.registry.NoteShard(in, k.Worker) {
		s.save()
	}
	return in, t, nil
}

// slotsOf is transferOf for a worker that copies itself. Only such a worker may learn offsets in the pool.
func (s *Server) slotsOf(sc *scratch, r *lmcache.KeyRange, commit bool) (*workers.Worker, hold.Transfer, error) {
	in, t, err := s.transferOf(sc, r, commit)
	if err == nil && in.Lent != nil {
		err = errMode
	}
	return in, t, err
}

func noRoom(got store.Reserved, t hold.Transfer, chunkBytes int64) error {
	why := "everything else is pinned, being transferred or in quarantine"
	if got.Share {
		why = "the worker, or all of " + t.By + ", have their share of the pool staged and not committed"
	}
	return fmt.Errorf("%w: %d of %d chunks of %d bytes do not fit; %s", errRoom, got.NoRoom, t.To-t.From, chunkBytes, why)
}

// nothingToStore answers a prepare_store that stores nothing. The worker takes the answer as "all cached" and sends no commit.
func nothingToStore(sc *scratch, in *workers.Worker) {
	sc.out = lmcache.AppendPrepareStore(sc.out[:0], &lmcache.Slots{Layouts: in.Objects})
}

// placed copies the places of a transfer into sc.slots, by group and then by chunk.
func (sc *scratch) placed(in *workers.Worker) {
	sc.slots = lmcache.Slots{Layouts: in.Objects, Lengths: sc.slots.Lengths[:0], Offsets: sc.place.Offsets, Indices: sc.place.Indices, Groups: sc.place.Groups}
	for g := range in.Objects {
		sc.slots.Lengths = append(sc.slots.Lengths, in.Groups.Bytes(g))
	}
	if len(in.Objects) > 1 {
		sort.Sort(&sc.slots)
	}
}

// skipped returns a function that reports which objects a worker does not store. `by` has, for each object group, the chunks that the
// worker leaves out. A nil function means that it stores all.
func skipped(in *workers.Worker, by [][]int) (func(group, chunk int) bool, error) {
	switch {
	case len(by) == 0:
		return nil, nil
	case len(by) != len(in.Objects) || len(in.Objects) == 1:
		return nil, fmt.Errorf("%w: it names %d groups, the worker registered %d", lmcache.ErrSkipped, len(by), len(in.Objects))
	}
	type object struct{ group, chunk int }
	skip := make(map[object]bool)
	for g, chunks := range by {
		for _, c := range chunks {
			skip[object{g, c}] = true
		}
	}
	if len(skip) == 0 {
		return nil, nil
	}
	return func(group, chunk int) bool { return skip[object{group, chunk}] }, nil
}

func (s *Server) prepareStore(sc *scratch, r *lmcache.PrepareStoreRequest) error {
	in, t, err := s.slotsOf(sc, &r.KeyRange, false)
	if err != nil {
		return err
	}
	if s.draining.Load() {
		return errDraining
	}
	pickles := in.Side() == workers.Pickle
	if pickles && s.opts.Pickle == PickleOff && !r.Key.Packed {
		return errPickle
	}
	s.n.storesSubmitted.Add(false)
	skip, err := skipped(in, r.Skipped)
	if err != nil {
		return err
	}
	if r.Key.SkipSave {
		s.n.storesFinished.Add(false)
		nothingToStore(sc, in)
		return nil
	}
	if pickles { // the objects come with the commit
		sc.out = lmcache.AppendPrepareStore(sc.out, nil)
		return nil
	}
	sc.place.Skip, sc.place.TTL, sc.place.Marked = skip, s.ttlOf(r.Key), in.Pins
	got, err := s.store.BeginStore(t, r.Key.RequestID, r.Key.Hashes, &sc.place)
	sc.place.Skip, sc.place.TTL, sc.place.Marked = nil, 0, false
	if err != nil {
		return err
	}
	if got.NoRoom > 0 {
		s.refuse(lmcache.OpPrepareStore, noRoom(got, t, in.Bytes))
	}
	if len(sc.place.Offsets) == 0 { // no commit will follow
		s.n.storesFinished.Add(false)
		nothingToStore(sc, in)
		return nil
	}
	sc.placed(in)
	sc.out = lmcache.AppendPrepareStore(sc.out, &sc.slots)
	return nil
}

// ttlOf returns how long the objects that a request stores are served; 0: without an end. A TTL that cannot be used is counted, and the
// first one is logged.
func (s *Server) ttlOf(k *lmcache.KeyView) time.Duration {
	if k.BadTTL && s.n.badTTLs.Add(1) == 1 {
		s.log.Warn("a request's lmcache.ttl is ignored: it is not a number of seconds, or a text of one, from 0.001 to ten years. What the request stores has no end. "+
			"Further ones are counted in kvasir_request_ttls_ignored_total", "request", safelog.Text(string(k.RequestID), 128), "model", safelog.Text(string(k.Model), 128))
	}
	return k.TTL
}

func (s *Server) commitStore(sc *scratch, r *lmcache.CommitStoreRequest) error {
	in, t, err := s.slotsOf(sc, &r.KeyRange, true)
	if err != nil {
		return err
	}
	if len(r.Data) > 0 {
		return s.commitInline(sc, in, t, r)
	}
	got, ok := in.CommitPlaces(func(publish bool) store.Committed {
		return s.store.CommitStore(t, r.Key.RequestID, r.Key.Hashes, publish)
	})
	switch {
	case !got.Found:
		return errNoCommit
	case got.Late:
		return errLate
	case !ok:
		return errSide
	case got.Unwritten:
		s.copiesElsewhere(in)
		return errElsewhere
	}
	sc.out = lmcache.AppendBool(sc.out, got.Chunks > 0)
	s.n.storesFinished.Add(false)
	if got.Chunks > 0 {
		s.announce(sc.chunk, r.Key, &t.Shard, t.From, t.To)
		s.logMoved("stored", got.Chunks, sc.chunk, int64(got.Chunks)*in.Bytes, r.Key.RequestID)
	}
	return nil
}

func (s *Server) prepareRetrieve(sc *scratch, r *lmcache.PrepareRetrieveRequest) error {
	in, t, err := s.slotsOf(sc, &r.KeyRange, false)
	t.Load = true // also while the server shuts down: a lookup has promised the load
	if err != nil {
		if t.Shard.Namespace != (kv.Namespace{}) { // LMCache's own workers send the commit of a refused prepare, too
			s.store.Refuse(r.Key.RequestID, t)
		}
		return err
	}
	s.n.retrievesSubmitted.Add(false)
	if in.Side() == workers.Pickle {
		return s.retrieveInline(sc, in, t, r.Key)
	}
	if why := s.store.BeginLoad(r.Key.RequestID, t, r.Key.Hashes, &sc.place); why != miss.None {
		return fmt.Errorf("%w: %s", errMiss, why)
	}
	sc.placed(in)
	sc.out = lmcache.AppendPrepareRetrieve(sc.out, &sc.slots)
	return nil
}

func (s *Server) commitRetrieve(sc *scratch, r *lmcache.CommitRetrieveRequest) error {
	in, t, err := s.slotsOf(sc, &r.KeyRange, true)
	if err != nil {
		return err
	}
	t.Load = true
	got := s.store.CommitLoad(t, r.Key.RequestID)
	switch {
	case !got.Found && in.Side() == workers.Pickle: // the worker was given no places
		sc.out = lmcache.AppendBool(sc.out, true)
		return nil
	case !got.Found:
		return errNoCommit
	case got.Late:
		return errLate
	}
	sc.out = lmcache.AppendBool(sc.out, true)
	if got.Chunks == 0 {
		return nil // also for the commit that clients send after a refused prepare
	}
	s.n.retrievesFinished.Add(false)
	s.tally.Loaded(in.Model, r.Key.Salt, in.ID, got.Chunks)
	s.logMoved("retrieved", got.Chunks, sc.chunk, int64(got.Chunks)*in.Bytes, r.Key.RequestID)
	return nil
}

func (s *Server) lookup(sc *scratch, r *lmcache.LookupRequest) error {
	k := r.Key
	asked, tokens := r.To, sc.chunk.tokens
	q := s.query(sc, k)
	if q.Named { // the lookup counts as a request of that worker, and wakes it
		_, _ = s.registry.Get(q.Worker, q.By) // whether it may be served is seen below
	}
	s.settleReaders(sc, k, r.TensorParallel)
	target, unknown := s.registry.Target(&q, k.WorldSize*k.Readers)
	sh, registered := target.Shard, !errors.Is(unknown, workers.ErrNoWorker)
	s.store.NotePrompt(k.RequestID, sc.caller().Owner(), k.Chunks)
	if len(k.Salt) > 0 {
		s.n.salted.Add(1)
	}
	ended := lookup.Outcome{Request: k.RequestID, Model: k.Model, Salt: k.Salt, Registered: registered, ChunkTokens: tokens}
	if why, err := s.mayLookUp(sc, k, asked, target.Loaders, unknown); why != miss.None {
		s.store.NoHit(k.RequestID, sc.caller().Owner())
		ended.Why, ended.PromptTokens, ended.Detail = why, k.End, fmt.Sprintf("it has %d tokens, a chunk has %d", k.End, tokens)
		if err != nil {
			ended.Detail = err.Error()
		}
		s.lookupEnded(&ended)
		return err
	}
	sc.mark()
	s.nameShard(sh, k)
	asked = s.loadable(target.Inline, r)
	prompt := store.Prompt{Chunks: asked, Tokens: tokens, From: r.From, Owner: sc.caller().Owner(), Note: s.noteOf(sc, k, sh.Namespace, asked, r.From), Hashes: func(n int) []kv.Hash {
		sc.chunk.memo.Hash(k, n)
		return k.Hashes
	}}
	if got := s.store.Lookup(k.RequestID, sh, prompt, k.Readers); got.State == store.Ready {
		ended.LookupResult, ended.Searched, ended.Text = got, true, lookup.Text{Memo: sc.chunk.memo, Key: k}
		s.lookupEnded(&ended)
	} else { // the request for the lookup's result will name neither model nor salt
		s.nameSpace(sh.Namespace, k.Model, k.Salt)
	}
	s.announceFound(sc.chunk, k, &sh)
	return nil
}

// promptNote is what a lookup remembers about its prompt until it ends.
type promptNote struct {
	tags     *usage.Tagged
	repeated *lookup.Repeated
}

// noteOf returns the note of a lookup of the first `asked` chunks, of which the engine itself has those before number `from`. If there are
// tiers below the pool, the reason of a miss is known only later, when the prompt's tokens are gone. So noteOf compares the prompt with
// earlier ones now, from the first chunk that the memo does not remember: if the lookup misses there, that chunk is new.
func (s *Server) noteOf(sc *scratch, k *lmcache.KeyView, ns kv.Namespace, asked, from int) any {
	tags := s.tally.Tagged(sc.caller().Name, k.Tags)
	if fresh := max(len(k.Hashes), from); s.store.AsksBelow() && fresh < asked {
		if r := s.beginnings.Compare(ns, lookup.Text{Memo: sc.chunk.memo, Key: k}, fresh, asked); r != nil {
			return &promptNote{tags, r}
		}
	}
	return tags
}

// mayLookUp returns why a lookup must not search; miss.None: it may. The error is nil for a prompt that is too short, and for one that must
// load nothing: their hit is 0. asked is how many chunks the lookup asks for, and loaders how many workers can load the hit. unknown is the
// error if no shard is known to search in.
func (s *Server) mayLookUp(sc *scratch, k *lmcache.KeyView, asked, loaders int, unknown error) (miss.Reason, error) {
	same := s.sameChunks(sc) // it records who asks
	need := k.WorldSize * k.Readers
	switch {
	case sc.denied == errTenant:
		return miss.ForeignTenant, errTenant
	case sc.denied != nil:
		return miss.Unsigned, sc.denied
	case asked == 0:
		return miss.Short, nil
	case errors.Is(unknown, workers.ErrNoWorker):
		return miss.Unregistered, fmt.Errorf("%w: model %s, world size %d", errModel, k.Model, k.WorldSize)
	case unknown != nil:
		return miss.Declined, unknown
	case k.SkipLoad:
		return miss.SkipLoad, nil
	case k.Readers == 0:
		return miss.Declined, errReaders
	case s.draining.Load():
		return miss.Declined, errDraining
	case same != nil:
		return miss.Declined, same
	case loaders < need:
		return miss.Declined, fmt.Errorf("%w: %d can, and model %s needs %d", errFewWorkers, loaders, k.Model, need)
	}
	return miss.None, nil
}

// Explain returns why the last lookups of a request id found no more, or those of all requests if request is empty; `most` lookups at most.
func (s *Server) Explain(request string, most int) explain.Explanation {
	var st *Status
	return s.ended.Explain(request, most, func(why miss.Reason) string {
		if st == nil {
			now := s.Status()
			st = &now
		}
		return st.adviceFor(why.String())
	})
}

// ExplainTo is Explain for a reader who may see only the tenants of limit: it returns `most` lookups of these tenants at most.
func (s *Server) ExplainTo(request string, most int, limit *auth.Limit) explain.Explanation {
	return s.ended.ExplainTo(request, most, limit.Allows)
}

// nameSpace records the model and salt of a namespace in the server's names, and its tenant in the store. It allocates nothing for a known
// namespace.
func (s *Server) nameSpace(ns kv.Namespace, model, salt []byte) {
	s.store.NameTenant(ns, salt)
	if _, ok := s.names.Of(ns); !ok {
		s.names.Add(ns, string(model), salt)
	}
}

// nameShard records for the tiers the model and salt by which other programs name the chunks of a shard, and for the store the tenant of
// that shard.
func (s *Server) nameShard(sh object.Shard, k *lmcache.KeyView) {
	if s.opts.Names == nil && !s.store.NamesTenants() {
		return
	}
	s.nameSpace(sh.Namespace, k.Model, k.Salt)
	if sh.Each != nil {
		for _, l := range *sh.Each {
			s.nameSpace(l.Namespace, k.Model, k.Salt)
		}
	}
}

// ChunksOf returns the chunk sizes of the workers of a model and world size. The server's own size comes first if it is among them; it is
// the only one if there are no such workers.
func (s *Server) ChunksOf(model string, world int) []int {
	sizes, _ := s.registry.ChunksOf(0, self.By, []byte(model), world, workers.AnyBase)
	if len(sizes) == 0 {
		return []int{s.opts.ChunkTokens}
	}
	if i := slices.Index(sizes, s.opts.ChunkTokens); i > 0 {
		sizes[0], sizes[i] = sizes[i], sizes[0]
	}
	return sizes
}

// ShardsOf returns the shards in which a client that is not a worker looks up the chunks of a model, salt, world size and chunk size: one
// for each layout of the model. There are none if no worker of the model is registered.
func (s *Server) ShardsOf(model, salt string, world, chunk int) []object.Shard {
	k := lmcache.KeyView{Model: []byte(model), Salt: []byte(salt)}
	list := s.registry.EachShardsOf(&workers.Query{Model: k.Model, Salt: k.Salt, World: world, Chunk: chunk})
	for _, sh := range list {
		s.nameShard(sh, &k)
	}
	return list
}

// Registry returns the registry of workers.
func (s *Server) Registry() *workers.Registry { return s.registry }

// Options returns the options with which the server was started, defaults filled in.
func (s *Server) Options() Options { return s.opts }

// lookupEnded passes the outcome of a lookup to everything that records outcomes.
func (s *Server) lookupEnded(o *lookup.Outcome) {
	o.ChunkTokens = cmp.Or(o.ChunkTokens, o.Tokens, s.opts.ChunkTokens)
	if n, ok := o.Note.(*promptNote); ok {
		o.Note, o.Repeated = n.tags, n.repeated
	}
	s.tally.Lookup(o)
	s.ended.Lookup(o)
	s.beginnings.Lookup(o)
	if !o.Searched {
		return
	}
	s.n.askedTokens.Add(uint64(o.AskedTokens())) // before hitTokens: see askedAndHit
	s.n.hitTokens.Add(uint64(o.HitTokens()))
	if o.Hit > o.From {
		s.n.hits.Add(1)
	}
	if o.Why.IsBelow() {
		s.n.tierMisses.Add(s.opts.Tiers, o.Tier, o.Why)
	}
	if s.log.Enabled(context.Background(), slog.LevelDebug) {
		s.log.Debug("lookup", "request", string(o.Request), "hit_tokens", o.HitTokens(), "asked_tokens", o.AskedTokens(),
			"waited", o.Waited, "next_chunk", o.Why.String(), "of_shard", o.Shard, "tier", o.Tier)
	}
}

func (s *Server) freeLookupLocks(sc *scratch, r *lmcache.FreeLookupLocksRequest) {
	s.settleReaders(sc, r.Key, r.TensorParallel)
	readers := max(r.Key.Readers, 1)
	s.store.FreePins(r.Key.RequestID, sc.caller().Owner(), r.From, r.To, readers)
	for _, a := range r.Abandoned {
		s.store.FreeAbandoned(r.Key.RequestID, sc.caller().Owner(), a.From, a.To, readers)
	}
}

// Store returns the store from which the Server answers.
func (s *Server) Store() *store.Store { return s.store }

// logMoved logs, at debug level, how many tokens, chunks and bytes a request moved. `of` says how many tokens a chunk has.
func (s *Server) logMoved(msg string, chunks int, of *chunking, bytes int64, request []byte) {
	if s.log.Enabled(context.Background(), slog.LevelDebug) {
		s.log.Debug(msg, "request", string(request), "tokens", chunks*of.tokens, "chunks", chunks, "bytes", bytes)
	}
}
