// SPDX-License-Identifier: Apache-2.0

package server

import (
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
)

// Each connection has one chunk size: the server's own (--chunk-size), that of the listener, or a multiple of the client's blocks that a
// client of 0.5.7 has negotiated. Chunks of all sizes share the pool, but never a namespace.

// chunking is a chunk size and the Memo for token lists in chunks of that size.
type chunking struct {
	tokens int
	memo   *lmcache.Memo
}

// maxSizes bounds the chunk sizes that have a Memo. Other sizes work as well, but each prompt is hashed whole.
const maxSizes = 8

// sizes has the chunk sizes in use other than the server's own. The zero value is empty.
type sizes struct {
	mu struct { // a leaf
		sync.Mutex
		of        map[int]*chunking
		former    []int // sizes that earlier servers announced to engines
		announced []int // sizes other than the server's own that this server announced
	}
}

// bases has the chunk sizes of listeners.
type bases struct {
	sync.Mutex // a leaf
	of         map[string]int
}

// listenerOf returns a name for a listener: its port. Where it listens on all addresses, connections have different local addresses.
func listenerOf(a net.Addr) string {
	if t, ok := a.(*net.TCPAddr); ok {
		return strconv.Itoa(t.Port)
	}
	return a.String()
}

// get returns the chunk size of the listener that a connection came over; 0: the server's own.
func (b *bases) get(local net.Addr) int {
	b.Lock()
	defer b.Unlock()
	return b.of[listenerOf(local)]
}

// chunking returns the chunking for chunks of so many tokens. It makes and keeps one for a new size, or beyond maxSizes a Memo-less one that
// it does not keep.
func (s *Server) chunking(tokens int) *chunking {
	if tokens == s.own.tokens {
		return s.own
	}
	x := &s.sizes
	x.mu.Lock()
	defer x.mu.Unlock()
	if c := x.mu.of[tokens]; c != nil {
		return c
	}
	if x.mu.of == nil {
		x.mu.of = make(map[int]*chunking)
	}
	if len(x.mu.of) >= maxSizes {
		return &chunking{tokens, lmcache.NewMemo(tokens, 0)}
	}
	c := &chunking{tokens, lmcache.NewMemo(tokens, s.opts.MemoBytes/4)}
	x.mu.of[tokens] = c
	return c
}

// add records that an engine uses a chunk size, and reports whether the size is new.
func (x *sizes) add(tokens int) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if slices.Contains(x.mu.announced, tokens) || len(x.mu.announced) >= 1024 {
		return false
	}
	x.mu.announced = append(x.mu.announced, tokens)
	slices.Sort(x.mu.announced)
	return true
}

// announced returns the sizes, other than the server's own, that engines of this server and of earlier ones may use.
func (x *sizes) announced() []int {
	x.mu.Lock()
	defer x.mu.Unlock()
	all := slices.Concat(x.mu.former, x.mu.announced)
	slices.Sort(all)
	return slices.Compact(all)
}

// remember records the sizes that an earlier server announced to engines, the first 1024 of them.
func (x *sizes) remember(former []int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.mu.former = former[:min(len(former), 1024)]
}

func (x *sizes) anyFormer() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return len(x.mu.former) > 0
}

// base returns the chunk size of a connection that has not asked for one: that of its listener.
func (s *Server) base(c *connection) *chunking {
	if c.base > 0 {
		return s.chunking(c.base)
	}
	return s.own
}

// current returns the chunk size of a connection. While that is not known, it returns that of the listener.
func (s *Server) current(c *connection) *chunking {
	if c.chunk != nil {
		return c.chunk
	}
	return s.base(c)
}

// chunkOf returns the chunk size of a connection whose request names a worker, or a model and a world size. A connection that has not asked
// for its size may belong to an engine that asked an earlier server, or asked this one over a connection that broke. Its size is then that
// of its worker's registration, or that of its model's workers if an earlier server knew one of them. If these have several sizes, it is
// that of the workers of the client's own process or its relatives. Otherwise the request is an error, because the engine would count hits
// in chunks of another size.
func (s *Server) chunkOf(sc *scratch, instance int64, model []byte, world int) (*chunking, error) {
	c := sc.conn
	if c.chunk != nil {
		return c.chunk, nil
	}
	base := s.base(c)
	if sc.caller() == self {
		c.chunk = base
		return base, nil
	}
	known, sure := s.registry.ChunksOf(instance, sc.caller().By, model, world, c.base)
	certain := c.base > 0 || !s.sizes.anyFormer() // whether an engine of an unknown worker surely uses the size of its listener
	switch {
	case len(known) == 1 && (sure || known[0] == base.tokens && certain):
		c.chunk = s.chunking(known[0])
		return c.chunk, nil
	case len(known) == 0 && certain:
		return base, nil // without effect: no worker is registered
	}
	if instance == 0 {
		s.findClient(sc.caller())
		if of := s.registry.ChunksOfClient(sc.caller().client, model, world); len(of) == 1 {
			c.chunk = s.chunking(of[0])
			return c.chunk, nil
		}
	}
	c.mustAsk = true
	if len(known) == 0 || len(known) == 1 && known[0] == base.tokens {
		return nil, fmt.Errorf("%w: engines of this server used chunks of %v tokens, and the connection has not asked for its size; restart the engine",
			errChunkSize, s.sizes.announced())
	}
	return nil, fmt.Errorf("%w: workers of %.64q have chunks of %v tokens, and the connection has not asked for its size; restart the engine",
		errChunkSize, model, known)
}

