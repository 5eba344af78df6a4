package server

import (
	"fmt"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/paged"
	"github.com/kvasir-kv/kvasir/store"
)

// blockCopy is one store or retrieve of a worker whose KV the server copies.
type blockCopy struct {
	*driven
	transfer store.Transfer
	ids      []paged.IDs // by KV group
}

// blockCopyOf decodes what store and retrieve have in common. in is nil when the
// worker is not known: then nothing was tried.
func (s *Server) blockCopyOf(sc *scratch, p [][]byte) (in *instance, c blockCopy, err error) {
	in, c.transfer, err = s.transferOf(sc, p, false)
	if err != nil {
		return in, c, err
	}
	if c.driven = in.driven; c.driven == nil {
		return in, c, errMode
	}
	if s.draining.Load() {
		return in, c, errDraining
	}
	blocks, err := lmcache.DecodeBlockIDs(p[2])
	if err != nil {
		return in, c, err
	}
	if len(blocks) != len(c.kernels) {
		return in, c, fmt.Errorf("%w: %d lists for %d KV groups", paged.ErrBlocks, len(blocks), len(c.kernels))
	}
	c.ids = make([]paged.IDs, len(blocks))
	for i := range c.kernels {
		k := &c.kernels[i]
		if k.rule.Apart {
			continue // never read
		}
		if c.ids[i], err = k.IDs(blocks[i], c.transfer.To-c.transfer.From); err != nil {
			return in, c, fmt.Errorf("KV group %d: %w", i, err)
		}
	}
	return in, c, nil
}

// plan plans the copy of parts, of a load but for the first skip tokens.
func (c *blockCopy) plan(parts []store.Part, load bool, skip int) (*paged.Plan, error) {
	plan := &paged.Plan{Load: load}
	for _, part := range parts {
		at := int64(0)
		for _, i := range c.objects[part.Group].kernels {
			k := &c.kernels[i]
			n := k.Bytes()
			slots := k.Layers[0].View.Slots
			left := max(0, skip/k.tokensPerBlock*slots-part.Chunk*k.PerChunk*slots) // whole blocks
			if err := plan.Add(&c.ids[i], part.Chunk, part.Bytes[at:at+n], left); err != nil {
				return nil, err
			}
			at += n
		}
	}
	return plan, nil
}

// run copies, with the worker's memory kept mapped meanwhile. Whatever happens
// the caller ends the Copy, so a panic comes back as an error, too.
func (s *Server) run(op lmcache.Op, c *blockCopy, parts []store.Part, skip int) error {
	return s.contain(op, func() error {
		plan, err := c.plan(parts, op == lmcache.OpRetrieve, skip)
		if err == nil && !c.memory.use(func() { err = plan.Run(s.opts.CopyWorkers, s.guardCopy(op)) }) {
			err = errInstance
		}
		return err
	})
}

// copyDone ends a copy that this process made, with err where it failed: then
// nothing of it becomes visible and its slots are given back.
func (s *Server) copyDone(sc *scratch, cp *store.Copy, err error) error {
	if done := cp.Done(sc.key.Hashes, err == nil); err == nil && done.Late {
		return errLate
	}
	return err
}

// storeBlocks answers store: the chunks are visible before the reply is sent.
func (s *Server) storeBlocks(sc *scratch, p [][]byte) error {
	in, c, err := s.blockCopyOf(sc, p)
	if err == nil {
		err = s.storeCopy(sc, &c)
	}
	return s.copied(sc, lmcache.OpStore, in, err)
}

func (s *Server) storeCopy(sc *scratch, c *blockCopy) error {
	s.n.storesSubmitted.Add(1)
	// A chunk with blocks that are not there would hold bytes that mean nothing.
	missing := func(g, chunk int) bool {
		for _, k := range c.objects[g].kernels {
			if !c.ids[k].Whole(chunk) {
				return true
			}
		}
		return false
	}
	s.provide(c.transfer.To-c.transfer.From, c.objectBytes()...)
	cp, got, err := s.store.Stage(c.transfer, sc.key.RequestID, sc.key.Hashes, missing)
	if err != nil {
		return err
	}
	if got.NoRoom > 0 { // the worker need not hear of it: the chunks are absent
		s.refuse(lmcache.OpStore, noRoom(got, c.transfer, c.bytes))
	}
	if cp == nil {
		s.n.storesFinished.Add(1)
		return nil
	}
	if err := s.copyDone(sc, cp, s.run(lmcache.OpStore, c, cp.Parts, 0)); err != nil {
		return err
	}
	s.n.storesFinished.Add(1)
	s.sayCopied("stored", cp, sc)
	return nil
}

// retrieveBlocks answers retrieve: the worker's blocks are written before the
// reply is sent.
func (s *Server) retrieveBlocks(sc *scratch, p [][]byte) error {
	in, c, err := s.blockCopyOf(sc, p)
	if err == nil {
		err = s.retrieveCopy(sc, &c, p[4])
	}
	return s.copied(sc, lmcache.OpRetrieve, in, err)
}

func (s *Server) retrieveCopy(sc *scratch, c *blockCopy, frame []byte) error {
	skip, err := lmcache.DecodeInt(frame)
	if err != nil || skip < 0 {
		return fmt.Errorf("skip_first_n_tokens %d: %w", skip, err)
	}
	s.n.retrievesSubmitted.Add(1)
	c.transfer.Load = true
	cp, why := s.store.Fetch(sc.key.RequestID, c.transfer, sc.key.Hashes)
	if why != store.None {
		return fmt.Errorf("%w: %s", errMiss, why)
	}
	err = s.run(lmcache.OpRetrieve, c, cp.Parts, int(min(skip, int64(sc.key.End-sc.key.Start))))
	if err := s.copyDone(sc, cp, err); err != nil {
		return err
	}
	s.n.retrievesFinished.Add(1)
	s.sayCopied("retrieved", cp, sc)
	return nil
}

// copied answers store and retrieve. A worker that is known gets the event handle
// of workers without a device, as LMCache answers.
func (s *Server) copied(sc *scratch, op lmcache.Op, in *instance, err error) error {
	if in == nil || in.driven == nil {
		return err
	}
	if err != nil {
		s.refuse(op, err)
	}
	sc.out = lmcache.Copied{Event: lmcache.StubEvent, OK: err == nil}.Append(sc.out[:0])
	return nil
}

func (s *Server) sayCopied(verb string, cp *store.Copy, sc *scratch) {
	chunks, bytes, last := 0, int64(0), map[int]bool{}
	for _, p := range cp.Parts {
		bytes += int64(len(p.Bytes))
		if !last[p.Chunk] {
			last[p.Chunk] = true
			chunks++
		}
	}
	s.sayMoved(verb, chunks, bytes, sc.key.RequestID)
}
