// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"fmt"
	"maps"
	"strconv"
	"time"

	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/sim/kvconfig"
	"github.com/kvasir-kv/kvasir/sim/sched"
)

// kvConnector is one KV connector, both halves of it. The loop calls it; close comes after the
// loop has ended.
type kvConnector interface {
	// begin admits a request.
	begin(q *request)
	// match says how many tokens beyond local ones can be loaded; ok is false while that is
	// not known.
	match(q *request, local int) (external int, async, ok bool)
	// allocated says that q has blocks, and how many tokens this connector is to load.
	allocated(q *request, external int)
	// settle waits until nothing reads blocks that the step gave to others. It comes before any
	// connector's build.
	settle(step *sched.Step) error
	// build gives the workers the decisions of a step, before the step is computed.
	build(step *sched.Step) error
	// computed tells the workers that the step is computed.
	computed(step *sched.Step)
	// finish says that q ends; keep: its blocks stay until poll names it as sent.
	finish(q *request, why sched.Reason) (keep bool)
	// poll returns the outcome of transfers. ended are requests that ended before this step.
	poll(ended []string) sched.Output
	// collect adds the figures of both halves.
	collect(reg *metrics.Registry, labels map[string]string)
	close(ctx context.Context) error
}

// Collect adds the figures of the engine's connectors to reg, with labels and the label connector:
// the connector's index.
func (e *Engine) Collect(reg *metrics.Registry, labels map[string]string) {
	for i, c := range e.conns {
		c.collect(reg, withLabel(labels, "connector", i))
	}
}

func withLabel(labels map[string]string, name string, value int) map[string]string {
	out := maps.Clone(labels)
	if out == nil {
		out = make(map[string]string)
	}
	out[name] = strconv.Itoa(value)
	return out
}

// connect makes the connectors that the options name.
func (e *Engine) connect() error {
	for _, c := range e.o.Connectors {
		var k kvConnector
		var err error
		switch c.Connector {
		case kvconfig.MooncakeConnector:
			k, err = newMooncake(e, c)
		case kvconfig.LMCacheMPConnector:
			k, err = newLMCache(e, c)
		case kvconfig.MooncakeStoreConnector:
			k, err = newStore(e, c)
		default:
			err = fmt.Errorf("engine: connector %s is not supported", c.Connector)
		}
		if err != nil {
			return err
		}
		e.conns = append(e.conns, k)
	}
	return nil
}

// connectors are all connectors of an engine, as the scheduler sees them: the first that has KV
// loads it, and all may keep blocks, as in vLLM's MultiConnector.
type connectors struct{ e *Engine }

func (c connectors) Match(r *sched.Request, local int) (external int, async, ok bool) {
	q := of(r)
	q.local, q.loader = local, nil
	for _, k := range c.e.conns {
		n, later, known := k.match(q, local)
		if !known {
			return 0, false, false
		}
		if n > 0 && q.loader == nil {
			q.loader, external, async = k, n, later
		}
	}
	return external, async, true
}

func (c connectors) Allocated(r *sched.Request, external int) {
	q := of(r)
	for _, k := range c.e.conns {
		n := 0
		if k == q.loader {
			n = external
		}
		k.allocated(q, n)
	}
	if external > 0 && q.first.IsZero() {
		q.external, q.loading = external, time.Now()
	}
}

func (c connectors) Finish(r *sched.Request, why sched.Reason) bool {
	q := of(r)
	for _, k := range c.e.conns {
		if k.finish(q, why) {
			q.keeping++
		}
	}
	if q.keeping > 0 {
		c.e.keeps[q.r.ID] = q
	} else {
		q.released()
	}
	return q.keeping > 0
}

// release notes that one connector needs an ended request's blocks no more; it reports
// whether none does.
func (e *Engine) release(id string) bool {
	q := e.keeps[id]
	if q == nil {
		return true // of a load: the scheduler knows
	}
	if q.keeping--; q.keeping > 0 {
		return false
	}
	delete(e.keeps, id)
	q.released()
	return true
}

func (q *request) released() {
	if q.r.Released != nil {
		q.r.Released()
	}
}
