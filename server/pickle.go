// SPDX-License-Identifier: Apache-2.0

package server

import (
	"fmt"
	"slices"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/lmcache/pickle"
	"github.com/kvasir-kv/kvasir/server/workers"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// PickleMode says which workers' chunks may pass through the socket, as pickled lists of tensors, instead of through shared memory.
type PickleMode uint8

// The modes.
const (
	PickleOff  PickleMode = iota // no worker's: a worker that cannot map the pool is declined
	PickleOn                     // those of workers on other hosts, and of workers that could not map the pool
	PickleOnly                   // all workers': no worker is offered shared memory
)

// MaxPickleBytes is the size of the largest message that the protocol can carry. Options with a larger one are not valid.
const MaxPickleBytes = 1<<32 - 1

// routerLimits raises the limits on messages so that they may carry tensors, for peers of mayPickle only.
func (o *Options) routerLimits(r *zmtp.RouterOptions) {
	const message = 128 << 20 // the limit of a message without tensors
	r.MaxFrameBytes = max(plainFrame, o.PickleBytes+5)
	r.MaxMessageBytes = r.MaxFrameBytes + message - plainFrame
	all := max(r.MaxMessageBytes, min(4*r.MaxMessageBytes, systemMemory()/4))
	r.MaxReceiveBytes, r.MaxUnsentBytes = all, all
}

// plainFrame is the longest frame, in bytes, of a peer without a worker whose chunks pass through the socket.
const plainFrame = 64 << 20

// mayPickle reports whether a peer may send frames longer than plainFrame.
func (s *Server) mayPickle(p *zmtp.Peer) bool {
	c, ok := p.Identity().(*caller)
	return ok && s.registry.Pickles(c.By)
}

// pickles records, and logs at the first time, that the worker `in` sends its chunks with its commits: pickled, or in an envelope
// (enveloped). It reports false for a worker that has stored in the pool itself: its commit must be declined.
func (s *Server) pickles(in *workers.Worker, enveloped bool) bool {
	first, ok := in.TakeSide(workers.Pickle)
	if !ok || !first {
		return ok
	}
	if s.opts.Pickle == PickleOff && !enveloped {
		s.log.Warn("a worker cannot map the pool and sends pickled tensors, which this server does not read: "+
			"run it on the same host as the same user (containers: share /dev/shm, for example --ipc=host), or start the server with --pickle on",
			"worker", in.ID, "model", in.Model, "shm", s.store.Files().Name())
		return true
	}
	s.log.Info("a worker does not map the pool: its chunks pass through the socket", "worker", in.ID, "model", in.Model, "shm", s.store.Files().Name())
	s.save()
	return true
}

// logNotOffered logs, at a registration, why a worker is not given the pool's name.
func (s *Server) logNotOffered(in *workers.Worker, why error) {
	if s.opts.Pickle == PickleOff && !in.Envelopes {
		s.log.Warn("a worker is declined; start the server with --pickle on to take its chunks through the socket", "worker", in.ID, "model", in.Model, "err", why)
		return
	}
	s.log.Info("a worker's chunks pass through the socket", "worker", in.ID, "model", in.Model, "why", why)
}

// inline gives access to the objects that the message of a commit_store carries.
type inline struct {
	at func(group, chunk int) []byte // nil: the message has no such object
}

// commitInline answers a commit_store that carries the chunks of [start, end): in an envelope since 0.5.7, pickled before. They are visible
// before the reply is sent.
func (s *Server) commitInline(sc *scratch, in *workers.Worker, t hold.Transfer, r *lmcache.CommitStoreRequest) error {
	ok := s.pickles(in, r.Key.Packed)
	// If the worker was offered the pool, it may have taken places there. It has not written them.
	s.store.CommitStore(t, r.Key.RequestID, r.Key.Hashes, false)
	if !ok && !r.Key.Packed {
		return errSide
	}
	if s.opts.Pickle == PickleOff && !r.Key.Packed {
		return errPickle
	}
	if s.draining.Load() {
		return errDraining
	}
	if _, err := s.registry.Get(in.ID, sc.caller().By); err != nil {
		return errLate
	}
	objects, err := s.inlineOf(in, t, r)
	if err != nil {
		return err
	}
	cp := &store.Transfer{Own: true, TTL: s.ttlOf(r.Key), Skip: func(group, chunk int) bool { return objects.at(group, chunk) == nil }}
	got, err := s.store.BeginStore(t, r.Key.RequestID, r.Key.Hashes, cp)
	if err != nil {
		return err
	}
	if got.NoRoom > 0 {
		err = noRoom(got, t, in.Bytes)
		if len(cp.Parts) == 0 {
			return err
		}
		s.refuse(lmcache.OpCommitStore, err)
	}
	if len(cp.Parts) > 0 {
		bytes := 0
		err := s.guardCopy(lmcache.OpCommitStore)(func() {
			for _, part := range cp.Parts {
				bytes += copy(part.Bytes, objects.at(part.Group, part.Chunk))
			}
		})
		if err := s.copyDone(r.Key, cp, err); err != nil {
			return err
		}
		s.announce(sc.chunk, r.Key, &t.Shard, t.From, t.To)
		s.n.pickledIn.Add(uint64(bytes))
		s.logCopied("stored", cp, &blockCopy{key: r.Key, chunk: sc.chunk})
	}
	s.n.storesFinished.Add(false)
	sc.out = lmcache.AppendBool(sc.out, true)
	return nil
}

// inlineOf decodes the objects that a commit_store carries.
func (s *Server) inlineOf(in *workers.Worker, t hold.Transfer, r *lmcache.CommitStoreRequest) (inline, error) {
	if !r.Key.Packed {
		tensors, err := s.tensorsOf(in, t, r.Data)
		return inline{func(_, chunk int) []byte { return tensors[chunk].Data }}, err
	}
	if int64(len(r.Data)) > s.opts.PickleBytes {
		return inline{}, fmt.Errorf("%w: it takes %s, --pickle-max-mib allows %s", lmcache.ErrEnvelope, kv.FormatBytes(int64(len(r.Data))), kv.FormatBytes(s.opts.PickleBytes))
	}
	e, err := lmcache.DecodeEnvelope(r.Data, in.Objects, t.To-t.From)
	return inline{func(group, chunk int) []byte {
		g := &e.Groups[group]
		if i, ok := slices.BinarySearch(g.Chunks, chunk); ok {
			return g.Data[i]
		}
		return nil
	}}, err
}

// tensorsOf decodes one tensor for each chunk of t. All must have the worker's layout.
func (s *Server) tensorsOf(in *workers.Worker, t hold.Transfer, data []byte) ([]pickle.Tensor, error) {
	if int64(len(data)) > s.opts.PickleBytes {
		return nil, fmt.Errorf("%w: they take %s, --pickle-max-mib allows %s", errTensors, kv.FormatBytes(int64(len(data))), kv.FormatBytes(s.opts.PickleBytes))
	}
	tensors, err := pickle.Read(data, t.To-t.From)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errTensors, err)
	}
	if len(tensors) != t.To-t.From {
		return nil, fmt.Errorf("%w: %d tensors for %d chunks", errTensors, len(tensors), t.To-t.From)
	}
	for i, x := range tensors {
		if x.DType != in.Layout.DType || !slices.Equal(x.Shape, in.Layout.Shape()) || int64(len(x.Data)) != in.Bytes {
			return nil, fmt.Errorf("%w: tensor %d is %v %s, registered is %v %s", errTensors, i, x.Shape, x.DType, in.Layout.Shape(), in.Layout.DType)
		}
	}
	return tensors, nil
}