// mustRefuseHeartbeat reports, once, whether the connection's heartbeat must be answered false, because requests were declined as it has
// not asked for its chunk size. A client of 0.5.7 asks for the size after the next heartbeat that is answered true.
func (c *connection) mustRefuseHeartbeat() bool {
	if !c.mustAsk || c.refusedHeartbeat || c.fixed || !c.generations.Has(lmcache.Gen057) {
		return false
	}
	c.refusedHeartbeat = true
	return true
}

// opened records the open requests of a connection whose chunk size may still change, 64 at most; others are not recorded.
func (c *connection) opened(r lmcache.Request) {
	if c.fixed {
		return
	}
	id := lmcache.RequestID(r)
	switch r.(type) {
	case *lmcache.EndSessionRequest:
		delete(c.sessions, string(id))
	case *lmcache.LookupRequest, *lmcache.PrepareStoreRequest, *lmcache.CommitStoreRequest, *lmcache.PrepareRetrieveRequest,
		*lmcache.CommitRetrieveRequest, *lmcache.StoreRequest, *lmcache.RetrieveRequest:
		if c.sessions == nil {
			c.sessions = make(map[string]struct{})
		}
		if len(c.sessions) < 64 {
			c.sessions[string(id)] = struct{}{}
		}
	}
}

// fix records that the client knows its chunk size from now on: that of `to`. If the size is new to the server, it is logged and saved.
func (s *Server) fix(c *connection, to *chunking) {
	c.chunk, c.fresh, c.fixed, c.sessions = to, true, true, nil
	if to != s.own && s.sizes.add(to.tokens) {
		s.log.Info("engines use another chunk size", "chunk_tokens", to.tokens, "server_chunk_tokens", s.opts.ChunkTokens)
		s.save()
	}
}

// negotiate answers negotiate_chunk_size with the connection's size. While nothing has fixed that size and no request is open, the size
// becomes the smallest multiple of the alignment that is not below the listener's size. If the alignment cannot be met, the answer is the
// connection's present size: the client sees that it does not fit, and reports that.
func (s *Server) negotiate(sc *scratch, r *lmcache.NegotiateRequest) {
	c := sc.conn
	now, base := s.current(c), s.base(c).tokens
	size := now.tokens
	answer := func(why string) {
		if why != "" && s.n.misfitCount.Load() < maxMisfits {
			if _, said := s.n.misfits.LoadOrStore([2]int64{r.Alignment, int64(size)}, true); !said {
				s.n.misfitCount.Add(1)
				s.log.Warn("a client's blocks do not fit the chunk size", "alignment", r.Alignment, "chunk_tokens", size, "why", why)
			}
		}
		sc.out = lmcache.AppendInt(sc.out, int64(size))
	}
	const limit = kv.MaxChunkTokens
	a := int(min(max(r.Alignment, 0), limit+1))
	if a < 1 || a > limit {
		answer(fmt.Sprintf("the alignment is outside 1 to %d", limit))
		return
	}
	up := (base + a - 1) / a * a         // the answer for an engine with such blocks over this listener
	presumed := !c.fixed && size != base // the size comes from registrations, of this engine or of another one
	switch {
	case size%a == 0 && (!presumed || size == up || len(s.former.sizes) > 0):
		s.fix(c, now)
	case c.fixed:
		answer("the connection has its size already: use a server of its own, or a listener with --listen PORT:CHUNK")
		return
	case up > limit:
		answer(fmt.Sprintf("the next multiple is above %d", limit))
		return
	case !presumed && len(c.sessions) > 0:
		answer("requests are open on the connection")
		return
	default:
		size = up
		s.fix(c, s.chunking(size))
	}
	answer("")
}

// maxMisfits is how many pairs of alignment and chunk size that do not fit are logged, each once. Later pairs are not logged.
const maxMisfits = 100

// sizeFor returns the chunk size with which a request must be read.
func (s *Server) sizeFor(sc *scratch, op lmcache.Op, p [][]byte) (*chunking, error) {
	if sc.conn.chunk != nil || !op.HasKey() {
		return s.current(sc.conn), nil
	}
	instance, model, world := op.Names(p)
	if instance != 0 {
		if _, err := s.registry.Get(instance, sc.caller().By); err == nil {
			return s.chunkOf(sc, instance, nil, 0)
		}
		if in := s.registry.Departed(instance, sc.caller().By); in != nil {
			return s.chunking(in.Chunk), nil
		}
		return s.current(sc.conn), nil // an unknown worker: its request is declined
	}
	return s.chunkOf(sc, 0, model, world)
}
