// SPDX-License-Identifier: Apache-2.0

package server

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/lmcache/pickle"
	"github.com/kvasir-kv/kvasir/server/workers"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// PickleMode says whose chunks may pass through the socket, as pickled lists of
// tensors, instead of shared memory.
type PickleMode uint8

// The modes.
const (
	PickleOff  PickleMode = iota // of no worker: a worker that cannot map the pool is declined
	PickleOn                     // those of workers on other hosts, and of workers that could not map the pool
	PickleOnly                   // of all workers: no worker is offered shared memory
)

// MaxPickleBytes is what the protocol can carry in one message.
const MaxPickleBytes = 1<<32 - 1

// routerLimits makes room for pickled tensors in messages.
func (o *Options) routerLimits(r *zmtp.RouterOptions) {
	if o.Pickle == PickleOff {
		return
	}
	const message = 128 << 20 // without them
	r.MaxFrameBytes = max(plainFrame, o.PickleBytes+5)
	r.MaxMessageBytes = r.MaxFrameBytes + message - plainFrame
	all := max(r.MaxMessageBytes, min(4*r.MaxMessageBytes, systemMemory()/4))
	r.MaxReceiveBytes, r.MaxUnsentBytes = all, all
}

// systemMemory is the machine's, bytes; 0 where it is unknown.
func systemMemory() int64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0
	}
	return int64(info.Totalram) * int64(info.Unit)
}

// plainFrame is the longest frame, bytes, of a peer that has no worker whose chunks
// pass through the socket.
const plainFrame = 64 << 20

// mayPickle reports whether a peer may send more than plainFrame at once.
func (s *Server) mayPickle(p *zmtp.Peer) bool {
	c, ok := p.Who().(*caller)
	return ok && s.registry.Pickles(c.By)
}

// pickles notes that in sends pickled tensors. It reports false for a worker that
// has stored in the pool itself.
func (s *Server) pickles(in *workers.Worker) bool {
	first, ok := in.TakeSide(workers.Pickle)
	if !ok || !first {
		return ok
	}
	if s.opts.Pickle == PickleOff {
		s.log.Warn("a worker cannot map the pool and sends pickled tensors, which this server does not read: "+
			"run it on the same host as the same user (containers: share /dev/shm, for example --ipc=host), or start the server with --pickle on",
			"worker", in.ID, "model", in.Model, "shm", s.store.Files().Name())
		return true
	}
	s.log.Info("a worker does not map the pool: its chunks pass through the socket", "worker", in.ID, "model", in.Model, "shm", s.store.Files().Name())
	s.save()
	return true
}

// logNotOffered logs at the registration why a worker does not learn the pool's name.
func (s *Server) logNotOffered(in *workers.Worker, why error) {
	if s.opts.Pickle == PickleOff {
		s.log.Warn("a worker is declined; start the server with --pickle on to take its chunks through the socket", "worker", in.ID, "model", in.Model, "err", why)
		return
	}
	s.log.Info("a worker's chunks pass through the socket", "worker", in.ID, "model", in.Model, "why", why)
}

// commitPickle answers a commit_store that carries the chunks of [start, end).
// They are visible before the reply is sent.
func (s *Server) commitPickle(sc *scratch, in *workers.Worker, t hold.Transfer, r *lmcache.CommitStoreRequest) error {
	ok := s.pickles(in)
	// Of a worker that was offered the pool and took places there.
	s.store.CommitStore(t, r.Key.RequestID, r.Key.Hashes, false)
	if !ok {
		return errSide
	}
	if s.opts.Pickle == PickleOff {
		return errPickle
	}
	if s.draining.Load() {
		return errDraining
	}
	if _, err := s.registry.Get(in.ID, sc.caller().By); err != nil {
		return errLate
	}
	tensors, err := s.tensorsOf(in, t, r.Data)
	if err != nil {
		return err
	}
	cp := &store.Transfer{Own: true}
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
		err := s.guardCopy(lmcache.OpCommitStore)(func() {
			for _, part := range cp.Parts {
				copy(part.Bytes, tensors[part.Chunk].Data)
			}
		})
		if err := s.copyDone(r.Key, cp, err); err != nil {
			return err
		}
		s.announce(r.Key, &t.Shard, t.From, t.To)
		s.n.pickledIn.Add(uint64(len(cp.Parts)) * uint64(in.Bytes))
		s.logCopied("stored", cp, &blockCopy{key: r.Key})
	}
	s.n.storesFinished.Add(false)
	sc.out = lmcache.AppendBool(sc.out, true)
	return nil
}

