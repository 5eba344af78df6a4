// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"syscall"
	"time"
)

// promises checks what a node may not lose and what it may not serve, in a time without load: chunks of the last
// prompts outlive kill -9, and after a clear none of them is found, on no node, also after kill -9.
func (s *soak) promises(ctx context.Context) {
	prompts := s.load.lately()
	if len(prompts) == 0 || ctx.Err() != nil {
		return
	}
	s.checks++
	victim := []*part{s.part("node1"), s.part("node2")}[s.checks%2]
	prompts = prompts[max(0, len(prompts)-5):] // the pool holds them all
	s.found(ctx, victim, prompts)              // what only tiers have is in the pool then
	before := s.found(ctx, victim, prompts)
	wait(ctx, 2500*time.Millisecond) // chunks of the last 2 s may be lost
	s.killNow(ctx, victim)           // no flipped byte is left there: what was found was compared
	after := s.found(ctx, victim, prompts)
	s.logf("%s found %d objects of the last prompts, %d after kill -9", victim.name, before, after)
	if after < before && ctx.Err() == nil {
		s.violation("%s found %d objects of the last prompts before kill -9, %d after it", victim.name, before, after)
	}
	if s.checks%3 != 0 { // a clear each third time: the load should hit, too
		return
	}
	err := eventually(ctx, unendedPut, func() error { return s.ask(ctx, http.MethodPost, victim.url("/cache/clear"), `{"force":true}`) })
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		s.violation("%s: a clear fails in a quiet time: %v", victim.name, err)
		return
	}
	for _, p := range []*part{victim, s.part("node1"), s.part("node2")} {
		if p != victim {
			wait(ctx, clearReaches)
		}
		if n := s.found(ctx, p, prompts); n > 0 && ctx.Err() == nil {
			s.violation("%s finds %d objects that were stored before the clear of %s", p.name, n, victim.name)
		}
	}
	s.killNow(ctx, victim)
	if n := s.found(ctx, victim, prompts); n > 0 && ctx.Err() == nil {
		s.violation("%s finds %d objects after kill -9 that were stored before its clear", victim.name, n)
	}
	s.logf("%s was cleared", victim.name)
}

// unendedPut is how long the master of a Mooncake Store keeps a name for a put whose node was killed in its middle, as the note of
// generations, and some more. A clear is refused with that reason until then.
const unendedPut = 40 * time.Second

// clearReaches is how long a clear may take to reach other nodes: 0.5 s, and 1 s more over S3.
const clearReaches = 1600 * time.Millisecond

func (s *soak) killNow(ctx context.Context, p *part) {
	p.end(syscall.SIGKILL, 5*time.Second)
	s.mu.Lock()
	s.record.Kills[p.kind]++
	s.mu.Unlock()
	if err := p.start(s.alone); err != nil {
		s.violation("%v", err)
		return
	}
	if err := p.await(ctx, 20*time.Second); err != nil && ctx.Err() == nil {
		s.violation("%v", err)
	}
	// Engines notice by their heartbeat; a prefetch needs a registered worker.
	limit := 20 * time.Second
	if s.o.real != "" { // one may have ended by itself, and start
		limit = realStart
	}
	if err := eventually(ctx, limit, func() error { return s.workers(ctx, p) }); err != nil {
		s.violation("%s: engines do not come back after kill -9: %v", p.name, err)
	}
}

// workers reports whether workers of the node's engines can load hits.
func (s *soak) workers(ctx context.Context, p *part) error {
	n := s.variant.pTP + s.variant.dTP
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, p.url(fmt.Sprintf("/healthcheck?workers=%d", n)), nil)
	if err != nil {
		return err
	}
	r, err := httpClient.Do(q)
	if err != nil {
		return err
	}
	defer r.Body.Close()
	if r.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(io.LimitReader(r.Body, 500))
		return fmt.Errorf("%s: %s", r.Status, b)
	}
	return nil
}

// found asks a node for how many objects of prompts a hit would find, in pool and tiers.
func (s *soak) found(ctx context.Context, p *part, prompts [][]uint32) (n int) {
	for _, tokens := range prompts {
		k, err := s.prefetch(ctx, p, tokens)
		if err != nil && ctx.Err() == nil {
			s.violation("%s: a prefetch: %v", p.name, err)
			return 0
		}
		n += k
	}
	return n
}

func (s *soak) prefetch(ctx context.Context, p *part, tokens []uint32) (int, error) {
	n := 0
	for _, size := range map[bool][]int{true: {s.variant.pTP}, false: {s.variant.pTP, s.variant.dTP}}[s.variant.pTP == s.variant.dTP] {
		k, err := s.prefetchOf(ctx, p, tokens, size)
		if err != nil {
			return 0, err
		}
		n += k
	}
	return n, nil
}

func (s *soak) prefetchOf(ctx context.Context, p *part, tokens []uint32, worldSize int) (int, error) {
	body, err := json.Marshal(map[string]any{"model_name": s.o.modelName(), "world_size": worldSize, "token_ids": tokens})
	if err != nil {
		return 0, err
	}
	var begun struct {
		ID string `json:"request_id"`
	}
	if err := call(ctx, http.MethodPost, p.url("/cache/prefetches"), string(body), &begun); err != nil {
		return 0, err
	}
	var state struct {
		Status string
		Found  int `json:"found_keys"`
		Total  int `json:"total_keys"`
	}
	err = eventually(ctx, 15*time.Second, func() error {
		if err := call(ctx, http.MethodGet, p.url("/cache/prefetches/"+begun.ID), "", &state); err != nil {
			return err
		}
		if state.Status != "completed" {
			return fmt.Errorf("a prefetch is %s", state.Status)
		}
		return nil
	})
	return state.Found, err
}

// call sends a request and decodes its answer.
func call(ctx context.Context, method, url, body string, into any) error {
	q, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return err
	}
	q.Header.Set("Content-Type", "application/json")
	r, err := httpClient.Do(q)
	if err != nil {
		return err
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		return err
	}
	if r.StatusCode/100 != 2 {
		return fmt.Errorf("%s %s: %s: %.300s", method, url, r.Status, b)
	}
	return json.Unmarshal(b, into)
}
