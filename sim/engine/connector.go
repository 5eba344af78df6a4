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

// kvConnector is one KV connector, both its scheduler's half and its workers' half. The engine's loop calls its methods; close is
// called after the loop has ended.
type kvConnector interface {
	// begin admits a request.
	begin(q *request)
	// match returns how many tokens, beyond the first `local` ones, the connector can load. async means that the request must wait for
	// the load. ok is false while that is not known.
	match(q *request, local int) (external int, async, ok bool)
	// allocated informs the connector that q has got blocks, and that it shall load `external` tokens into them.
	allocated(q *request, external int)
	// settle waits until no connector reads blocks any more that the step gave to other requests. It is called before build of any
	// connector.
	settle(step *sched.Step) error
	// build gives the decisions of a step to the workers, before the step is computed.
	build(step *sched.Step) error
	// computed informs the workers that the step has been computed.
	computed(step *sched.Step)
	// finish informs the connector that q has ended. If it returns true, q's blocks must stay until poll names q as sent.
	finish(q *request, why sched.Reason) (keep bool)
	// poll returns the outcome of transfers. ended are the requests that ended before this step.
	poll(ended []string) sched.Output
	// collect adds the figures of both halves to reg.
	collect(reg *metrics.Registry, labels map[string]string)
	close(ctx context.Context) error
}

// Collect adds the figures of the engine's connectors to reg, with labels, and with the label connector, the connector's index.
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

// connect creates the connectors that the options name.
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

// connectors presents all connectors of an engine to the scheduler as one. The first connector that has KV loads it, and each may keep
// blocks, as in vLLM's MultiConnector.
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

// release records that one connector no longer needs the blocks of an ended request. It returns true if no connector needs them any
// more.
func (e *Engine) release(id string) bool {
	q := e.keeps[id]
	if q == nil {
		return true // the request was loading: the scheduler handles it
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
