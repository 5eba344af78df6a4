package store

import (
	"github.com/kvasir-kv/kvasir/coordinator"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/pool"
)

// Group is one object group: of each chunk one object is kept for it.
type Group struct {
	coordinator.ChunkGroup
	Bytes int64 // of one object
}

// Groups are the object groups of a model and the rule that says which chunks of
// each a hit needs. A nil Groups is one group of full attention. It is immutable.
type Groups struct {
	list    []Group
	rule    *coordinator.Chunks
	windows bool // some group needs less than the whole prefix
}

// NewGroups returns the groups of a model whose chunks have so many tokens.
func NewGroups(chunkTokens int, list []Group) (*Groups, error) {
	g := &Groups{list: list}
	var rules []coordinator.ChunkGroup
	for i := range list {
		rules = append(rules, list[i].ChunkGroup)
		g.windows = g.windows || !g.full(i)
	}
	var err error
	g.rule, err = coordinator.NewChunks(chunkTokens, rules)
	return g, err
}

// Len is the number of groups.
func (g *Groups) Len() int {
	if g == nil {
		return 1
	}
	return len(g.list)
}

// full reports whether a group needs the whole prefix of a hit.
func (g *Groups) full(i int) bool {
	if g == nil {
		return true
	}
	of := &g.list[i]
	return !of.Apart && !of.Recurrent && of.Window == -1
}

// Like reports whether a hit of g and one of o need the same chunks of each group.
func (g *Groups) Like(o *Groups) bool {
	if g.Len() != o.Len() {
		return false
	}
	for i := range g.Len() {
		if g.full(i) && o.full(i) {
			continue
		}
		if g.full(i) || o.full(i) || g.list[i].ChunkGroup != o.list[i].ChunkGroup {
			return false
		}
	}
	return true
}

// Need returns the chunks of group i that a load of the chunks [from, hit) moves.
func (g *Groups) Need(i, from, hit int) coordinator.Run {
	r := coordinator.Run{Start: 0, End: hit}
	if g != nil {
		r = g.rule.Need(i, hit)
	}
	r.Start = min(max(r.Start, from), r.End)
	return r
}

// dropDeadLocked drops the window chunks of a prompt that no hit could load,
// given what is kept of it: they go before anything that is of use.
func (s *Store) dropDeadLocked(sh Shard, hashes []kv.Hash) {
	groups := sh.Groups
	if groups == nil || !groups.windows {
		return
	}
	set := coordinator.NewRuns(groups.rule.Coordinator())
	var k pool.Key
	for g := range groups.Len() {
		for c, h := range hashes {
			sh.key(&k, sh.Index, g, h)
			if _, st := s.mu.pool.Find(&k); st != pool.Free { // being stored counts
				set.Add(g, c, c+1)
			}
		}
	}
	var alive []coordinator.Run
	for g := range groups.Len() {
		if groups.full(g) {
			continue
		}
		alive = groups.rule.Reusable(alive[:0], g, set, 1, len(hashes))
		for _, kept := range set.Blocks(g) {
			// The last ones may serve a longer prompt that we do not see.
			for c := kept.Start; c < min(kept.End, groups.Need(g, 0, len(hashes)).Start); c++ {
				for len(alive) > 0 && alive[0].End <= c {
					alive = alive[1:]
				}
				if len(alive) > 0 && c >= alive[0].Start {
					continue
				}
				sh.key(&k, sh.Index, g, hashes[c])
				if slot, _ := s.mu.pool.Find(&k); s.mu.lru.Has(uint32(slot)) {
					s.mu.n.DeadChunks++
					s.evictLocked(slot)
				}
			}
		}
	}
}

// evictLocked drops a slot to make room.
func (s *Store) evictLocked(slot pool.Slot) {
	s.mu.n.EvictedChunks++
	s.mu.n.EvictedBytes += uint64(s.mu.pool.Length(slot))
	s.dropLocked(slot, Evicted)
}