// tensorsOf reads one tensor for each chunk of t, all of the worker's layout.
func (s *Server) tensorsOf(in *workers.Worker, t hold.Transfer, data []byte) ([]pickle.Tensor, error) {
	if int64(len(data)) > s.opts.PickleBytes {
		return nil, fmt.Errorf("%w: %s; --pickle-max-mib allows %s", errTensors, kv.FormatBytes(int64(len(data))), kv.FormatBytes(s.opts.PickleBytes))
	}
	tensors, err := pickle.Read(data, t.To-t.From)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errTensors, err)
	}
	if len(tensors) != t.To-t.From {
		return nil, fmt.Errorf("%w: %d for %d chunks", errTensors, len(tensors), t.To-t.From)
	}
	for i, x := range tensors {
		if x.DType != in.Layout.DType || !slices.Equal(x.Shape, in.Layout.Shape()) || int64(len(x.Data)) != in.Bytes {
			return nil, fmt.Errorf("%w: tensor %d is %v %s, registered is %v %s", errTensors, i, x.Shape, x.DType, in.Layout.Shape(), in.Layout.DType)
		}
	}
	return tensors, nil
}

// retrievePickle answers prepare_retrieve with the chunks themselves. The
// commit_retrieve that follows has nothing left to end.
func (s *Server) retrievePickle(sc *scratch, in *workers.Worker, t hold.Transfer, key *lmcache.KeyView) error {
	if s.opts.Pickle == PickleOff {
		return errPickle
	}
	layout, ok := pickle.NewLayout(in.Layout.DType, in.Layout.Shape())
	if !ok || int64(layout.Bytes()) != in.Bytes {
		return fmt.Errorf("%w: chunks of %v %s", errTensors, in.Layout.Shape(), in.Layout.DType)
	}
	n := t.To - t.From
	// A quotient, since the product might not fit.
	if whole := int64(layout.Bytes() + pickle.Overhead); int64(n) > (s.opts.PickleBytes-pickle.Overhead)/whole {
		return fmt.Errorf("%w: %d chunks of %s in one message; --pickle-max-mib allows %s", errTensors, n, kv.FormatBytes(in.Bytes), kv.FormatBytes(s.opts.PickleBytes))
	}
	size := n*(layout.Bytes()+pickle.Overhead) + pickle.Overhead
	if sc.peer != nil && !s.router.HasRoom(sc.peer, int64(size)) {
		return fmt.Errorf("%w: %s more", errUnread, kv.FormatBytes(int64(size)))
	}
	cp := &store.Transfer{Own: true}
	if why := s.store.BeginLoad(key.RequestID, t, key.Hashes, cp); why != miss.None {
		return fmt.Errorf("%w: %s", errMiss, why)
	}
	byChunk := make([][]byte, n)
	for _, part := range cp.Parts {
		byChunk[part.Chunk] = part.Bytes
	}
	sc.out = slices.Grow(sc.out, size)
	err := s.guardCopy(lmcache.OpPrepareRetrieve)(func() {
		sc.out = lmcache.AppendPickled(sc.out, func(b []byte) []byte {
			return layout.Append(b, n, func(i int, dst []byte) { copy(dst, byChunk[i]) })
		})
	})
	if err := s.copyDone(key, cp, err); err != nil {
		return err
	}
	s.n.pickledOut.Add(uint64(n) * uint64(in.Bytes))
	s.n.retrievesFinished.Add(false)
	s.tally.Loaded(in.Model, key.Salt, in.ID, s.logCopied("retrieved", cp, &blockCopy{key: key}))
	return nil
}

// keepLarge is the largest reply whose memory is kept for the next one.
const keepLarge = 1 << 20

// sendLarge sends a reply without copying its result: the memory goes with it.
func (sc *scratch) sendLarge(p *zmtp.Peer, reply [][]byte) error {
	own := [][]byte{slices.Clone(reply[0]), slices.Clone(reply[1]), reply[2]} // the first two are the request's
	sc.out, sc.frames = nil, [3][]byte{}
	return p.SendOwned(own...)
}
