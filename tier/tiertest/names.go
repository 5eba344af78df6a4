// SPDX-License-Identifier: Apache-2.0

package tiertest

import (
	"context"
	"sync"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// names are the names in all tests: a tier and the generations that Run puts over it share
// them.
var names = newNames()

// Names returns the models and salts of the namespaces that Run uses.
func Names() *tier.Names { return names }

// model is the model of all namespaces in Names.
const model = "org/model"

func newNames() *tier.Names {
	n := tier.NewNames()
	other := Key(0).Namespace
	other[15]++
	n.Add(Key(0).Namespace, model, nil)
	n.Add(other, model, []byte("tenant"))
	return n
}

// WithSums returns x with a memory of the checksums of the objects written through it, for a layout that cannot
// store them. Run compares the checksums.
func WithSums(x tier.Tier) tier.Tier { return WithSumsAndNames(x, Names(), model) }

// WithSumsAndNames is WithSums for a tier with other names than Names, in which the namespaces of Run have the model model.
func WithSumsAndNames(x tier.Tier, names *tier.Names, model string) tier.Tier {
	return &summed{Tier: x, names: names, model: model, sums: map[kv.Key]uint64{}}
}

type summed struct {
	tier.Tier
	names *tier.Names
	model string
	mu    sync.Mutex
	sums  map[kv.Key]uint64
}

func (s *summed) fill(k kv.Key, m *tier.Meta) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if m.NoSum {
		*m = tier.Meta{Len: m.Len, Sum: s.sums[k]}
	}
}

func (s *summed) Stat(ctx context.Context, keys []kv.Key, metas []tier.Meta) error {
	err := s.Tier.Stat(ctx, keys, metas)
	for i, k := range keys {
		s.fill(k, &metas[i])
	}
	return err
}

func (s *summed) Read(ctx context.Context, k kv.Key, dst []byte) (tier.Meta, error) {
	m, err := s.Tier.Read(ctx, k, dst)
	s.fill(k, &m)
	return m, err
}

func (s *summed) Write(ctx context.Context, k kv.Key, m tier.Meta, src []byte) error {
	s.mu.Lock()
	s.sums[k] = m.Sum
	s.mu.Unlock()
	return s.Tier.Write(ctx, k, m, src)
}
