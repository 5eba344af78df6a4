// SPDX-License-Identifier: Apache-2.0

// Package object says what a chunk consists of: one object for each object group and
// shard of its model. It knows the key and the length of each object, and
// which objects of a prompt a hit needs. It stores nothing itself.
package object

import (
	"fmt"

	"github.com/kvasir-kv/kvasir/kv/coordinator"
)

// Group is one object group: each chunk has one object for it.
type Group struct {
	coordinator.ChunkGroup
	Bytes int64 // of one object
}

// Groups has the object groups of a model, and the rule that says which chunks of each group a hit needs. It is immutable.
type Groups struct {
	list    []Group
	rule    *coordinator.Chunks
	windows bool // some group needs less than the whole prefix
}

// NewGroups returns the groups of a model with chunks of chunkTokens tokens.
func NewGroups(chunkTokens int, list []Group) (*Groups, error) {
	g := &Groups{list: list}
	var rules []coordinator.ChunkGroup
	for i := range list {
		rules = append(rules, list[i].ChunkGroup)
		g.windows = g.windows || !g.Full(i)
	}
	var err error
	g.rule, err = coordinator.NewChunks(chunkTokens, rules)
	return g, err
}

// FullAttention returns the groups of a model that has one group, of full attention, with objects of `bytes` bytes. chunkTokens must be at
// least 1.
func FullAttention(chunkTokens int, bytes int64) *Groups {
	g, err := NewGroups(chunkTokens, []Group{{ChunkGroup: coordinator.ChunkGroup{Window: -1}, Bytes: bytes}})
	if err != nil {
		panic(fmt.Sprintf("BUG: objects: one group of full attention, chunks of %d tokens: %v", chunkTokens, err))
	}
	return g
}

// Len is the number of groups.
func (g *Groups) Len() int { return len(g.list) }

// Bytes returns the bytes of one object of group i.
func (g *Groups) Bytes(i int) int64 { return g.list[i].Bytes }

// Full reports whether a group needs the whole prefix of a hit.
func (g *Groups) Full(i int) bool {
	of := &g.list[i]
	return !of.Excluded && !of.Recurrent && of.Window == -1
}

// Windows reports whether some group needs less than the whole prefix of a hit.
func (g *Groups) Windows() bool { return g.windows }

// Like reports whether hits of the same length need the same chunks of each group in g and in o.
func (g *Groups) Like(o *Groups) bool {
	if g.Len() != o.Len() {
		return false
	}
	for i := range g.Len() {
		if g.Full(i) && o.Full(i) {
			continue
		}
		if g.Full(i) || o.Full(i) || g.list[i].ChunkGroup != o.list[i].ChunkGroup {
			return false
		}
	}
	return true
}

// Need returns the chunks of group i that a load of the chunks [from, hit) moves.
func (g *Groups) Need(i, from, hit int) coordinator.Run {
	r := coordinator.Run{Start: 0, End: hit}
	if !g.Full(i) {
		r = g.rule.Need(i, hit)
	}
	r.Start = min(max(r.Start, from), r.End)
	return r
}

// Hit returns the longest hit, `limit` chunks at most. has reports which chunks of a group are stored.
func (g *Groups) Hit(limit int, has func(group, chunk int) bool) int {
	var r coordinator.Result
	n, err := g.rule.Hit(&r, g.present(limit, has), limit)
	if err != nil {
		return 0 // longer than any prompt
	}
	return n
}

// Dead calls dead for each stored chunk of a window or recurrent group that no hit of this prompt can need, given what is stored. It never
// calls dead for the chunks of such a group that a hit of the whole prompt needs, because they may serve a longer prompt.
func (g *Groups) Dead(chunks int, has func(group, chunk int) bool, dead func(group, chunk int)) {
	if !g.windows {
		return
	}
	set := g.present(chunks, has)
	var alive []coordinator.Run
	for i := range g.Len() {
		if g.Full(i) {
			continue
		}
		alive = g.rule.Reusable(alive[:0], i, set, 1, chunks)
		for _, kept := range set.Blocks(i) {
			for c := kept.Start; c < min(kept.End, g.Need(i, 0, chunks).Start); c++ {
				for len(alive) > 0 && alive[0].End <= c {
					alive = alive[1:]
				}
				if len(alive) == 0 || c < alive[0].Start {
					dead(i, c)
				}
			}
		}
	}
}

// present returns which of the first `limit` chunks each group has.
func (g *Groups) present(limit int, has func(group, chunk int) bool) *coordinator.Runs {
	set := coordinator.NewRuns(g.rule.Coordinator())
	for i := range g.Len() {
		start := 0
		for c := range limit + 1 {
			if c < limit && has(i, c) {
				continue
			}
			set.Add(i, start, c)
			start = c + 1
		}
	}
	return set
}