// retrieveInline answers prepare_retrieve with the chunks themselves: in an envelope for keys of 0.5.7, otherwise pickled. The
// commit_retrieve that follows has nothing to end.
func (s *Server) retrieveInline(sc *scratch, in *workers.Worker, t hold.Transfer, key *lmcache.KeyView) error {
	if s.opts.Pickle == PickleOff && !key.Packed {
		return errPickle
	}
	n := t.To - t.From
	layout, ok := pickle.NewLayout(in.Layout.DType, in.Layout.Shape())
	if !key.Packed && (!ok || int64(layout.Bytes()) != in.Bytes) {
		return fmt.Errorf("%w: chunks of %v %s cannot be pickled", errTensors, in.Layout.Shape(), in.Layout.DType)
	}
	if n > s.inlineChunks(in) {
		return fmt.Errorf("%w: %d chunks of %s in one message; --pickle-max-mib allows %s", errTensors, n, kv.FormatBytes(in.Bytes), kv.FormatBytes(s.opts.PickleBytes))
	}
	over := overhead(in)
	size := n*int(in.Bytes+over) + int(over)
	if sc.peer != nil && !s.router.HasRoom(sc.peer, int64(size)) {
		return fmt.Errorf("%w: the next reply needs %s more", errUnread, kv.FormatBytes(int64(size)))
	}
	cp := &store.Transfer{Own: true}
	if why := s.store.BeginLoad(key.RequestID, t, key.Hashes, cp); why != miss.None {
		return fmt.Errorf("%w: %s", errMiss, why)
	}
	sc.out = slices.Grow(sc.out, size)
	err := s.guardCopy(lmcache.OpPrepareRetrieve)(func() {
		if key.Packed {
			sc.out = lmcache.AppendEnveloped(sc.out, in.Objects, envelopeOf(in, cp.Parts))
			return
		}
		byChunk := make([][]byte, n)
		for _, part := range cp.Parts {
			byChunk[part.Chunk] = part.Bytes
		}
		sc.out = lmcache.AppendPickled(sc.out, func(b []byte) []byte {
			return layout.Append(b, n, func(i int, dst []byte) { copy(dst, byChunk[i]) })
		})
	})
	if err := s.copyDone(key, cp, err); err != nil {
		return err
	}
	bytes := 0
	for _, part := range cp.Parts {
		bytes += len(part.Bytes)
	}
	s.n.pickledOut.Add(uint64(bytes))
	s.n.retrievesFinished.Add(false)
	s.tally.Loaded(in.Model, key.Salt, in.ID, s.logCopied("retrieved", cp, &blockCopy{key: key, chunk: sc.chunk}))
	return nil
}

