// SPDX-License-Identifier: Apache-2.0

package store

import (
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// backed is the pool as pool.Memory sees it: methods that change books take the store's lock.
type backed struct {
	*pool.Pool
	store *Store
}

func (b backed) FreeBytes() int64 { return b.store.Stats().FreeBytes }

func (b backed) Limit(bytes int64) error {
	err := b.BackIndexFor(bytes) // without the lock: the kernel may take long
	b.store.lock()
	defer b.store.unlock()
	b.Pool.Limit(bytes)
	return err
}

// Memory is how much of the pool has memory. Run provides it in its time.
func (s *Store) Memory() *pool.Memory { return s.memory }

// provide prepares memory for chunks chunks.
func (s *Store) provide(chunks int, of *object.Groups) {
	if s.memory.Whole() {
		return
	}
	bytes := int64(0)
	for g := range of.Len() {
		bytes += int64(chunks) * s.mu.pool.Round(of.Bytes(g))
	}
	s.memory.Prepare(bytes)
}
