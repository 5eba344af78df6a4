// SPDX-License-Identifier: Apache-2.0

package tiering

import "github.com/kvasir-kv/kvasir/internal/container"

// WarmedSlots is the set of slots whose objects were read before their right length was known. The zero WarmedSlots is empty. It takes no
// lock: its owner's covers it. It takes one byte for each slot.
type WarmedSlots struct{ set container.PagedSlice[bool] }

// Add adds a slot.
func (s *WarmedSlots) Add(slot uint32) {
	s.set.Grow(int(slot) + 1)
	*s.set.At(int(slot)) = true
}

// Has reports whether a slot was added.
func (s *WarmedSlots) Has(slot uint32) bool { return int(slot) < s.set.Len() && *s.set.At(int(slot)) }

// Remove removes a slot. The slot need not have been added.
func (s *WarmedSlots) Remove(slot uint32) {
	if s.Has(slot) {
		*s.set.At(int(slot)) = false
	}
}
