// SPDX-License-Identifier: Apache-2.0

// Package evict holds eviction policies as pure state machines: they know slot
// numbers, weights and what was used, not bytes or memory. Lifetimes watches a sample of what they evict.
//
// A policy is not safe for concurrent use: its owner locks. No call takes long: a
// Victim looks at a bounded number of slots, everything else at a few.
package evict

import (
	"fmt"
	"slices"
	"strings"
)

// Policy chooses the next victim of eviction. It knows every slot in use, from Add to Remove.
// A slot that is being read stays in its books and cannot be a victim.
type Policy interface {
	// Add notes that a slot holds something new, of weight bytes. id stands for the
	// content: what comes back after its eviction has the same. parent is the id of
	// what it continues, the chunk before it in its prompt; 0 for none, or if that is
	// not known. The slots of a prompt are added tail first. The slot is not in the
	// policy.
	Add(slot uint32, id, parent uint64, weight int64)

	// Use notes that a slot was served or stored again. The owner also calls it when
	// a slot was busy and no longer is: Victim does not look again at what it found
	// busy before that. A slot that is not in the policy is left alone.
	Use(slot uint32)

	// Remove notes that a slot holds nothing any more. A slot that is not in the
	// policy is left alone.
	Remove(slot uint32)

	// Victim returns the slot to evict next of those for which busy answers false. It
	// stays in the policy until Remove. ok is false when there is none, or, with
	// more, when it has not looked at all of them: the next call goes on from there.
	Victim(busy func(slot uint32) bool) (slot uint32, ok, more bool)

	// Ascend calls f for the slots that Victim did not find busy, about in the order
	// in which they are to be evicted, until f answers false. f must not change the
	// policy.
	Ascend(f func(slot uint32) bool)
}

// maxLooks bounds the slots that one Victim looks at.
const maxLooks = 256

// Names are the policies that New knows.
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
