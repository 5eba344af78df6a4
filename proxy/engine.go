// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/kvasir-kv/kvasir/internal/http1"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/proxy/blocks"
)

// role is what an engine does for a request.
type role uint8

const (
	both role = iota
	prefill
	decode
)

func (r role) String() string { return [...]string{"engine", "prefill engine", "decode engine"}[r] }

// backend is one engine.
type backend struct {
	role     role
	url      string
	host     string            // of url
	found    bool              // in a registry, where any host may register
	client   *http1.Client     // of requests
	registry *bootstrap.Client // of a Mooncake prefill engine; nil: none
	stop     context.CancelFunc
	events   []*blocks.Follower // of its data-parallel ranks; nil: none are followed
	looking  sync.Mutex         // one look at a time
	guessed  bool               // bootstrap is a default
	// bootstrap is the address of a prefill engine's bootstrap server as the operator sets it; "": the one that P reports.
	bootstrap string

	// Under looking:
	identified bool // it is known whether it is an engine of SGLang
	missed     bool // the last look did not find it well

	well     atomic.Bool // it answered the last look, and no call failed since
	draining atomic.Bool
	models   atomic.Pointer[[]model] // nil: not known, it may have any
	reason   atomic.Pointer[string]  // why an engine of SGLang is not used; nil or "": it is used
	sglang   atomic.Pointer[sglang]  // what an engine of SGLang reports about itself; nil: it is no engine of SGLang
	others   atomic.Int64            // requests of other proxies, by its metrics
	rankTurn atomic.Uint64
	id       atomic.Uint32 // in the index of prefixes; another one for each life

	// Under fleet.mu:
	turns    map[string]uint64 // by model: when it last got a request; see fleet.takeEngineLocked
	turn     uint64            // when it last got one of any model
	recent   float64           // requests it got, older ones counting less; see recently
	recentAt uint64            // fleet.mu.taken when recent was set
	circuit  circuit
	inFlight int
	pending  int // prompt bytes that it has yet to compute
	doubts   int // looks that follow a failed call

	mu struct {
		sync.Mutex
		ranks  []rank // of a prefill engine, from its registry
		misses int    // looks in a row that were not answered
		life   context.Context
		end    context.CancelCauseFunc
	}
}

// model is a model that an engine serves.
type model struct {
	id   string
	base string          // the engine's own name of the model, under which its KV events report blocks; "": an adapter, whose KV is its own
	raw  json.RawMessage // as the engine lists it; nil: another name of a listed model
	sent string          // the name that requests to the engine must have; "": id
}

// kind says by which protocol P and D of an engine pair: vLLM's or SGLang's.
type kind uint8

const (
	anyKind kind = iota
	vllmKind
	sglangKind
)

func (b *backend) kind() kind {
	if b.sglang.Load() != nil {
		return sglangKind
	}
	return vllmKind
}

// fit is what P and D of one request must have in common. The zero fit fits every engine.
type fit struct {
	kind kind
	page int // of KV, tokens; 0: not known
}

func (b *backend) fit() fit {
	f := fit{kind: vllmKind}
	if s := b.sglang.Load(); s != nil {
		f = fit{sglangKind, s.page}
	}
	return f
}

// pairsWith reports whether two engines can be P and D of a request. A D of SGLang that gets a P of another page size ends its process.
func (a fit) pairsWith(b fit) bool {
	return (a.kind == anyKind || b.kind == anyKind || a.kind == b.kind) && (a.page == 0 || b.page == 0 || a.page == b.page)
}

// prefillFitsLocked appends the fits of the prefill engines that could take a request; it appends none if the request needs no P.
func (f *fleet) prefillFitsLocked(fits []fit, w *needs) []fit {
	if w.ready || w.alone {
		return fits
	}
	for _, b := range f.mu.all {
		if b.role != prefill || !b.well.Load() || b.draining.Load() || !b.serves(w.model) {
			continue
		}
		if of := b.fit(); !slices.Contains(fits, of) {
			fits = append(fits, of)
		}
	}
	return fits
}

// registered reports whether a registry has the engine's id.
func (b *backend) registered() bool { return b.registry != nil && b.kind() == vllmKind }

// rank is one data-parallel rank of a prefill engine.
type rank struct {
	dp     int
	engine string
}

// serves reports whether the engine has a model; "" is any.
func (b *backend) serves(name string) bool {
	list := b.models.Load()
	return name == "" || list == nil || slices.ContainsFunc(*list, func(m model) bool { return m.id == name })
}

// nextRank returns the rank of a prefill engine whose turn it is; false: its registry shows none.
func (b *backend) nextRank() (rank, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.mu.ranks) == 0 {
		return rank{}, false
	}
	return b.mu.ranks[b.rankTurn.Load()%uint64(len(b.mu.ranks))], true
}

// rank returns a data-parallel rank as the registry shows it now.
func (b *backend) rank(dp int) (rank, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range b.mu.ranks {
		if r.dp == dp {
			return r, nil
		}
	}
	return rank{}, fmt.Errorf("prefill engine %s has no data-parallel rank %d now", b.url, dp)
}

// hasRanks reports whether the registry shows several data-parallel ranks.
func (b *backend) hasRanks() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.mu.ranks) > 1
}

// life ends when the engine has been silent for long.
func (b *backend) life() context.Context {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.life
}

func (b *backend) bearLocked() {
	b.mu.life, b.mu.end = context.WithCancelCause(context.Background())
}

func trimURL(s string) string { return strings.TrimRight(s, "/") }
