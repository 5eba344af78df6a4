package admin

import (
	"maps"
	"sync"

	"github.com/kvasir-kv/kvasir/internal/metrics"
)

// Parts are the parts of a node that run in the server's process: a registry, a relay, a
// proxy. The zero Parts has none. Methods are safe for concurrent use; a nil *Parts takes
// parts and has none.
type Parts struct {
	mu    sync.Mutex
	stats map[string]func() any
}

// Add adds a part, or replaces the one of that name. stats returns its Stats struct, with
// the tags of internal/metrics; it is called when somebody asks for the status, also after
// the part was closed.
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

// figures returns the metrics of each part by its name; nil for none.
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
	for name, of := range stats { // without the lock: a part may wait for its own
		out[name] = metrics.Values(of())
	}
	return out
}
