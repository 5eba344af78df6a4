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

// role says what an engine computes: the prompt (P), the answer (D), or both.
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
	host     string            // the host in url
	found    bool              // found in a registry, where any host may register
	client   *http1.Client     // carries the requests of clients
	registry *bootstrap.Client // of a Mooncake prefill engine; nil: it has none
	stop     context.CancelFunc
	events   []*blocks.Follower // followers of KV events, one per data-parallel rank; nil: they are not followed
	looking  sync.Mutex         // held during a health check
	guessed  bool               // bootstrap is only a default
	// bootstrap is the address of a prefill engine's bootstrap server that the operator has set; "": the address that P itself reports.
	bootstrap string

	// Guarded by looking:
	identified bool // the proxy knows whether the engine is SGLang's
	missed     bool // the last health check did not find it well

	well     atomic.Bool // it answered the last health check well, and no call has failed since
	draining atomic.Bool
	models   atomic.Pointer[[]model] // nil: not known, so it may have any model
	reason   atomic.Pointer[string]  // why an engine of SGLang is not used; nil or "": it is used
	sglang   atomic.Pointer[sglang]  // what an engine of SGLang reports about itself; nil: the engine is not SGLang's
	others   atomic.Int64            // requests that other proxies have at this engine, according to its metrics
	rankTurn atomic.Uint64
	id       atomic.Uint32 // id of its current life in the index of prefixes
	looks    atomic.Uint64 // number of health checks that have ended

	// Guarded by fleet.mu:
	turns    map[string]uint64 // by model: number of the last place taken there; see fleet.takeEngineLocked
	turn     uint64            // number of the last place taken there, for any model
	recent   float64           // requests that it got recently; older ones count less; see recently
	recentAt uint64            // fleet.mu.taken when recent was set
	circuit  circuit
	inFlight int
	pending  int // prompt bytes that it has been given but has not computed yet
	doubts   int // health checks in progress because a call failed

	mu struct {
		sync.Mutex
		ranks  []rank // of a prefill engine, as its registry lists them
		misses int    // health checks in a row that got no answer
		life   context.Context
		end    context.CancelCauseFunc
	}
}

// model is a model that an engine serves.
type model struct {
	id   string
	base string          // the engine's own name of the model, under which its KV events report blocks; "": an adapter, whose KV is separate
	raw  json.RawMessage // as the engine lists it; nil: only another name of a listed model
	sent string          // the name that a request to the engine must carry; "": id
}

// kind says by which protocol an engine is paired with its P or D: vLLM's or SGLang's.
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

// fit is what P and D of one request must have in common. The zero fit matches every engine.
type fit struct {
	kind kind
	page int // tokens in a page of KV; 0: not known
}

func (b *backend) fit() fit {
	f := fit{kind: vllmKind}
	if s := b.sglang.Load(); s != nil {
		f = fit{sglangKind, s.page}
	}
	return f
}

// pairsWith reports whether engines with the fits a and b can be P and D of one request. (A D of SGLang that gets a P with another page
// size ends its process.)
func (a fit) pairsWith(b fit) bool {
	return (a.kind == anyKind || b.kind == anyKind || a.kind == b.kind) && (a.page == 0 || b.page == 0 || a.page == b.page)
}

// prefillFitsLocked appends to fits the fit of each prefill engine that could take the request. It appends none if the request needs no
// P.
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

// registered reports whether the engine's id comes from a registry.
func (b *backend) registered() bool { return b.registry != nil && b.kind() == vllmKind }

// rank is one data-parallel rank of a prefill engine.
type rank struct {
	dp     int
	engine string
}

// serves reports whether the engine has a model; "" stands for any model.
func (b *backend) serves(name string) bool {
	list := b.models.Load()
	return name == "" || list == nil || slices.ContainsFunc(*list, func(m model) bool { return m.id == name })
}

// nextRank returns the rank of a prefill engine whose turn it is. It returns false if the registry lists no rank.
func (b *backend) nextRank() (rank, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.mu.ranks) == 0 {
		return rank{}, false
	}
	return b.mu.ranks[b.rankTurn.Load()%uint64(len(b.mu.ranks))], true
}

// rank returns the data-parallel rank dp as the registry lists it now.
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

// hasRanks reports whether the registry lists several data-parallel ranks.
func (b *backend) hasRanks() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.mu.ranks) > 1
}

// life returns a context that ends when the engine has been silent for silentLooks health checks.
func (b *backend) life() context.Context {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.life
}

func (b *backend) bearLocked() {
	b.mu.life, b.mu.end = context.WithCancelCause(context.Background())
}

func trimURL(s string) string { return strings.TrimRight(s, "/") }
