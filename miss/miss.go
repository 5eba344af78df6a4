// Package miss says why chunks are not served, and remembers it of those that went.
package miss

import (
	"encoding/binary"

	"github.com/kvasir-kv/kvasir/kv"
)

// Reason says why chunks were not served.
type Reason uint8

// The reasons of a miss.
const (
	None         Reason = iota
	NeverStored         // no chunk of that key was seen, or too long ago
	Evicted             // to make room
	Cleared             // by an operator or a client
	Failed              // its writer never committed it
	BeingStored         // reserved, not committed yet
	NotPinned           // no lookup of that session promised it
	Busy                // too many transfers in progress
	Corrupt             // differed from its checksum after a restart
	NotCompared         // kept by an earlier server, and not yet compared with its checksum
	BelowSlow           // the tier below did not answer in time
	BelowFailed         // the tier below failed, or had lost it
	BelowCorrupt        // the tier below has something else
	BelowSlower         // the tier below was not asked: computing is expected to be faster

	NumReasons = int(BelowSlower) + 1
)

var reasons = [NumReasons]string{
	"", "never stored", "evicted", "cleared", "its store was not completed",
	"being stored right now", "no lookup of this request pinned it", "too many transfers in progress",
	"it differed from its checksum after a restart", "it is still to be compared with its checksum after a restart",
	"the tier below did not answer in time", "the tier below failed", "the tier below has other bytes",
	"computing is faster than the tier below",
}

func (r Reason) String() string { return reasons[r] }

// labels name the reasons in metrics.
var labels = [NumReasons]string{
	"none", "never_stored", "evicted", "cleared", "not_committed", "being_stored", "not_pinned", "busy", "corrupt", "not_compared",
	"below_slow", "below_failed", "below_corrupt", "below_slower",
}

// Label returns the reason's name in metrics.
func (r Reason) Label() string { return labels[r] }

// IsBelow reports whether a reason is about what lies below the pool.
func (r Reason) IsBelow() bool { return r >= BelowSlow && r <= BelowSlower }

// Because returns why a chunk is not served that the pool does not have and the tier
// below might have had.
func (r Reason) Because(below Reason) Reason {
	switch r {
	case NeverStored, Evicted, Cleared, Failed:
		return below
	}
	return r
}

// Memory remembers 64 bits of the keys that were dropped last, and why. Two keys
// that agree in those bits only explain a miss wrongly. It takes no lock: its owner's
// covers it.
type Memory struct {
	most    int
	reasons map[uint64]Reason
	ring    []uint64
	next    int
}

// NewMemory returns a Memory of that many keys at most.
func NewMemory(most int) *Memory { return &Memory{most: most, reasons: make(map[uint64]Reason)} }

// ID returns the bits of a key that a Memory remembers.
func ID(k *kv.Key) uint64 {
	le := binary.LittleEndian
	return le.Uint64(k.Chunk[:]) ^ le.Uint64(k.Namespace[:]) ^ uint64(k.Rank)<<32 ^ uint64(k.Group)
}

// Add notes that an object was dropped, and why.
func (m *Memory) Add(k *kv.Key, why Reason) {
	id := ID(k)
	if _, ok := m.reasons[id]; !ok {
		if len(m.ring) < m.most {
			m.ring = append(m.ring, id)
		} else {
			delete(m.reasons, m.ring[m.next])
			m.ring[m.next] = id
			m.next = (m.next + 1) % m.most
		}
	}
	m.reasons[id] = why
}

// Why returns why an object is not there: NeverStored of what is not remembered.
func (m *Memory) Why(k *kv.Key) Reason {
	if r := m.reasons[ID(k)]; r != None {
		return r
	}
	return NeverStored
}
