// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// Storage is one allocation of KV memory. Regions refer to bytes in it by addresses from Addr on. Addr need not be a pointer: any
// number will do, as long as storages do not overlap.
type Storage struct {
	Addr uint64
	Mem  []byte
}

// Cache is a worker's KV memory as transfers see it. It is immutable once a Sender
// or a Receiver has it.
type Cache struct {
	Storages []Storage
	Regions  []wire.Region // each within one storage
	// In is the index of each region's storage. nil means that each region's Base lies in its storage. With In set, a region may begin
	// before its storage, with blocks that are never used.
	In    []int
	Kinds []GroupKind // of each transferred KV cache group

	// KernelBlocks is how many kernel blocks a logical block of an attention group
	// has: regions are in kernel blocks, requests name logical ones. 0 means 1.
	KernelBlocks int
	// KVHeads is the number of KV heads of the model, over all TP ranks; 0 for MLA,
	// whose cache every rank holds whole.
	KVHeads int
	// Unsliced says why a block cannot be cut by KV heads. "" means that it can: the heads of a block follow each other, each in one
	// piece. P can send a block that cannot be cut only to a D rank that holds the same heads.
	Unsliced string
	// Opaque means that a region is a packed row of several layers and has the name of the first layer only. Such rows cannot be paired
	// between engines of unequal pipeline size.
	Opaque bool
}

// ErrCache means that the parts of a Cache do not fit each other.
var ErrCache = errors.New("mooncake: the parts of the KV cache do not fit")

// Check returns an ErrCache for regions outside storages, groups without kind, and
// storages that overlap.
func (c *Cache) Check() error {
	if len(c.Storages) == 0 || len(c.Regions) == 0 {
		return fmt.Errorf("%w: it has no tensors", ErrCache)
	}
	sorted := slices.Clone(c.Storages)
	slices.SortFunc(sorted, func(a, b Storage) int { return cmp.Compare(a.Addr, b.Addr) })
	for i, s := range sorted {
		if s.Addr == 0 || len(s.Mem) == 0 || s.Addr > 1<<63-uint64(len(s.Mem)) {
			return fmt.Errorf("%w: storage of %d bytes at %#x is empty, at address 0 or beyond 2^63", ErrCache, len(s.Mem), s.Addr)
		}
		if i > 0 && s.Addr-sorted[i-1].Addr < uint64(len(sorted[i-1].Mem)) {
			return fmt.Errorf("%w: storages at %#x and %#x overlap", ErrCache, sorted[i-1].Addr, s.Addr)
		}
	}
	for i := range c.Regions {
		r := &c.Regions[i]
		if c.home(i) < 0 || c.home(i) >= len(c.Storages) || r.Payload == 0 || r.Payload > r.Stride {
			return fmt.Errorf("%w: region %d of layer %q: %d bytes of KV in blocks of %d bytes do not fit, or %#x is in no storage",
				ErrCache, i, r.Layer, r.Payload, r.Stride, r.Base)
		}
		for _, g := range append(slices.Clone(r.Shared), r.Group) {
			if (g < 0 || g >= len(c.Kinds)) && g != wire.SharedGroup {
				return fmt.Errorf("%w: region %d of layer %q is of group %d, the cache has %d groups", ErrCache, i, r.Layer, g, len(c.Kinds))
			}
		}
	}
	return nil
}

// LogStart writes the log lines by which users of vLLM's connector see that a worker has started.
func (c *Cache) LogStart(log *slog.Logger, e Engine) {
	log.Info("Initializing Mooncake Transfer Engine worker", "engine", e.ID)
	log.Info("The Mooncake Transfer Engine is using tcp as its protocol")
	log.Info("Registering KV_Caches", "use_mla", c.KVHeads == 0, "regions", len(c.Regions), "block_len", c.Regions[0].Stride,
		"num_blocks", uint64(len(c.Storages[max(c.home(0), 0)].Mem))/c.Regions[0].Stride)
}

// home returns the index of the storage of region i, or -1.
func (c *Cache) home(i int) int {
	if c.In == nil {
		return c.storage(c.Regions[i].Base)
	}
	if len(c.In) != len(c.Regions) {
		return -1
	}
	return c.In[i]
}

// storage returns the index of the storage that holds addr, or -1.
func (c *Cache) storage(addr uint64) int {
	return slices.IndexFunc(c.Storages, func(s Storage) bool { return addr >= s.Addr && addr-s.Addr < uint64(len(s.Mem)) })
}

// Bytes returns the n bytes at addr, an address in the terms of Storage.Addr. It returns nil when they are not wholly in one storage.
func (c *Cache) Bytes(addr, n uint64) []byte {
	i := c.storage(addr)
	if i < 0 {
		return nil
	}
	s := &c.Storages[i]
	off := addr - s.Addr
	if n > uint64(len(s.Mem))-off {
		return nil
	}
	return s.Mem[off : off+n : off+n]
}

// heads is the number of KV heads by which a plan may cut blocks; 0 with Mamba, whose state has no heads.
func (c *Cache) heads() int {
	if slices.Contains(c.Kinds, Mamba) {
		return 0
	}
	return c.KVHeads
}

// replicated reports whether several ranks of an engine of tpSize TP ranks hold the same bytes: with MLA, or with more ranks than KV
// heads.
func (c *Cache) replicated(tpSize int) bool { return c.KVHeads == 0 || tpSize > c.KVHeads }
