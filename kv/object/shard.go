// SPDX-License-Identifier: Apache-2.0

package object

import "github.com/kvasir-kv/kvasir/kv"

// Shard says which chunks a call is about: those of one namespace, and of one of World shards or of all.
type Shard struct {
	Namespace kv.Namespace
	World     int
	Index     int // 0 to World-1; ignored by lookups, which concern all
	Groups    *Groups

	// Each has the layout of each shard, if the workers of a model have different layouts. Only lookups use it. Nil means that all shards
	// have Namespace and Groups.
	Each *Layouts
}

// Layouts are the layouts of all shards of a model, by shard.
type Layouts []Layout

// Layout is the namespace of one shard's chunks, and their object groups. Groups differ
// from those of the other shards only in their bytes.
type Layout struct {
	Namespace kv.Namespace
	Groups    *Groups
}

// Key sets k to the key of the object of shard index, a group and a chunk.
func (sh *Shard) Key(k *kv.Key, index, group int, chunk kv.Hash) {
	k.Namespace = sh.Namespace
	if sh.Each != nil {
		k.Namespace = (*sh.Each)[index].Namespace
	}
	k.Rank, _ = kv.NewRank(sh.World, index)
	k.Group = uint32(group)
	k.Chunk = chunk
}

// Bytes returns the length of an object of shard index and a group.
func (sh *Shard) Bytes(index, group int) int64 {
	groups := sh.Groups
	if sh.Each != nil {
		groups = (*sh.Each)[index].Groups
	}
	return groups.Bytes(group)
}
