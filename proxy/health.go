// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// silentLooks is the number of health checks without an answer after which the proxy moves an engine's requests to other engines. An
// engine that refuses connections breaks its requests itself. An engine that answers that it is not ready, as SGLang does after
// SIGTERM, finishes its requests.
const silentLooks = 10

var (
	errSilent = errors.New("the engine is silent")
	errUnwell = errors.New("a health check failed")
)

// watch checks an engine again and again until ctx ends: whether it is well, its ids in the registry, and its models.
func (p *Proxy) watch(ctx context.Context, b *backend) {
	for n := 0; ; n++ {
		p.look(ctx, b, n%5 == 0)
		b.client.Sweep()
		select {
		case <-time.After(p.o.HealthInterval):
		case <-ctx.Done():
			return
		}
	}
}

// look checks an engine's health. It asks for the engine's models if the engine was not well before, or if all is true. When the check
// of an engine that was well fails, trouble checks a second time: the engine may have stalled for some seconds, or have been restarted.
func (p *Proxy) look(ctx context.Context, b *backend, all bool) {
	b.looking.Lock()
	defer b.looking.Unlock()
	defer b.looks.Add(1)
	ctx, cancel := context.WithTimeout(ctx, max(p.o.HealthInterval, 2*time.Second)+p.o.patience)
	defer cancel()
	well, heard := p.answers(ctx, b)
	b.missed = !well
	if well && (all || !b.well.Load()) {
		p.listModels(ctx, b)
	}
	if well && p.o.policyOf(b.role) != RoundRobin {
		p.readLoad(ctx, b)
	}
	b.mu.Lock()
	if b.mu.misses++; heard {
		b.mu.misses = 0
	}
	if b.mu.misses == silentLooks {
		b.mu.end(errSilent)
		b.bearLocked()
	}
	b.mu.Unlock()
	if ctx.Err() != nil && !well && p.ctx.Err() != nil {
		return
	}
	if !well {
		p.trouble(b, errUnwell)
		return
	}
	if !b.well.Swap(true) {
		b.id.Store(p.instanceIDs.Add(1)) // the KV in its memory may be gone
		p.o.Log.Info("an engine's health changed", "engine", b.url, "well", true)
		p.fleet.dispatch()
	}
}

// get returns the body of a small answer of an engine, and whether the status was 200.
func (p *Proxy) get(ctx context.Context, b *backend, path string) ([]byte, bool) {
	text, status := p.read(ctx, b.url+path, p.keyFor(b))
	return text, status == http.StatusOK
}

// read returns the body and the status of a small answer; status 0: no answer has come, or not all of it.
func (p *Proxy) read(ctx context.Context, address, key string) (text []byte, status int) {
	return readBy(ctx, p.client, address, key)
}

func readBy(ctx context.Context, client *http.Client, address, key string) (text []byte, status int) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return nil, 0
	}
	if key != "" {
		r.Header.Set("Authorization", "Bearer "+key)
	}
	resp, err := client.Do(r)
	if err != nil {
		return nil, 0
	}
	defer resp.Body.Close()
	if text, err = io.ReadAll(io.LimitReader(resp.Body, 4<<20)); err != nil {
		return nil, 0
	}
	return text, resp.StatusCode
}

// listModels asks an engine for its models. An engine that does not list models may have any model.
func (p *Proxy) listModels(ctx context.Context, b *backend) {
	text, ok := p.get(ctx, b, "/v1/models")
	var list struct{ Data []json.RawMessage }
	if !ok || json.Unmarshal(text, &list) != nil || len(list.Data) > 1024 {
		return
	}
	models := []model{}
	for _, raw := range list.Data {
		var m struct {
			ID     string  `json:"id"`
			Root   string  `json:"root"`
			Parent *string `json:"parent"`
		}
		if json.Unmarshal(raw, &m) == nil && m.ID != "" {
			base := cmp.Or(m.Root, m.ID)
			if m.Parent != nil {
				base = ""
			}
			one := model{id: m.ID, base: base, raw: raw}
			if m.Parent != nil && b.kind() == sglangKind {
				one.sent = *m.Parent + ":" + m.ID
				models = append(models, model{id: one.sent})
			}
			models = append(models, one)
		}
	}
	if len(models) > 0 {
		b.models.Store(&models)
	}
}

