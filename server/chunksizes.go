// SPDX-License-Identifier: Apache-2.0

package server

import (
	"fmt"
	"sync/atomic"
	"time"
)

// An engine asks for the chunk size when it starts, and counts hits in such chunks for life. After another server with another chunk size
// has taken over, an engine that asked the earlier server would count each chunk of a hit as one of the old size, and so count tokens that
// were never stored. So while such engines may exist, only connections that asked this server are served.

// formerSizes has the chunk sizes that earlier servers of this pool announced to engines.
type formerSizes struct {
	sizes  []int // immutable; empty: no such sizes
	active atomic.Bool
	heard  atomic.Int64 // time, since the start, of the last request from a connection that did not ask
}

// forgetAfter is the time without a request from engines of earlier servers after which they count as gone. Engines send heartbeats every
// 10 s.
const forgetAfter = 10 * time.Minute

func (s *Server) recallSizes() {
	s.former.sizes = s.store.Files().FormerChunkTokens()
	s.former.active.Store(len(s.former.sizes) > 0)
	if len(s.former.sizes) > 0 {
		s.log.Warn("earlier servers of this pool had chunks of another size: engines that started under them get no hits until they are restarted",
			"former_tokens", s.former.sizes, "chunk_tokens", s.opts.ChunkTokens)
	}
}

// sameChunks returns errChunkSize for a connection that may belong to an engine to which
// an earlier server announced another chunk size.
func (s *Server) sameChunks(sc *scratch) error {
	if !s.former.active.Load() || sc.conn.fresh || sc.caller() == self {
		return nil
	}
	s.former.heard.Store(int64(time.Since(s.started)))
	sc.conn.mustAsk = true
	return fmt.Errorf("%w: it started under a server with chunks of %d tokens, this one has %d; restart the engine, or the server with --chunk-size %d",
		errChunkSize, s.former.sizes, s.opts.ChunkTokens, s.former.sizes[0])
}

// forgetSizes serves all connections again once the engines of earlier servers are gone.
func (s *Server) forgetSizes(now time.Time) {
	if s.former.active.Load() && now.Sub(s.started)-time.Duration(s.former.heard.Load()) >= forgetAfter {
		s.former.active.Store(false)
		s.store.Files().ForgetFormer()
		s.log.Info("no engine that started under chunks of another size is left", "former_tokens", s.former.sizes)
	}
}
