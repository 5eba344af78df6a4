// SPDX-License-Identifier: Apache-2.0

package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// defaultSweepRate is how many objects per second are removed from a tier after a clear. It is low, so that lookups and stores go on.
const defaultSweepRate = 500

// paced returns a Pace of `rate` objects per second.
func paced(rate int) tier.Pace {
	return func(ctx context.Context, n int) error {
		wait := time.NewTimer(time.Duration(n) * time.Second / time.Duration(rate))
		defer wait.Stop()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-wait.C:
			return nil
		}
	}
}

// sweepSoon starts the removal of the objects that the last clear made absent.
func (s *Server) sweepSoon() {
	select {
	case s.sweeps <- struct{}{}:
	default: // a removal is waiting already
	}
}

// runSweeps removes objects of earlier generations from the tiers after each clear, until ctx ends.
func (s *Server) runSweeps(ctx context.Context) {
	book := s.opts.Generations
	if book == nil {
		return
	}
	if book.HasStale() { // an earlier server may not have finished
		s.sweepSoon()
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.sweeps:
		}
		for _, name := range slices.Sorted(maps.Keys(s.opts.Contents)) {
			n, err := tier.RemoveIf(ctx, s.opts.Contents[name], book.Stale, paced(cmp.Or(s.opts.SweepRate, defaultSweepRate)))
			if n > 0 {
				s.log.Info("objects from before a clear left a tier", "tier", name, "objects", n)
			}
			if err != nil && ctx.Err() == nil && !errors.Is(err, tier.ErrNoList) {
				s.log.Warn("objects from before a clear stay in a tier until the next clear or start", "tier", name, "err", err)
			}
		}
	}
}

// ErrNoTier means that a server has no tier of that name.
var ErrNoTier = errors.New("there is no such tier")

// noTier returns the error for a name that no tier has.
func (s *Server) noTier(name string) error {
	return fmt.Errorf("%w: %.40q; this server has %s", ErrNoTier, name, cmp.Or(strings.Join(slices.Sorted(maps.Keys(s.opts.Contents)), ", "), "none"))
}

// DropTier removes all objects of a tier or, with a model, those of the model if the tier names objects by models. It returns how many it
// removed, also with an error. `by` is who asks, for the log. Subscribers of KV events learn that the tier has none of those chunks; chunks
// that stay are announced again when they are seen. Then the store asks the tier for the chunks of the pool that were recorded as being
// there. A chunk that the tier lacks is written there again when an engine loads it.
func (s *Server) DropTier(ctx context.Context, name, model, by string) (removed int, err error) {
	t, ok := s.opts.Contents[name]
	if !ok {
		return 0, s.noTier(name)
	}
	unnamed := false
	of := s.belongsTo(model)
	removed, err = tier.RemoveIf(ctx, t, func(c tier.Content) bool {
		unnamed = unnamed || c.Model == ""
		return model == "" || c.Model != "" && of(c.Model)
	}, paced(cmp.Or(s.opts.DropRate, defaultDropRate)))
	if removed > 0 {
		if number := s.opts.Numbers[name]; number > 0 {
			forget := model
			if strings.Contains(model, "~") { // a revision or a generation: requests name only the model
				forget = ""
			}
			s.opts.Changes.ForgetTier(number, forget)
		}
		s.store.RecheckBelow()
	}
	if err == nil && model != "" && unnamed {
		err = fmt.Errorf("tier %s does not name objects by models: drop all of it, or clear the model", name)
	}
	s.log.Warn("objects of a tier were removed", "by", by, "tier", name, "model", model, "objects", removed, "err", err)
	return removed, err
}

// belongsTo returns a function that reports whether a tier's name of a model stands for this model: in any revision and generation, and as
// a digest if a request has used the model since the start.
func (s *Server) belongsTo(model string) func(name string) bool {
	digests := make(map[string]bool)
	s.names.Each(func(_ kv.Namespace, n tier.Name) {
		if tier.IsOf(n.Model, model) {
			digests[n.Digested().Model] = true
		}
	})
	return func(name string) bool { return tier.IsOf(name, model) || digests[name] }
}

// defaultDropRate is how many objects per second DropTier removes. It is high, because an operator waits for it.
const defaultDropRate = 20_000
