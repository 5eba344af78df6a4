// SPDX-License-Identifier: Apache-2.0

// Package miss says why chunks are not served, and remembers why the latest ones were dropped.
package miss

import (
	"encoding/binary"
	"time"

	"github.com/kvasir-kv/kvasir/internal/container"
	"github.com/kvasir-kv/kvasir/kv"
)

// Reason says why chunks were not served.
type Reason uint8

// The reasons of a miss.
const (
	None          Reason = iota
	NeverStored          // no chunk of that key is remembered
	Evicted              // to make room
	Cleared              // by an operator or a client
	Expired              // unused for its TTL
	RequestTTL           // the TTL of the request that stored it was over
	Failed               // its writer never committed it
	BeingStored          // reserved, not committed yet
	NotPinned            // no lookup of that session pinned it
	Busy                 // too many transfers in progress
	Corrupt              // differed from its checksum after a restart
	Unsummed             // had no checksum yet when the server was killed
	NotCompared          // an earlier server stored it, and it was not yet compared with its checksum
	BelowSlow            // the tier below did not answer in time
	BelowFailed          // the tier below failed, or has lost it
	BelowCorrupt         // the tier below has other bytes
	BelowSlower          // the tier below was not asked: computing is expected to be faster
	NoRoom               // the tier below has it, but all of the pool is pinned, being written or within the quotas of others
	Window               // a group with a window or states lacks it; other groups of the chunk have it
	OtherSalt            // only prompts with another salt stored it
	OtherModel           // only another model stored it
	OtherRank            // only other ranks of the model stored it, or workers of another world size
	OtherLayout          // only workers with another layout stored it
	OtherName            // it is stored only under a name whose model and salt are not known here
	Short                // the prompt was shorter than a chunk
	Unregistered         // no worker of the model and world size is registered
	Declined             // the lookup was declined for another reason
	SkipLoad             // the request has lmcache.skip_load
	Unsigned             // its salt has no valid signature, which the server requires
	ForeignTenant        // its client is limited to other tenants

	NumReasons = int(ForeignTenant) + 1
)

var reasons = [NumReasons]string{
	"", "never stored", "evicted", "cleared", "expired", "the time to live of its request was over", "its store was not completed",
	"being stored right now", "no lookup of this request pinned it", "too many transfers in progress",
	"it differed from its checksum after a restart", "the server was killed before its checksum was computed", "it is still to be compared with its checksum after a restart",
	"the tier below did not answer in time", "the tier below failed", "the tier below has other bytes",
	"computing is faster than the tier below", "the pool has no room for what the tier below has", "the window of a group ends elsewhere",
	"stored with another salt only", "stored by another model only", "stored by other ranks or another world size only",
	"stored in another layout only", "stored before the restart under another model, salt or layout only",
	"shorter than a chunk", "no worker of its model and world size was registered", "the lookup was declined", "the request asked to load nothing",
	"its cache salt has no valid signature", "its client may not use its tenant",
}

func (r Reason) String() string { return reasons[r] }

// labels name the reasons in metrics.
var labels = [NumReasons]string{
	"none", "never_stored", "evicted", "cleared", "expired", "request_ttl", "not_committed", "being_stored", "not_pinned", "busy", "corrupt", "no_checksum", "not_compared",
	"below_slow", "below_failed", "below_corrupt", "below_slower", "no_room",
	"window", "other_salt", "other_model", "other_rank", "other_layout", "other_name", "short_prompt", "unregistered", "declined", "skip_load", "unsigned_salt", "foreign_tenant",
}

// Label returns the reason's name in metrics.
func (r Reason) Label() string { return labels[r] }

// IsBelow reports whether a reason is about the tier below the pool.
func (r Reason) IsBelow() bool { return r >= BelowSlow && r <= BelowSlower }

// Because returns the reason of a miss after the tier below did not help, for the reason `below`. If the pool simply does not have the
// chunk, `below` is the reason, and Gone becomes empty; otherwise the reason stays r.
func (r Reason) Because(below Reason, gone Gone) (Reason, Gone) {
	switch r {
	case NeverStored, Evicted, Cleared, Expired, Failed, Window:
		return below, Gone{}
	}
	return r, gone
}

// Gone says why an object is not in the pool.
type Gone struct {
	Why Reason
	At  time.Time    // when it was dropped; zero: not known
	By  string       // the user or address that needed its room; empty: none did
	For kv.Namespace // the namespace whose objects got the room
}

// Memory remembers which keys were dropped last, when, why and for whom; when it is full, it forgets the oldest. It knows a key by 64 bits;
// two keys with the same bits only explain a miss wrongly. A key that was dropped again has only its last entry. It takes no lock: its
// owner's covers it. It takes less than 112 bytes for each key, allocated as keys come.
type Memory struct {
	began time.Time // the times of entries count from it, so that setting the clock changes no age
	most  int
	len   int
	at    map[uint64]uint32 // index in ring
	ring  container.PagedSlice[entry]
	next  int
}

type entry struct {
	id   uint64
	at   time.Duration // since Memory.began; 0: not known
	by   string
	of   kv.Namespace
	gone Reason
}

// NewMemory returns a Memory of `most` keys at most.
func NewMemory(most int) *Memory {
	return &Memory{began: time.Now(), most: most, at: make(map[uint64]uint32)}
}

// ID returns the bits of a key that a Memory remembers.
func ID(k *kv.Key) uint64 {
	le := binary.LittleEndian
	return le.Uint64(k.Chunk[:]) ^ le.Uint64(k.Namespace[:]) ^ uint64(k.Rank)<<32 ^ uint64(k.Group)
}

// Add records that an object was dropped, and why.
func (m *Memory) Add(k *kv.Key, gone Gone) {
	id := ID(k)
	var i uint32
	if m.len < m.most {
		i = uint32(m.len)
		m.len++
		m.ring.Grow(m.len)
	} else {
		i = uint32(m.next)
		m.next = (m.next + 1) % m.most
		if oldest := m.ring.At(int(i)).id; m.at[oldest] == i { // else the key was dropped again since
			delete(m.at, oldest)
		}
	}
	m.at[id] = i
	at := time.Duration(0)
	if !gone.At.IsZero() {
		at = max(gone.At.Sub(m.began), 1)
	}
	*m.ring.At(int(i)) = entry{id: id, at: at, by: gone.By, of: gone.For, gone: gone.Why}
}

// Why returns why an object is not in the pool; NeverStored for a key that is not remembered.
func (m *Memory) Why(k *kv.Key) Gone {
	i, ok := m.at[ID(k)]
	if !ok {
		return Gone{Why: NeverStored}
	}
	e := m.ring.At(int(i))
	gone := Gone{Why: e.gone, By: e.by, For: e.of}
	if e.at != 0 {
		now := time.Now()
		gone.At = now.Add(e.at - now.Sub(m.began)) // in terms of the present clock
	}
	return gone
}
