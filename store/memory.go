// SPDX-License-Identifier: Apache-2.0

package store

import (
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// backed gives pool.Memory access to the pool: its methods that change the pool's books take the store's lock.
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

// Memory returns the pool.Memory, which knows how much of the pool the kernel has provided. Run provides the rest in the background.
func (s *Store) Memory() *pool.Memory { return s.memory }

// provide makes the kernel provide memory for `chunks` more chunks with the object groups `of`, unless the whole pool has memory already.
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
