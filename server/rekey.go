// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvasir-kv/kvasir/tier/seal"
)

// Rates of RekeyTier: bytes per second, read and written together. Its callers refuse a rate above MaxRekeyRate.
const (
	DefaultRekeyRate = 128 << 20
	MaxRekeyRate     = 1 << 40
)

// RekeyTier encrypts those objects of a tier again that were encrypted with an older key, `rate` bytes per second at most; 0 for the
// default. It calls `so` with its figures after each object. `by` is who asks, for the log. It ends with ctx, or when the server stops:
// objects that are done stay so, and another call continues. Errors: ErrNoTier, those of seal.Tier.Rekey.
func (s *Server) RekeyTier(ctx context.Context, name string, rate int64, by string, so func(seal.RekeyStats)) (seal.RekeyStats, error) {
	t, ok := s.opts.Seals[name]
	if !ok {
		if _, there := s.opts.Contents[name]; there {
			return seal.RekeyStats{}, fmt.Errorf("%w: the layout of %.40q is another program's, and is never encrypted", seal.ErrNoKeys, name)
		}
		return seal.RekeyStats{}, s.noTier(name)
	}
	if rate == 0 {
		rate = DefaultRekeyRate
	}
	pace := &bytePace{rate: rate, next: time.Now()}
	s.log.Info("objects of a tier are encrypted anew", "by", by, "tier", name)
	n, err := t.Rekey(ctx, pace.wait, so)
	switch {
	case errors.Is(err, seal.ErrNoKeys), errors.Is(err, seal.ErrBusy):
	case err != nil:
		s.log.Warn("a tier was not encrypted anew as a whole: what was done stays", "tier", name, "rewritten", n.Rewritten, "seen", n.Seen, "err", err)
	default:
		s.log.Info("a tier was encrypted anew", "tier", name, "key", n.Key, "rewritten", n.Rewritten, "current", n.Current, "plain", n.Plain, "missing_key", n.Unknown, "failed", n.Failed)
	}
	return n, err
}

// bytePace limits a rate of bytes per second.
type bytePace struct {
	rate int64
	next time.Time // more bytes may be moved from then on
}

// wait waits until n more bytes may be moved.
func (p *bytePace) wait(ctx context.Context, n int64) error {
	now := time.Now()
	if p.next.Before(now) {
		p.next = now
	}
	timer := time.NewTimer(p.next.Sub(now))
	defer timer.Stop()
	p.next = p.next.Add(time.Duration(float64(n) / float64(p.rate) * float64(time.Second)))
	select {
	case <-timer.C:
		return ctx.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}
