// SPDX-License-Identifier: Apache-2.0

package server

import (
	"fmt"
	"time"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/lent"
	"github.com/kvasir-kv/kvasir/server/workers"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/miss"
)

// blockCopy is one store or retrieve of a worker whose KV the server copies.
type blockCopy struct {
	*lent.Blocks
	kv       *lent.KV
	key      *lmcache.KeyView
	chunk    *chunking
	transfer hold.Transfer
	worker   int64
	took     time.Duration
}

// blockCopyOf checks what store and retrieve requests have in common; load is true for a retrieve. blocks has the engine's block ids by KV
// group. in is nil if the worker is not known; nothing was tried then.
func (s *Server) blockCopyOf(sc *scratch, r *lmcache.KeyRange, blocks [][]int, load bool) (in *workers.Worker, c blockCopy, err error) {
	c.key, c.worker, c.chunk = r.Key, r.InstanceID, sc.chunk
	in, c.transfer, err = s.transferOf(sc, r, false)
	if err != nil {
		return in, c, err
	}
	if c.kv = in.Lent; c.kv == nil {
		return in, c, errMode
	}
	if !load && s.draining.Load() { // a load goes on, because a lookup has promised it
		return in, c, errDraining
	}
	c.Blocks, err = c.kv.Blocks(blocks, r.To-r.From)
	return in, c, err
}

// run copies the parts, while the worker's memory stays mapped. It leaves out blocks that lie entirely in the first `skip` tokens. A panic
// becomes an error, because the caller must end the Transfer in any case.
func (s *Server) run(op lmcache.Op, c *blockCopy, parts []store.Part, skip int) error {
	began := time.Now()
	defer func() { c.took = time.Since(began) }()
	return s.contain(op, func() error {
		plan, err := c.Plan(parts, op == lmcache.OpRetrieve, skip)
		if err == nil && !c.kv.Use(func() { err = plan.Run(s.opts.CopyWorkers, s.guardCopy(op)) }) {
			err = workers.ErrUnknown
		}
		return err
	})
}

// copyDone ends a copy of this process. err is the copy's error: nothing of a failed copy becomes visible, and its slots are freed.
func (s *Server) copyDone(key *lmcache.KeyView, cp *store.Transfer, err error) error {
	if done := cp.Done(key.Hashes, err == nil); err == nil && done.Late {
		return errLate
	}
	return err
}

// storeBlocks answers store. The chunks are visible before the reply is sent.
func (s *Server) storeBlocks(sc *scratch, r *lmcache.StoreRequest) error {
	in, c, err := s.blockCopyOf(sc, &r.KeyRange, r.Blocks, false)
	if err == nil {
		err = s.storeCopy(&c)
	}
	return s.copied(sc, lmcache.OpStore, in, err)
}

func (s *Server) storeCopy(c *blockCopy) error {
	s.n.storesSubmitted.Add(true)
	if c.key.SkipSave {
		s.n.storesFinished.Add(true)
		return nil
	}
	cp := &store.Transfer{Own: true, Skip: c.Missing, TTL: s.ttlOf(c.key)}
	got, err := s.store.BeginStore(c.transfer, c.key.RequestID, c.key.Hashes, cp)
	if err != nil {
		return err
	}
	if got.NoRoom > 0 { // the worker need not know: the chunks are absent
		s.refuse(lmcache.OpStore, noRoom(got, c.transfer, c.kv.Bytes))
	}
	if len(cp.Parts) == 0 {
		s.n.storesFinished.Add(true)
		return nil
	}
	if err := s.copyDone(c.key, cp, s.run(lmcache.OpStore, c, cp.Parts, 0)); err != nil {
		return err
	}
	s.announce(c.chunk, c.key, &c.transfer.Shard, c.transfer.From, c.transfer.To)
	s.n.storesFinished.Add(true)
	s.logCopied("stored", cp, c)
	return nil
}

// retrieveBlocks answers retrieve. The worker's blocks are written before the reply is sent.
func (s *Server) retrieveBlocks(sc *scratch, r *lmcache.RetrieveRequest) error {
	in, c, err := s.blockCopyOf(sc, &r.KeyRange, r.Blocks, true)
	if err == nil {
		err = s.retrieveCopy(&c, r.SkipTokens)
	}
	return s.copied(sc, lmcache.OpRetrieve, in, err)
}

func (s *Server) retrieveCopy(c *blockCopy, skip int64) error {
	if skip < 0 {
		return fmt.Errorf("skip_first_n_tokens %d is below 0", skip)
	}
	s.n.retrievesSubmitted.Add(true)
	c.transfer.Load = true
	cp := &store.Transfer{Own: true}
	if why := s.store.BeginLoad(c.key.RequestID, c.transfer, c.key.Hashes, cp); why != miss.None {
		return fmt.Errorf("%w: %s", errMiss, why)
	}
	err := s.run(lmcache.OpRetrieve, c, cp.Parts, int(min(skip, int64(c.key.End-c.key.Start))))
	if err := s.copyDone(c.key, cp, err); err != nil {
		return err
	}
	s.n.retrievesFinished.Add(true)
	s.tally.Loaded(string(c.key.Model), c.key.Salt, c.worker, s.logCopied("retrieved", cp, c))
	return nil
}

// copied answers store and retrieve. A known worker gets the event handle of workers without a device, as in LMCache's answer.
func (s *Server) copied(sc *scratch, op lmcache.Op, in *workers.Worker, err error) error {
	if in == nil || in.Lent == nil {
		return err
	}
	if err != nil {
		s.refuse(op, err)
	}
	sc.out = lmcache.Copied{Event: lmcache.StubEvent, OK: err == nil}.Append(sc.out[:0])
	return nil
}

// logCopied counts and logs a copy, and returns its number of chunks.
func (s *Server) logCopied(verb string, cp *store.Transfer, c *blockCopy) (chunks int) {
	bytes, last := int64(0), map[int]bool{}
	for _, p := range cp.Parts {
		bytes += int64(len(p.Bytes))
		if !last[p.Chunk] {
			last[p.Chunk] = true
			chunks++
		}
	}
	s.tally.Copied(c.transfer.Load, string(c.key.Model), c.worker, bytes, c.took)
	s.logMoved(verb, chunks, c.chunk, bytes, c.key.RequestID)
	return chunks
}
