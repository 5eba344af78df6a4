// SPDX-License-Identifier: Apache-2.0

// Package evict has eviction policies as pure state machines. They know slot numbers, weights and uses, not bytes or memory. Lifetimes
// watches a sample of the evictions.
//
// A policy is not safe for concurrent use: its owner locks. No call takes long: Victim looks at a bounded number of slots, every other call
// at a few.
package evict

import (
	"fmt"
	"slices"
	"strings"
)

// Policy chooses the slot to evict next. It knows every slot in use, from Add to Remove. A slot that is busy stays in its books but is
// never returned by Victim.
type Policy interface {
	// Add records that a slot, which is not in the policy, has new content of weight bytes. id identifies the content: content that comes
	// back after its eviction has the same id. parent is the id of the chunk before it in its prompt; 0 if there is none, or if it is not
	// known. The slots of a prompt are added tail first.
	Add(slot uint32, id, parent uint64, weight int64)

	// Use records that a slot was served or stored again. The owner must also call it when a busy slot is no longer busy, because Victim
	// does not look at a busy slot again before that. It does nothing for a slot that is not in the policy.
	Use(slot uint32)

	// Remove records that a slot has no content any more. It does nothing for a slot that is not in the policy.
	Remove(slot uint32)

	// Victim returns the slot to evict next, among those for which busy reports false. The slot stays in the policy until Remove. If ok is
	// false there is none; with more, Victim has not looked at all slots yet, and the next call continues.
	Victim(busy func(slot uint32) bool) (slot uint32, ok, more bool)

	// Ascend calls f for the slots that Victim did not find busy, about in the order in which they would be evicted, until f reports false.
	// f must not change the policy.
	Ascend(f func(slot uint32) bool)
}

// maxLooks is how many slots one call of Victim looks at. If all of them are busy, Victim returns more, and the next call continues.
const maxLooks = 256

// Names are the names of the policies that New knows.
var Names = []string{"lru", "leaf-lru", "s3fifo", "arc", "leaf-hazard"}

// Default is the name of the policy that a server uses unless a flag names another.
const Default = "leaf-hazard"

// New returns the policy of a name for a pool of poolBytes bytes.
func New(name string, poolBytes int64) (Policy, error) {
	switch name {
	case "lru":
		return NewLRU(), nil
	case "leaf-lru":
		return NewLeafLRU(), nil
	case "s3fifo":
		return NewS3FIFO(poolBytes), nil
	case "arc":
		return NewARC(poolBytes), nil
	case "leaf-hazard":
		return NewLeafHazard(), nil
	}
	return nil, fmt.Errorf("evict: unknown policy %q; known are %s", name, strings.Join(slices.Sorted(slices.Values(Names)), ", "))
}
