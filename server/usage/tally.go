// SPDX-License-Identifier: Apache-2.0

// Package usage counts what LMCache counts by model, salt and worker, under its names and labels. The number of
// models, salts and workers is bounded: later ones share one set of figures.
package usage

import (
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/kvasir-kv/kvasir/internal/histogram"
	"github.com/kvasir-kv/kvasir/server/lookup"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/tier"
)

// MaxPairs bounds the pairs of model and salt that have figures of their own. MaxLoads bounds the workers of such pairs whose loads are
// counted. Later ones share the figures of Other. A pair takes about 1 KiB and its names, 1,024 bytes and 128 characters at most.
const (
	MaxPairs = 256
	MaxLoads = 1024
)

// Other is the label of all names without figures of their own.
const Other = "_other"

// earlyReasons are the reasons of lookups without a search, in LMCache's words if it has one.
var earlyReasons = [...]string{"empty_chunk_hashes", "no_gpu_context", "declined", "load_policy_recompute"}

// earlyOf returns the index in earlyReasons for the reason of a lookup without a search.
func earlyOf(why miss.Reason) int {
	switch why {
	case miss.Short:
		return 0
	case miss.Unregistered:
		return 1
	case miss.SkipLoad:
		return 3
	}
	return 2
}

// Counts are the figures of one model and salt.
type Counts struct {
	lookups, asked, hit, hitL1, hitL2, objectsL1, objectsL2 atomic.Uint64

	early [len(earlyReasons)]atomic.Uint64
}

// Tally counts by model and salt. Its methods are safe for concurrent use; its mutex is a leaf.
type Tally struct {
	mu struct {
		sync.RWMutex
		pairs int
		of    map[string]map[string]*Counts // by model and salt
		loads map[load]*atomic.Uint64
		tags  tags
		rates map[copier]*rates
	}
}

// copier is a worker whose KV this process copies.
type copier struct {
	model  string
	worker int64
}

type rates struct{ store, load *histogram.Histogram }

type load struct {
	model, salt string
	worker      int64
}

// otherWorkers is the key of all workers without figures of their own.
var otherWorkers = load{Other, Other, -1}

// New returns a Tally with the figures of the empty names and of Other, so that all series exist from the start.
func New() *Tally {
	t := &Tally{}
	t.mu.of = map[string]map[string]*Counts{"": {"": new(Counts)}, Other: {Other: new(Counts)}}
	t.mu.loads = make(map[load]*atomic.Uint64)
	t.mu.tags.init()
	t.mu.rates = map[copier]*rates{otherCopiers: {histogram.Rates(), histogram.Rates()}}
	return t
}

