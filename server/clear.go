// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kvasir-kv/kvasir/internal/safelog"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// ClearTier says in which tiers a clear makes chunks absent.
type ClearTier string

// The tiers of a clear, as LMCache names them.
const (
	ClearL1  ClearTier = "l1"  // the pool
	ClearL2  ClearTier = "l2"  // the tiers below it
	ClearAll ClearTier = "all" // both
)

// ParseClearTier parses the name of a ClearTier.
func ParseClearTier(text string) (ClearTier, error) {
	t := ClearTier(text)
	if t != ClearL1 && t != ClearL2 && t != ClearAll {
		return "", fmt.Errorf("unknown tier %.20q: l1 (the pool), l2 (the tiers below it) and all are known", text)
	}
	return t, nil
}

// Clear is a request to clear the cache.
type Clear struct {
	Tier   ClearTier
	Force  bool     // also drop chunks that requests in progress pin or hold
	Models []string // clear only these models in the tiers; nil: all. The pool is always cleared whole
	By     string   // who asks, for the log
}

// Cleared is what a clear did.
type Cleared struct {
	Chunks int    // chunks that were dropped from the pool
	Stays  string // names of the places that still have objects, for people; empty: none has
}

// Clear drops every chunk of the pool that no request pins or holds, and with Force every chunk. Without Force, chunks that lookups have
// pinned stay until the next clear, as with LMCache. If the tiers are cleared too, no lookup that begins after Clear has returned finds
// anything that was stored before: not in the tiers, not on its way to or from them, and not in the pool. An error means that lookups may
// find it again after a restart.
func (s *Server) Clear(c Clear) (out Cleared, err error) {
	var stays []string
	if c.Tier == ClearAll {
		s.store.BeginForget()
	}
	s.clearing.Lock() // one clear at a time: an object that is stored between two overlapping clears would belong to the generation of neither
	if below := s.opts.Generations; c.Tier != ClearL1 && below != nil {
		var commit func()
		if commit, err = below.Prepare(c.Models); err != nil {
			stays = append(stays, "other servers, and this one after a restart, may serve older objects of the tiers: "+err.Error())
		}
		begin := func() {
			commit()
			s.opts.Changes.Forget()
		}
		if c.Tier == ClearAll {
			s.store.Forget(begin, !c.Force)
		} else {
			begin()
			s.store.ForgetBelow(func(ns kv.Namespace) bool {
				n, named := s.names.Of(ns)
				return c.Models == nil || !named || slices.Contains(c.Models, n.Model)
			})
		}
		stays = append(append(stays, s.opts.Places...), s.unusedModels(c.Models)...)
	} else if c.Tier == ClearAll {
		s.store.Forget(func() {}, !c.Force)
	}
	s.clearing.Unlock()
	if c.Tier != ClearL2 {
		out.Chunks = s.store.Clear(c.Force)
	}
	if c.Tier == ClearAll {
		if !s.store.DropOutdated() {
			stays = append(stays, "requests in progress keep memory of the pool until they end; no other request finds its chunks")
		}
	} else if c.Tier == ClearL1 && s.opts.Generations != nil {
		stays = append(stays, "the tiers below the pool: lookups find what they have; clear with tier all to forget that, too")
	}
	if c.Tier != ClearL1 && s.opts.Generations != nil {
		s.sweepSoon()
		s.opts.Generations.Confirm(context.Background()) // other servers follow
	}
	out.Stays = strings.Join(stays, "; ")
	s.clears.Add(1)
	models := "all"
	if c.Models != nil {
		models = strings.Join(c.Models, " ")
	}
	s.log.Warn("the cache was cleared", "by", c.By, "tier", string(c.Tier), "models_below", models, "chunks", out.Chunks, "force", c.Force, "stays", out.Stays)
	return out, err
}

// unusedModels returns a message for each of the models that no engine has registered or used since the start. A misspelt name clears
// nothing.
func (s *Server) unusedModels(models []string) (out []string) {
	used := make(map[string]bool)
	s.names.Each(func(_ kv.Namespace, n tier.Name) { used[n.Model] = true })
	for _, in := range s.registry.List() {
		used[in.Model] = true
	}
	for _, model := range models {
		if !used[model] {
			out = append(out, fmt.Sprintf("no engine has used model %s since this server's start: if engines use another name for it, its chunks stay in the tiers", safelog.Text(model, safelog.MaxText)))
		}
	}
	return out
}

// followClear applies a generation that another server began with a clear. Objects in this server's memory may be older, so it makes them
// outdated, too.
func (s *Server) followClear(commit func()) {
	s.store.BeginForget()
	s.clearing.Lock()
	s.store.Forget(func() {
		commit()
		s.opts.Changes.Forget()
	}, false)
	s.clearing.Unlock()
	n := s.store.Clear(false)
	s.store.DropOutdated()
	s.clears.Add(1)
	s.sweepSoon()
	s.log.Warn("the cache was cleared", "by", "another server that shares a tier", "tier", string(ClearAll), "chunks", n)
}

// clearFor clears for a client: the pool, and in the tiers the models whose workers the client's user registered. If the user has
// registered none, as just after a start of the server, it returns an error when the tiers may have objects.
func (s *Server) clearFor(who *caller, force bool) error {
	models := []string{}
	for _, in := range s.registry.List() {
		if in.By == who.By && !slices.Contains(models, in.Model) {
			models = append(models, in.Model)
		}
	}
	c := Clear{Tier: ClearAll, Force: force, Models: models, By: "a client of " + who.By.String()}
	switch _, err := s.Clear(c); {
	case err != nil:
		return fmt.Errorf("%w after a restart of this server: %w", errForget, err)
	case len(models) == 0 && s.opts.Generations != nil:
		return fmt.Errorf("%w in the tiers: no worker of this user is registered, so its models are not known", errForget)
	}
	return nil
}

// DeleteObjects drops objects from the pool, the tiers or both, as `from` says. inPool are the objects' keys in the pool, and below are the
// keys that they may have in the tiers. In the pool it skips objects that are pinned or in transfer; skipped counts them. With an error the
// tiers may still have the objects.
func (s *Server) DeleteObjects(inPool, below []kv.Key, from ClearTier) (deleted, skipped int, err error) {
	if from == ClearL1 {
		deleted, skipped = s.store.Drop(inPool)
		return deleted, skipped, nil
	}
	if err = s.store.DeleteBelow(below); err == nil && from == ClearL2 {
		deleted = len(below)
	}
	if from == ClearAll { // after the tiers: objects that come from there meanwhile are dropped, too
		deleted, skipped = s.store.Drop(slices.Concat(inPool, below))
	}
	if err != nil {
		err = errors.Join(errors.New("the tiers below may still have the objects"), err)
	}
	return deleted, skipped, err
}

// KeysBelow returns the keys that the object k of a model and salt may have in the tiers.
func (s *Server) KeysBelow(model, salt string, k kv.Key) (out []kv.Key) {
	for _, ns := range s.names.Namespaces(model, salt) {
		k.Namespace = ns
		out = append(out, k)
	}
	return out
}
