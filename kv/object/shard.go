// SPDX-License-Identifier: Apache-2.0

package object

import "github.com/kvasir-kv/kvasir/kv"

// Shard says whose chunks a call concerns: one namespace, and one of World
// shards, or all of them.
type Shard struct {
	Namespace kv.Namespace
	World     int
	Index     int // 0 to World-1; ignored by lookups, which concern all
	Groups    *Groups

	// Each is for lookups only: the layout of each shard, where the workers of a
	// model have unlike ones. Nil means Namespace and Groups for all.
	Each *Layouts
}

// Layouts are those of all shards of a model.
type Layouts []Layout

// Layout is where the chunks of one shard live, and what they consist of. Groups are
// like those of the other shards but for their bytes.
type Layout struct {
	Namespace kv.Namespace
	Groups    *Groups
}

// Key sets k to the key of one object.
func (sh *Shard) Key(k *kv.Key, index, group int, chunk kv.Hash) {
	k.Namespace = sh.Namespace
	if sh.Each != nil {
		k.Namespace = (*sh.Each)[index].Namespace
	}
	k.Rank, _ = kv.NewRank(sh.World, index)
	k.Group = uint32(group)
	k.Chunk = chunk
}

// Bytes returns how long one object is.
func (sh *Shard) Bytes(index, group int) int64 {
	groups := sh.Groups
	if sh.Each != nil {
		groups = (*sh.Each)[index].Groups
	}
	return groups.Bytes(group)
}
