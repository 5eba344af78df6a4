// SPDX-License-Identifier: Apache-2.0

package tiering

import (
	"context"
	"slices"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/tier"
)

// Location says where an object is.
type Location uint8

// Locations.
const (
	Nowhere Location = iota // not found, or not looked for
	InPool
	InTier
)

// Places answers the questions of a Probe.
type Places interface {
	// InPool sets there[i] for the keys that the pool has.
	InPool(keys []kv.Key, there []bool)
	// InTier returns the tier's metas of keys.
	InTier(ctx context.Context, keys []kv.Key) ([]tier.Meta, error)
	// Failed reports a call of the tier that failed.
	Failed(err error)
	// Differs reports an object that has another length in the tier.
	Differs(k kv.Key)
}

const (
	firstStat, mostStat = 16, 256 // number of chunks that one call asks the tier about

	// probeBatch is how many objects one call asks about.
	probeBatch = 2048
)

// Probe finds where the objects of a prompt are, of all groups and shards: in the pool, in the tier below it, or nowhere. It asks the tier
// only for objects that the pool lacks, no further than a hit can reach, many objects at a time. Objects are numbered chunk by chunk,
// within a chunk by group, within a group by shard.
type Probe struct {
	shard  *object.Shard
	hashes []kv.Hash
	places Places
	rows   int
	from   int // number of leading chunks that are not looked for
	where  []Location
}

// NewProbe returns a Probe for the chunks of those hashes. The first `from` of them are not looked for, and count as found.
func NewProbe(sh *object.Shard, hashes []kv.Hash, from int, p Places) *Probe {
	s := &Probe{shard: sh, hashes: hashes, places: p, rows: sh.Groups.Len() * sh.World, from: min(from, len(hashes))}
	s.where = make([]Location, s.rows*len(hashes))
	for i := range s.from * s.rows {
		s.where[i] = InPool
	}
	return s
}

// Rows returns how many objects a chunk has.
func (s *Probe) Rows() int { return s.rows }

// Where returns where object i was found.
func (s *Probe) Where(i int) Location { return s.where[i] }

// Full reports whether the group of object i has full attention: a hit needs all its chunks.
func (s *Probe) Full(i int) bool { return s.shard.Groups.Full(s.group(i)) }

func (s *Probe) group(i int) int { return i % s.rows / s.shard.World }

// Key returns the key of object i.
func (s *Probe) Key(i int) (k kv.Key) {
	s.shard.Key(&k, i%s.rows%s.shard.World, s.group(i), s.hashes[i/s.rows])
	return k
}

// Bytes returns the length of object i.
func (s *Probe) Bytes(i int) int64 { return s.shard.Bytes(i%s.rows%s.shard.World, s.group(i)) }

// Needs reports whether a hit of `hit` chunks needs object i.
func (s *Probe) Needs(i, hit int) bool {
	return i/s.rows >= s.shard.Groups.Need(s.group(i), s.from, hit).Start
}

// Find finds the longest hit that pool and tier have together, and calls take with its number of chunks. If all groups have full attention,
// it also calls take with each shorter hit as soon as it is found. It ends when ctx ends or `take` reports false.
func (s *Probe) Find(ctx context.Context, take func(hit int) (more bool)) {
	begun := take
	if s.shard.Groups.Windows() {
		begun = func(int) bool { return true }
	}
	if hit, more := s.prefix(ctx, begun); more {
		take(s.windows(ctx, hit))
	}
}

// prefix returns how many leading chunks the groups of full attention have. It calls begun with each smaller number that it finds, and ends
// when that reports false.
func (s *Probe) prefix(ctx context.Context, begun func(chunks int) bool) (chunks int, more bool) {
	for from, step := s.from, firstStat; from < len(s.hashes); {
		to := min(from+max(1, min(step, probeBatch/s.rows)), len(s.hashes))
		if s.look(ctx, from, to, true) {
			step = min(4*step, mostStat)
		}
		for i := from * s.rows; i < to*s.rows; i++ {
			if s.where[i] == Nowhere && s.Full(i) {
				return i / s.rows, true
			}
		}
		if from = to; !begun(to) {
			return to, false
		}
	}
	return len(s.hashes), true
}

// windows returns the longest hit of at most `limit` chunks. It looks for objects of the other groups from the end on, only as far back as
// a hit needs.
func (s *Probe) windows(ctx context.Context, limit int) int {
	if !s.shard.Groups.Windows() {
		return limit
	}
	for to, step := limit, firstStat; ; {
		from := max(0, to-max(1, min(step, probeBatch/s.rows)))
		if s.look(ctx, from, to, false) {
			step = min(4*step, mostStat)
		}
		if hit := s.hit(limit); hit > from || from <= s.from || ctx.Err() != nil {
			return hit
		}
		to = from
	}
}

// hit returns the longest hit of at most `limit` chunks among the objects found so far.
func (s *Probe) hit(limit int) int {
	world := s.shard.World
	return s.shard.Groups.Hit(limit, func(group, chunk int) bool {
		at := chunk*s.rows + group*world
		return !slices.Contains(s.where[at:at+world], Nowhere)
	})
}

// look finds where the objects of the chunks [from, to) are: with full those of the groups of full attention, otherwise those of the other
// groups. It reports whether it asked the tier.
func (s *Probe) look(ctx context.Context, from, to int, full bool) (asked bool) {
	keys, at := s.unknown(from, to, full)
	there := make([]bool, len(keys))
	s.places.InPool(keys, there)
	for j := range keys {
		if there[j] {
			s.where[at[j]] = InPool
		}
	}
	keys, at = s.unknown(from, to, full)
	if len(keys) == 0 {
		return false
	}
	metas, err := s.places.InTier(ctx, keys)
	if err != nil {
		if ctx.Err() == nil {
			s.places.Failed(err)
		}
		return true
	}
	for j := range metas {
		switch {
		case metas[j].Len == 0:
		case metas[j].Fits(s.Bytes(at[j])):
			s.where[at[j]] = InTier
		default:
			s.places.Differs(keys[j])
		}
	}
	return true
}

// unknown returns the keys and numbers of the objects of those chunks that were not found yet.
func (s *Probe) unknown(from, to int, full bool) (keys []kv.Key, at []int) {
	for i := from * s.rows; i < to*s.rows; i++ {
		if s.where[i] == Nowhere && s.Full(i) == full {
			keys, at = append(keys, s.Key(i)), append(at, i)
		}
	}
	return keys, at
}
