// SPDX-License-Identifier: Apache-2.0

// Package connector is the logic of vLLM's MooncakeStoreConnector: which blocks of a prompt an engine loads from a Mooncake Store and
// puts there, and under which keys. It also does the transfers.
//
// A Scheduler decides. It keeps no state about requests, and its only I/O are lookups. A Worker moves the blocks of one rank. Both get
// a prompt as the digests of its hash units.
//
// Follows vLLM 0.23 and 0.32 (distributed/kv_transfer/kv_connector/v1/mooncake/store).
package connector

import (
	"cmp"
	"context"
	"encoding/hex"
	"fmt"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/kv/coordinator"
	"github.com/kvasir-kv/kvasir/mooncake/store"
)

// Options says what an engine stores in a Mooncake Store, and how.
type Options struct {
	Layout  coordinator.Layout
	Release coordinator.Release // release whose decisions and keys are used; zero: our decisions, with the keys of 0.24 and later

	Model  string // the engine's name of the model; keys contain the part after its last slash
	Prefix string // cache_prefix, which separates deployments that share a store
	Ranks  int    // number of ranks of tensor parallelism; each has an object of every block; default 1

	// ObjectBytes is the length of the object that one rank stores for a block, by group. Objects of another length count as absent.
	// nil: the lengths are unknown, so any length counts.
	ObjectBytes []int64

	Batch int // most keys in one question to the store; default 256
}

// Validate reports every field that cannot be used, as options.Errors.
func (o Options) Validate() error {
	var c options.Checks
	options.Within(&c, "Ranks", o.Ranks, 0, 1<<12)
	options.Within(&c, "Batch", o.Batch, 0, 1<<16)
	c.That(o.ObjectBytes == nil || len(o.ObjectBytes) == len(o.Layout.Groups), "ObjectBytes", "has %d lengths for %d groups", len(o.ObjectBytes), len(o.Layout.Groups))
	return c.Err()
}

// Prompt is what the connector needs to know of a request.
type Prompt struct {
	Tokens  int    // number of tokens, with those generated so far
	Digests []byte // of the prompt's hash units, one after the other; each digest covers all tokens up to the end of its unit
	Size    int    // bytes of a digest
}

// Units returns the number of hash units.
func (p *Prompt) Units() int { return len(p.Digests) / max(p.Size, 1) }

// Block is a block of a group. Index is its place in the prompt.
type Block struct{ Group, Index int }

// Scheduler decides which blocks are loaded and stored. It changes only its counters.
type Scheduler struct {
	o        Options
	c        *coordinator.Coordinator
	prefixes [][]string // key prefixes, by group and rank
	ops      operations // counts of calls of this Scheduler and its Workers
}

// NewScheduler returns a Scheduler. It returns an error if the options or the layout cannot be used.
func NewScheduler(o Options) (*Scheduler, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	o.Ranks, o.Batch = cmp.Or(o.Ranks, 1), cmp.Or(o.Batch, 256)
	c, err := coordinator.New(o.Layout, coordinator.Options{Release: o.Release})
	if err != nil {
		return nil, err
	}
	s := &Scheduler{o: o, c: c, prefixes: make([][]string, c.Groups()), ops: newOperations()}
	for g := range s.prefixes {
		for rank := range o.Ranks {
			s.prefixes[g] = append(s.prefixes[g], KeyPrefix(o.Prefix, o.Model, rank, g))
		}
	}
	return s, nil
}

// KeyPrefix returns the beginning of the keys of a group's blocks of one rank:
//
//	[PREFIX@]MODEL@tp_rank:RANK@pcp0@dcp0@pp_rank:0@group:GROUP@
//
// The block's hash follows, in hexadecimal digits. Of a model's name the part after the
// last slash counts.
func KeyPrefix(prefix, model string, rank, group int) string {
	model = strings.TrimRight(model, "/")
	model = model[strings.LastIndexByte(model, '/')+1:]
	if prefix != "" {
		prefix += "@"
	}
	return fmt.Sprintf("%s%s@tp_rank:%d@pcp0@dcp0@pp_rank:0@group:%d@", prefix, model, rank, group)
}

// Coordinator returns the coordinator that makes this Scheduler's decisions.
func (s *Scheduler) Coordinator() *coordinator.Coordinator { return s.c }

// Key returns the key of a block of one rank; false if the prompt has no digest for the block.
func (s *Scheduler) Key(p *Prompt, b Block, rank int) (string, bool) {
	var buf [64]byte
	hash, ok := s.c.AppendKey(buf[:0], p.Digests, p.Size, b.Group, b.Index)
	return s.prefixes[b.Group][rank] + hex.EncodeToString(hash), ok
}

// Directory says where objects are. *store.Master is a Directory.
type Directory interface {
	Replicas(ctx context.Context, keys []string) ([]store.Found, error)
}

// Hit is the result of a lookup.
type Hit struct {
	Tokens        int                // longest prefix that every group can serve, in tokens
	Masks         []coordinator.Mask // for each group, the blocks that a load moves
	Batches, Keys int                // how many questions the lookup asked, for how many keys
}

