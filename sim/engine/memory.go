// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/kvasir-kv/kvasir/internal/hostmem"
	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/sim/kvconfig"
	"github.com/kvasir-kv/kvasir/sim/kvmem"
	"github.com/kvasir-kv/kvasir/sim/sched"
)

// lends reports whether a connector lends the engine's memory to a server on this host.
func (o *Options) lends() bool {
	for _, c := range o.Connectors {
		if c.Connector == kvconfig.LMCacheMPConnector {
			if l, err := c.LMCache(); err == nil && l.Mode == lmcacheDriven {
				return true
			}
		}
	}
	return false
}

// usualModel is the longest sequence of a model for which the options do not set it.
const usualModel = 32768

// checkMemory returns an error for what does not fit, before anything is allocated: a model whose longest sequence does not fit into
// the KV memory, and a KV memory that this machine does not have. (Go ends a process that gets no memory.) If the free memory is
// unknown, it refuses nothing. It sets the longest sequence if the options do not.
func checkMemory(o *Options, c *sched.Config) error {
	if err := errors.Join(o.KV.Validate(), c.Validate()); err != nil {
		return err
	}
	longest := c.Longest(cmp.Or(c.MaxModel, usualModel))
	if longest < c.MaxModel || longest < 2 {
		return fmt.Errorf("engine: %d KV blocks of %d tokens hold a sequence of %d tokens at most, the model's longest has %d: take more blocks, or a shorter model length",
			o.KV.Blocks, o.KV.BlockTokens, longest, cmp.Or(c.MaxModel, 2))
	}
	c.MaxModel = longest
	need := o.KV.LayerBytes() * int64(o.KV.Layers*o.KV.TPSize)
	if have, ok := hostmem.Available(); ok && need > have {
		return fmt.Errorf("engine: %d KV blocks take %s, this machine has %s of memory available: take fewer blocks, layers, KV heads or bytes a head",
			o.KV.Blocks, kv.FormatBytes(need), kv.FormatBytes(have))
	}
	if !o.lends() {
		return nil
	}
	dir := cmp.Or(o.ShmDir, shm.Dir)
	if have, err := shm.Free(dir); err == nil && need > have {
		return fmt.Errorf("engine: %d KV blocks take %s, %s has %s left, and lmcache_driven needs them there: take fewer blocks, or engine_driven",
			o.KV.Blocks, kv.FormatBytes(need), dir, kv.FormatBytes(have))
	}
	return nil
}

// newMemory creates an engine's KV memory. If the memory is lent, names are the segments of each rank's layers. free frees the memory.
func newMemory(o *Options) (m *kvmem.Memory, names [][]string, free func() error, err error) {
	if !o.lends() {
		m, err = kvmem.New(o.KV, func(_, _ int, n int64) ([]byte, error) { return make([]byte, n), nil })
		return m, nil, func() error { return nil }, err
	}
	var segments []*shm.Segment
	var paths []string
	free = func() error {
		var errs []error
		for i, s := range segments {
			errs = append(errs, os.Remove(paths[i]), s.Close())
		}
		return errors.Join(errs...)
	}
	// Names in the form that lmcache lends: a server accepts no other, and removes those that dead engines leave.
	prefix := fmt.Sprintf("lmcache_kv_%d_%s", os.Getpid(), strings.ToLower(rand.Text()[:8]))
	names = make([][]string, o.KV.TPSize)
	m, err = kvmem.New(o.KV, func(rank, layer int, n int64) ([]byte, error) {
		name := fmt.Sprintf("%s_%d", prefix, len(segments))
		path, err := shm.Path(o.ShmDir, name)
		if err != nil {
			return nil, err
		}
		s, err := shm.Create(path, n)
		if err != nil {
			return nil, err
		}
		segments, paths, names[rank] = append(segments, s), append(paths, path), append(names[rank], name)
		if err := s.Populate(0, n, true); err != nil && !errors.Is(err, shm.ErrNoPopulate) { // otherwise a /dev/shm that others fill would end the engine
			return nil, fmt.Errorf("engine: provide KV memory of %s: %w", kv.FormatBytes(n), err)
		}
		return s.Bytes(0, n), nil
	})
	if err != nil {
		return nil, nil, nil, errors.Join(err, free())
	}
	return m, names, free, nil
}
