// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"encoding/binary"
	"slices"
	"sync"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/sim/kvmem"
	"github.com/kvasir-kv/kvasir/sim/sched"
)

// request is a request inside the engine. The loop owns it, except stream.
type request struct {
	r      Request
	s      sched.Request
	tokens []uint32
	chain  kvmem.Chain
	salt   uint64
	block  int

	loader  kvConnector // the connector that loads for it; nil: none does, or none was asked yet
	local   int         // tokens that the prefix cache had at the last lookup
	keeping int         // number of connectors that keep its blocks after its end
	params  *wire.KVTransferParams
	wrong   error

	arrived, started, first, last time.Time
	loading                       time.Time // when the load of its KV began; zero: none runs
	cached                        int       // prompt tokens that came from the prefix cache
	external                      int       // prompt tokens that connectors loaded
	stop                          func() bool
	stream                        Stream
}

func newRequest(e *Engine, r Request) *request {
	q := &request{r: r, block: e.o.KV.BlockTokens, arrived: time.Now()}
	q.tokens = append(make([]uint32, 0, len(r.Tokens)+min(r.MaxTokens, 1024)), r.Tokens...)
	q.chain = make(kvmem.Chain, 0, cap(q.tokens)).Append(r.Tokens...)
	if r.Salt != "" {
		q.salt = xxh3.HashString(r.Salt)
	}
	q.s = sched.Request{ID: r.ID, Prompt: len(r.Tokens), MaxTokens: r.MaxTokens, Priority: r.Priority, SkipCache: r.SkipCache, Hash: q.hash, Data: q}
	if len(r.Stop) > 0 {
		q.s.Stops = func() bool { return slices.Contains(r.Stop, q.next()) }
	}
	q.stream.wake = make(chan struct{}, 1)
	return q
}

// shorten leaves the end of the prompt to another engine. It must be called before the request begins.
func (q *request) shorten(prompt, maxTokens int) {
	q.r.Tokens, q.r.MaxTokens = q.r.Tokens[:prompt], maxTokens
	q.tokens, q.chain = q.tokens[:prompt], q.chain[:prompt]
	q.s.Prompt, q.s.MaxTokens = prompt, maxTokens
}

func of(r *sched.Request) *request { return r.Data.(*request) }

// hash returns the hash of block i. It follows from the state after the block's last token, and from the salt.
func (q *request) hash(i int) (h sched.Hash) {
	binary.LittleEndian.PutUint64(h[:8], q.chain[(i+1)*q.block-1])
	binary.LittleEndian.PutUint64(h[8:], q.salt)
	return h
}

// next returns the token that follows; it is always the same for the same tokens.
func (q *request) next() uint32 {
	return uint32(q.chain[len(q.chain)-1]>>20) % workload.Vocabulary
}

func (q *request) append(t uint32) {
	q.tokens = append(q.tokens, t)
	q.chain = q.chain.Append(t)
	now := time.Now()
	if q.first.IsZero() {
		q.first = now
	}
	q.last = now
	q.stream.add(t)
}

func (q *request) begun(now time.Time) {
	if q.started.IsZero() {
		q.started = now
	}
}

// notComputed returns how many prompt tokens came from the prefix cache or from a connector.
func (q *request) notComputed() int { return min(q.cached+q.external, len(q.r.Tokens)) }

// End is how a request ended.
type End struct {
	Reason string // length, stop, abort or error
	Err    error  // set if Reason is error; also ErrClosed
	// Params are the kv_transfer_params of the response; nil: none.
	Params *wire.KVTransferParams
	Cached int // prompt tokens that were not computed
}

// Stream delivers the tokens of a request as they come. Only one goroutine may read it.
type Stream struct {
	wake chan struct{}
	mu   struct {
		sync.Mutex
		tokens []uint32
		end    *End
	}
}

func (s *Stream) add(t uint32) {
	s.mu.Lock()
	s.mu.tokens = append(s.mu.tokens, t)
	s.mu.Unlock()
	s.poke()
}

func (s *Stream) end(e *End) {
	s.mu.Lock()
	s.mu.end = e
	s.mu.Unlock()
	s.poke()
}

func (s *Stream) poke() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Next waits for tokens or the end. If end is not nil, tokens are the last ones. If ctx ends, Next returns its error; the request goes
// on.
func (s *Stream) Next(ctx context.Context) (tokens []uint32, end *End, err error) {
	for {
		s.mu.Lock()
		tokens, end = s.mu.tokens, s.mu.end
		s.mu.tokens = nil
		s.mu.Unlock()
		if len(tokens) > 0 || end != nil {
			return tokens, end, nil
		}
		select {
		case <-s.wake:
		case <-ctx.Done():
			return nil, nil, ctx.Err()
		}
	}
}

// Wait reads the stream to its end.
func (s *Stream) Wait(ctx context.Context) (tokens []uint32, end *End, err error) {
	for {
		more, end, err := s.Next(ctx)
		tokens = append(tokens, more...)
		if end != nil || err != nil {
			return tokens, end, err
		}
	}
}

// Digests returns the hashes under which engines of this package store the full blocks of a prompt: size bytes each, one after the
// other.
func Digests(tokens []uint32, block int, salt string) (digests []byte, size int) {
	q := &request{block: block, chain: kvmem.Chain{}.Append(tokens...)}
	if salt != "" {
		q.salt = xxh3.HashString(salt)
	}
	for i := range len(tokens) / block {
		h := q.hash(i)
		digests = append(digests, h[:]...)
	}
	return digests, len(sched.Hash{})
}
