// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"
)

// onlyModel returns the model for a request that names none, among engines of a kind: the only model that they list, under one of its
// names. Adapters count only if nothing else is listed. "" means that no model is listed. If several are listed, the error is a
// *refusal.
func (p *Proxy) onlyModel(of kind) (name string, err error) {
	var all []model
	for _, b := range p.fleet.engines() {
		if list := b.models.Load(); list != nil && (of == anyKind || of == b.kind()) {
			all = append(all, *list...)
		}
	}
	if slices.ContainsFunc(all, func(m model) bool { return m.base != "" }) {
		all = slices.DeleteFunc(all, func(m model) bool { return m.base == "" })
	}
	for _, m := range all {
		if first := all[0]; m.id != first.id && (m.base == "" || m.base != first.base) {
			return "", &refusal{
				status: http.StatusBadRequest, kind: "BadRequestError", param: "model", outcome: "bad_request",
				text: fmt.Sprintf("model is missing: there is more than one, for example %.128s and %.128s", first.id, m.id),
			}
		}
		name = all[0].id
	}
	return name, nil
}

// modelLooks limits how often the proxy asks all engines again for a model that none of them lists.
type modelLooks struct {
	mu struct {
		sync.Mutex
		last time.Time
	}
}

// takeNow takes places for a request. If no engine lists the request's model, it asks the engines for their models once more: an
// adapter may just have been loaded.
func (p *Proxy) takeNow(ctx context.Context, w *needs) (choice, error) {
	c, err := p.fleet.take(ctx, w)
	if r, ok := errors.AsType[*refusal](err); !ok || !r.model || !p.lookForModels(ctx) {
		return c, err
	}
	return p.fleet.take(ctx, w)
}

// lookForModels asks all engines that are well for their models. It returns false, and does not ask, if it did so less than
// Options.modelLooks ago.
func (p *Proxy) lookForModels(ctx context.Context) bool {
	m := &p.looks.mu
	m.Lock()
	if time.Since(m.last) < p.o.modelLooks {
		m.Unlock()
		return false
	}
	m.last = time.Now()
	m.Unlock()
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second+p.o.patience)
	defer cancel()
	var wg sync.WaitGroup
	for _, b := range p.fleet.engines() {
		if b.well.Load() {
			wg.Go(func() { p.listModels(ctx, b) })
		}
	}
	wg.Wait()
	return true
}