// Lookup asks a store for the longest prefix, of at most `most` tokens, that every group can load. The store leases the objects that it
// finds. If the store fails, Lookup returns the error with the hit that was known before it.
func (s *Scheduler) Lookup(ctx context.Context, d Directory, p *Prompt, most int) (Hit, error) {
	q := &querier{ctx: ctx, s: s, d: d, p: p}
	r := coordinator.NewRemote(s.c, coordinator.RemoteOptions{Batch: s.o.Batch})
	r.Reset(q)
	var result coordinator.Result
	err := s.c.Hit(&result, r, coordinator.Query{Units: p.Units(), MaxTokens: max(most, 0)})
	h := Hit{Tokens: result.Tokens, Masks: result.Masks}
	h.Batches, h.Keys = r.Asked()
	h.Keys *= s.o.Ranks
	return h, cmp.Or(err, r.Err())
}

// querier answers the coordinator's questions from a store. A block is present if the objects of all ranks are.
type querier struct {
	ctx  context.Context
	s    *Scheduler
	d    Directory
	p    *Prompt
	keys []string
}

func (q *querier) Exists(probes []coordinator.Probe, present []bool) error {
	q.keys = q.keys[:0]
	for _, probe := range probes {
		hash, ok := []byte(nil), false
		if probe.Block >= 0 {
			hash, ok = q.s.c.AppendKey(nil, q.p.Digests, q.p.Size, probe.Group, probe.Block)
		} else {
			hash, ok = q.s.c.AppendUnitKey(nil, q.p.Digests, q.p.Size, probe.Unit)
		}
		if !ok {
			return fmt.Errorf("connector: block %d of group %d has no digest", probe.Block, probe.Group)
		}
		text := hex.EncodeToString(hash)
		for _, prefix := range q.s.prefixes[probe.Group] {
			q.keys = append(q.keys, prefix+text)
		}
	}
	began := time.Now()
	found, err := q.d.Replicas(q.ctx, q.keys)
	q.s.ops.asked(lookupExists, began, len(q.keys), err)
	if err != nil {
		return err
	}
	for i, probe := range probes {
		present[i] = true
		for rank := range q.s.o.Ranks {
			present[i] = present[i] && q.s.readable(&found[i*q.s.o.Ranks+rank], probe.Group)
		}
	}
	return nil
}

// readable reports whether the object f can be read and has the length of the group's blocks.
func (s *Scheduler) readable(f *store.Found, group int) bool {
	n := f.Bytes()
	return f.Err == nil && n > 0 && (s.o.ObjectBytes == nil || n == uint64(s.o.ObjectBytes[group]))
}

// Loads appends to dst the blocks that a load of `hit` tokens moves, except those of the first `local` tokens, which the engine has
// itself.
func (s *Scheduler) Loads(dst []Block, p *Prompt, local, hit int) ([]Block, error) {
	masks, err := s.c.LoadMask(nil, p.Units(), hit)
	if err != nil {
		return dst, err
	}
	for g := range masks {
		first := ceilDiv(local, s.c.Group(g).Block)
		for r := range masks[g].Runs() {
			for i := max(r.Start, first); i < r.End; i++ {
				dst = append(dst, Block{g, i})
			}
		}
	}
	return dst, nil
}

// Stores appends to dst the blocks worth storing among a prompt's tokens between from, where the last call ended, and computed. prompt
// is the number of tokens at which the prefill ends. upto is the end of the tokens about which Stores has decided; it must be the next
// call's from.
//
// From 0.24 on, StoreMask leaves recurrent states to the engine, which has each state only for a moment. Stores then also appends the
// state at upto, and the state at which a repetition of the prompt would resume.
func (s *Scheduler) Stores(dst []Block, from, computed, prompt int) (_ []Block, upto int, _ error) {
	unit := s.c.Layout().Scheduler
	upto = min(computed, prompt) / unit * unit
	if upto <= from {
		return dst, from, nil
	}
	old := s.o.Release == coordinator.VLLM023
	q := coordinator.StoreQuery{Tokens: upto, Start: from, Prompt: prompt, HasPrompt: true}
	if old {
		q = coordinator.StoreQuery{Tokens: upto}
	}
	masks, err := s.c.StoreMask(nil, q)
	if err != nil {
		return dst, from, err
	}
	for g := range masks {
		size := s.c.Group(g).Block
		first := ceilDiv(from, size)
		if s.c.Group(g).Kind == coordinator.Mamba && !old {
			resume := (prompt - 1) / unit * unit
			if resume > from && resume < upto {
				dst = append(dst, Block{g, resume/size - 1})
			}
			dst = append(dst, Block{g, upto/size - 1})
			continue
		}
		base := first
		if old {
			base = 0
		}
		for r := range masks[g].Runs() {
			for i := max(base+r.Start, first); i < base+r.End; i++ {
				dst = append(dst, Block{g, i})
			}
		}
	}
	return dst, upto, nil
}

func ceilDiv(a, b int) int { return (a + b - 1) / b }