// readLoad asks an engine how many requests it has, from this proxy and from others.
func (p *Proxy) readLoad(ctx context.Context, b *backend) {
	own := p.fleet.inFlight(b)
	if b.kind() == sglangKind {
		if n, ok := p.sglangLoad(ctx, b); ok {
			b.others.Store(max(0, n-int64(own)))
		}
		return
	}
	text, ok := p.get(ctx, b, "/metrics")
	if !ok {
		return
	}
	b.others.Store(max(0, requests(text)-int64(own)))
}

// maxRequests bounds the number of requests that an engine may report; a larger number counts as maxRequests.
const maxRequests = 1e9

// requests returns the number of running and waiting requests in an engine's metrics, summed over its data-parallel ranks.
func requests(text []byte) int64 {
	sum := 0.0
	for s := bufio.NewScanner(bytes.NewReader(text)); s.Scan(); {
		line := s.Bytes()
		if !bytes.HasPrefix(line, []byte("vllm:num_requests_running")) && !bytes.HasPrefix(line, []byte("vllm:num_requests_waiting{")) {
			continue
		}
		if i := bytes.LastIndexByte(line, ' '); i >= 0 {
			if v, err := strconv.ParseFloat(string(line[i+1:]), 64); err == nil && v > 0 {
				sum += v
			}
		}
	}
	return int64(min(sum, maxRequests))
}

// refresh reads an engine's ranks from its registry. It returns false if the registry does not answer or lists none.
func (p *Proxy) refresh(ctx context.Context, b *backend) bool {
	d, err := b.registry.Query(ctx)
	if err != nil {
		return false
	}
	var ranks, here []rank
	for _, dp := range slices.Sorted(maps.Keys(d)) {
		ranks = append(ranks, rank{dp, d[dp].ID})
		if hostsOf(d[dp])[b.host] {
			here = append(here, rank{dp, d[dp].ID})
		}
	}
	if len(here) > 0 && p.fleet.shares(b) { // several P's with ranks of their own share the registry
		ranks = here
	}
	if slices.ContainsFunc(ranks, func(r rank) bool { return strings.HasPrefix(r.engine, relayPrefix) }) {
		p.relays.Store(true)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if !slices.Equal(ranks, b.mu.ranks) && len(b.mu.ranks) > 0 {
		p.o.Log.Info("a prefill engine has restarted: its ranks changed", "engine", b.url, "ranks", len(ranks))
		b.id.Store(p.instanceIDs.Add(1))
	}
	b.mu.ranks = ranks
	return len(ranks) > 0
}

// doubtTime is how long requests wait for the health check of an engine in doubt. The end of a check may be delayed by up to
// HealthInterval if an engine is silent.
const doubtTime = 5 * time.Second

// trouble records that a call or a health check of the engine failed: the proxy checks the engine before it uses it again. Requests
// that need the engine wait for that check, at most for doubtTime. If the engine is not well already, trouble does nothing.
func (p *Proxy) trouble(b *backend, err error) {
	if !p.fleet.doubt(b) {
		return
	}
	p.o.Log.Info("an engine does not answer", "engine", b.url, "err", err)
	p.background.Lock()
	defer p.background.Unlock()
	if p.ctx.Err() != nil { // the proxy is closed, and Close waits only for checks that began before
		p.fleet.certain(b)
		return
	}
	p.wg.Go(func() {
		end := sync.OnceFunc(func() { p.fleet.certain(b) })
		defer end()
		defer time.AfterFunc(doubtTime+p.o.patience, end).Stop()
		if p.look(p.ctx, b, false); !b.well.Load() {
			p.o.Log.Info("an engine's health changed", "engine", b.url, "well", false)
		}
	})
}