// of returns the figures of a model and salt, or those of Other if no more pairs fit. Without register, a pair that has no figures of its
// own does not get any, because a model without a registered worker must not take a place.
func (t *Tally) of(model, salt []byte, register bool) *Counts {
	t.mu.RLock()
	c := t.mu.of[string(model)][string(salt)]
	t.mu.RUnlock()
	if c != nil {
		return c
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	c = t.mu.of[string(model)][string(salt)]
	switch {
	case c != nil:
		return c
	case !register || t.mu.pairs == MaxPairs || !utf8.Valid(model) || !utf8.Valid(salt): // a label must be UTF-8
		return t.mu.of[Other][Other]
	}
	if t.mu.of[string(model)] == nil {
		t.mu.of[string(model)] = make(map[string]*Counts)
	}
	c = new(Counts)
	t.mu.of[string(model)][string(salt)] = c
	t.mu.pairs++
	return c
}

// Lookup counts the end of a lookup. If the lookup's note is Tagged, it also counts for the tags.
func (t *Tally) Lookup(o *lookup.Outcome) {
	c := t.of(o.Model, o.Salt, o.Registered)
	c.lookups.Add(1)
	if !o.Searched {
		c.early[earlyOf(o.Why)].Add(1)
		return
	}
	if x, ok := o.Note.(*Tagged); ok {
		x.Count(o)
	}
	c.asked.Add(uint64(o.AskedTokens()))
	c.hit.Add(uint64(o.HitTokens()))
	c.hitL1.Add(uint64(o.HitTokens() - o.BelowTokens()))
	c.hitL2.Add(uint64(o.BelowTokens()))
	below := min(o.BelowObjects, o.Objects)
	c.objectsL1.Add(uint64(o.Objects - below))
	c.objectsL2.Add(uint64(below))
}

// Loaded counts chunks that a worker has retrieved.
func (t *Tally) Loaded(model string, salt []byte, worker int64, chunks int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	k := load{model, string(salt), worker}
	n := t.mu.loads[k]
	if n == nil && (len(t.mu.loads) >= MaxLoads || !utf8.ValidString(model) || !utf8.Valid(salt)) {
		k = otherWorkers
		n = t.mu.loads[k]
	}
	if n == nil {
		n = new(atomic.Uint64)
		t.mu.loads[k] = n
	}
	n.Add(uint64(chunks))
}

// otherCopiers is the key of all copiers without figures of their own.
var otherCopiers = copier{Other, -1}

// Copied counts the speed of one request for which this process copied `bytes` bytes.
func (t *Tally) Copied(load bool, model string, worker, bytes int64, took time.Duration) {
	if took <= 0 { // nothing was copied
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.mu.rates[copier{model, worker}]
	switch {
	case r != nil:
	case len(t.mu.rates) >= MaxPairs || !utf8.ValidString(model):
		r = t.mu.rates[otherCopiers]
	default:
		r = &rates{histogram.Rates(), histogram.Rates()}
		t.mu.rates[copier{strings.Clone(model), worker}] = r
	}
	h := r.store
	if load {
		h = r.load
	}
	h.Moved(bytes, took)
}

// pair is a model and a salt.
type pair = [2]string

// Stats are figures by model and salt.
type Stats struct {
	Lookups map[pair]uint64 `counter:"lmcache_mp_lookups_requests_total" label:"model_name,cache_salt" help:"Prompts that schedulers asked about and that have their answer, those answered without a search included."`
	Asked   map[pair]uint64 `counter:"lmcache_mp_lookup_requested_tokens_total" label:"model_name,cache_salt" help:"Tokens asked for, whole chunks only. The token hit rate is hit tokens divided by these."`
	Hit     map[pair]uint64 `counter:"lmcache_mp_lookup_hit_tokens_total" label:"model_name,cache_salt" help:"Tokens that engines could load instead of computing."`
	HitL1   map[pair]uint64 `counter:"lmcache_mp_lookup_hit_l1_tokens_total" label:"model_name,cache_salt" help:"Of the hit tokens, those that were in the pool."`
	HitL2   map[pair]uint64 `counter:"lmcache_mp_lookup_hit_l2_tokens_total" label:"model_name,cache_salt" help:"Of the hit tokens, those that came from the tier below the pool."`
	KeysL1  map[pair]uint64 `counter:"lmcache_mp_lookup_hit_l1_keys_total" label:"model_name,cache_salt" help:"Objects that hits need and that were in the pool: one for each object group, shard and chunk."`
	KeysL2  map[pair]uint64 `counter:"lmcache_mp_lookup_hit_l2_keys_total" label:"model_name,cache_salt" help:"Objects of hits that came from the tier below the pool."`

	EarlyExits map[[3]string]uint64 `counter:"lmcache_mp_lookup_early_exit_requests_total" label:"model_name,cache_salt,reason" help:"Lookups answered with no hit without a search: prompt shorter than a chunk, model without a worker, others declined."`

	StoreRates map[[3]string]histogram.Counts `histogram:"lmcache_mp_l0_l1_store_throughput_GB_per_second" label:"model_name,engine_id,device" help:"Speed of each store that this process copied (lmcache_driven). An engine that copies itself does not say when it began."`
	LoadRates  map[[3]string]histogram.Counts `histogram:"lmcache_mp_l0_l1_load_throughput_GB_per_second" label:"model_name,engine_id,device" help:"The same of retrieves."`

	Loaded map[[3]string]uint64 `counter:"lmcache_mp_num_chunks_loaded_total" label:"model_name,cache_salt,worker_id" help:"Chunks that engines retrieved."`

	TagLookups map[pair]uint64 `counter:"kvasir_tag_lookups_total" label:"tag,value" help:"Lookups of requests with this tag, an lmcache.tag.NAME of their request_configs; 256 of name and value, a name's and a user's values at most half of what others leave, the rest and idle ones share _other."`
	TagAsked   map[pair]uint64 `counter:"kvasir_tag_requested_tokens_total" label:"tag,value" help:"Tokens that lookups with this tag asked for, whole chunks only."`
	TagHit     map[pair]uint64 `counter:"kvasir_tag_hit_tokens_total" label:"tag,value" help:"Of these the tokens that engines could load instead of computing."`
}

// Stats returns the figures.
func (t *Tally) Stats() Stats {
	out := Stats{
		map[pair]uint64{},
		map[pair]uint64{},
		map[pair]uint64{},
		map[pair]uint64{},
		map[pair]uint64{},
		map[pair]uint64{},
		map[pair]uint64{},
		map[[3]string]uint64{},
		map[[3]string]histogram.Counts{},
		map[[3]string]histogram.Counts{},
		map[[3]string]uint64{{}: 0},
		map[pair]uint64{},
		map[pair]uint64{},
		map[pair]uint64{},
	}
	t.mu.RLock()
	defer t.mu.RUnlock()
	for model, of := range t.mu.of {
		for salt, c := range of {
			p := pair{model, salt}
			// Read in the opposite order of Lookup, so that no part is larger than its whole.
			out.KeysL2[p], out.KeysL1[p], out.HitL2[p], out.HitL1[p] = c.objectsL2.Load(), c.objectsL1.Load(), c.hitL2.Load(), c.hitL1.Load()
			out.Hit[p], out.Asked[p], out.Lookups[p] = c.hit.Load(), c.asked.Load(), c.lookups.Load()
			for i, reason := range earlyReasons {
				out.EarlyExits[[3]string{model, salt, reason}] = c.early[i].Load()
			}
		}
	}
	for k, c := range t.mu.tags.of {
		out.TagHit[k], out.TagAsked[k], out.TagLookups[k] = c.hit.Load(), c.asked.Load(), c.lookups.Load()
	}
	for of, r := range t.mu.rates {
		k := [3]string{of.model, strconv.FormatInt(of.worker, 10), "cpu"}
		if of == otherCopiers {
			k[1] = Other
		}
		out.StoreRates[k], out.LoadRates[k] = r.store.Counts(), r.load.Counts()
	}
	for l, n := range t.mu.loads {
		worker := strconv.FormatInt(l.worker, 10)
		if l == otherWorkers {
			worker = Other
		}
		out.Loaded[[3]string{l.model, l.salt, worker}] = n.Load()
	}
	return out
}

// Transfers counts stores or retrieves by the side that copies. The zero Transfers is empty.
type Transfers struct{ engine, server atomic.Uint64 }

// Add counts one transfer. byServer says that this process copies, not the engine.
func (t *Transfers) Add(byServer bool) {
	if byServer {
		t.server.Add(1)
		return
	}
	t.engine.Add(1)
}

// Sum returns the number of all transfers.
func (t *Transfers) Sum() uint64 { return t.engine.Load() + t.server.Load() }

// ByDevice returns the numbers by LMCache's device: cpu for copies of this process, engine for those of the engine.
func (t *Transfers) ByDevice() map[string]uint64 {
	return map[string]uint64{"cpu": t.server.Load(), "engine": t.engine.Load()}
}

// Tier has the figures of one tier below the pool, under LMCache's names.
type Tier struct {
	Used  int64  `gauge:"lmcache_mp_l2_usage_bytes" help:"Bytes that the tier keeps, as far as it knows."`
	Loads uint64 `counter:"lmcache_mp_l2_load_completed_requests_total" help:"Objects read from the tier."`
	Store uint64 `counter:"lmcache_mp_l2_store_completed_requests_total" help:"Objects written to the tier, or found there."`

	LoadRate  histogram.Counts `histogram:"lmcache_mp_l2_load_throughput_GB_per_second" help:"Speed of each object's read, from the call to its end."`
	StoreRate histogram.Counts `histogram:"lmcache_mp_l2_store_throughput_GB_per_second" help:"The same of writes; of an object that was found there, how fast that was found out."`
}

// OfTier returns the figures of a tier.
func OfTier(s tier.Stats) Tier {
	return Tier{Used: s.Used, Loads: s.Reads, Store: s.Writes, LoadRate: s.ReadRate, StoreRate: s.WriteRate}
}