// overhead returns the most bytes that each chunk adds to a message besides the chunk's own bytes. The message itself takes as many once.
func overhead(in *workers.Worker) int64 {
	return int64(pickle.Overhead) * int64(max(1, len(in.Objects)))
}

// inlineChunks returns how many chunks of a worker fit into one message.
func (s *Server) inlineChunks(in *workers.Worker) int {
	over := overhead(in) // divided, because the product might overflow
	return int(max(s.opts.PickleBytes-over, 0) / (in.Bytes + over))
}

// loadable returns how many chunks a lookup may find so that its engine can load them: if a worker's chunks pass through the socket, a load
// is one message.
func (s *Server) loadable(in *workers.Worker, r *lmcache.LookupRequest) int {
	if in != nil {
		return min(r.To, r.From+s.inlineChunks(in))
	}
	return r.To
}

// envelopeOf returns the objects of a load, by group and in the order of chunks.
func envelopeOf(in *workers.Worker, parts []store.Part) *lmcache.Envelope {
	e := &lmcache.Envelope{Groups: make([]lmcache.EnvelopeGroup, len(in.Objects))}
	for _, part := range parts { // for each group in the order of its chunks
		g := &e.Groups[part.Group]
		g.Chunks, g.Data = append(g.Chunks, part.Chunk), append(g.Data, part.Bytes)
	}
	return e
}

// keepLarge is the largest reply whose memory is used again for the next one.
const keepLarge = 1 << 20

// sendLarge sends a reply without a copy of its result: the memory is given away.
func (sc *scratch) sendLarge(p *zmtp.Peer, reply [][]byte) error {
	own := [][]byte{slices.Clone(reply[0]), slices.Clone(reply[1]), reply[2]} // the first two belong to the request
	sc.out, sc.frames = nil, [3][]byte{}
	return p.SendOwned(own...)
}
