// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"maps"
	"slices"
	"sync"

	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/internal/transferlog"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
)

// Parts has the parts of a node that run in the server's process: a registry, a relay, a proxy. The zero Parts has none. Methods are safe
// for concurrent use. A nil *Parts ignores what is added, and has none.
type Parts struct {
	mu        sync.Mutex
	stats     map[string]func() any
	transfers map[string]func() []transferlog.Transfer
	engines   func() []bootstrap.EngineState
	backends  func() []ProxyEngine
	drain     func(url, role string, on bool) error
}

// ProxyEngine is an engine to which a proxy of this process sends requests.
type ProxyEngine struct {
	URL      string   `json:"url"`
	Role     string   `json:"role"`             // engine, prefill, decode
	Reason   string   `json:"reason,omitempty"` // why it gets no requests
	Well     bool     `json:"well"`
	Draining bool     `json:"draining"` // it gets no new requests
	Requests int      `json:"requests"` // in progress
	Models   []string `json:"models"`
}

// Transfers has what the parts know of single transfers from P to D.
type Transfers struct {
	Seen    []string                `json:"seen"`      // parts that see transfers: relay, proxy; empty: P sends straight to D, which no part here sees
	Last    []transferlog.Transfer  `json:"transfers"` // those that began last come first, 64 at most
	Engines []bootstrap.EngineState `json:"p_engines"` // P engines of the registry, 64 at most; null: no registry runs here
}

// Add adds a part, or replaces the part of that name. stats returns the part's Stats struct, with the tags of internal/metrics. Each
// request for the status calls stats, also after the part was closed.
func (p *Parts) Add(name string, stats func() any) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stats == nil {
		p.stats = make(map[string]func() any)
	}
	p.stats[name] = stats
}

// AddTransfers adds a part that sees single transfers: "relay" or "proxy". Each request for transfers calls `last`.
func (p *Parts) AddTransfers(name string, last func() []transferlog.Transfer) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.transfers == nil {
		p.transfers = make(map[string]func() []transferlog.Transfer)
	}
	p.transfers[name] = last
}

// AddEngines adds the P engines that a registry knows.
func (p *Parts) AddEngines(engines func() []bootstrap.EngineState) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.engines = engines
}

// AddProxy adds the engines of a proxy. drain with `on` stops new requests to the engine with that URL and role; without `on` it allows them
// again. role may be empty. drain returns ErrNoEngine for an engine that the proxy does not have.
func (p *Parts) AddProxy(engines func() []ProxyEngine, drain func(url, role string, on bool) error) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.backends, p.drain = engines, drain
}

// proxy returns the functions of AddProxy; nil if it was not called.
func (p *Parts) proxy() (engines func() []ProxyEngine, drain func(url, role string, on bool) error) {
	if p == nil {
		return nil, nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.backends, p.drain
}

// proxyEngines returns the engines of the proxy, `most` at most, and how many there are; nil if there is no proxy.
func (p *Parts) proxyEngines(most int) ([]ProxyEngine, int) {
	engines, _ := p.proxy()
	if engines == nil {
		return nil, 0
	}
	list := engines()
	return list[:min(len(list), most)], len(list)
}

// lastTransfers returns what is known of single transfers.
func (p *Parts) lastTransfers() Transfers {
	out := Transfers{Seen: []string{}, Last: []transferlog.Transfer{}}
	if p == nil {
		return out
	}
	p.mu.Lock()
	of, engines := maps.Clone(p.transfers), p.engines
	p.mu.Unlock()
	last := make(map[string][]transferlog.Transfer)
	for name, list := range of { // without the lock: a part may wait for its own lock
		out.Seen, last[name] = append(out.Seen, name), list()
	}
	slices.Sort(out.Seen)
	out.Last = transferlog.Join(last["relay"], last["proxy"])
	if engines != nil {
		out.Engines = engines()
	}
	return out
}

// figures returns the metrics of each part by the part's name; nil without parts.
func (p *Parts) figures() map[string]map[string]float64 {
	if p == nil {
		return nil
	}
	p.mu.Lock()
	stats := maps.Clone(p.stats)
	p.mu.Unlock()
	if len(stats) == 0 {
		return nil
	}
	out := make(map[string]map[string]float64, len(stats))
	for name, of := range stats { // without the lock: a part may wait for its own lock
		out[name] = metrics.Values(of())
	}
	return out
}
