// SPDX-License-Identifier: Apache-2.0

package lent

import (
	"fmt"

	"github.com/kvasir-kv/kvasir/kv/paged"
	"github.com/kvasir-kv/kvasir/store"
)

// Blocks are the engine's block ids for one transfer. They are checked.
type Blocks struct {
	of  *KV
	ids []paged.IDs // by KV group
}

// Blocks checks the block ids of a transfer of `chunks` chunks. lists has the ids of each KV group. Errors wrap paged.ErrBlocks.
func (d *KV) Blocks(lists [][]int, chunks int) (*Blocks, error) {
	if len(lists) != len(d.groups) {
		return nil, fmt.Errorf("%w: %d lists of block ids for %d KV groups", paged.ErrBlocks, len(lists), len(d.groups))
	}
	b := &Blocks{of: d, ids: make([]paged.IDs, len(lists))}
	for i := range d.groups {
		g := &d.groups[i]
		if g.rule.Excluded {
			continue // its blocks are never read
		}
		var err error
		if b.ids[i], err = g.IDs(lists[i], chunks); err != nil {
			return nil, fmt.Errorf("KV group %d: %w", i, err)
		}
	}
	return b, nil
}

// Missing reports whether an object of a chunk needs a block that the engine does not have. The bytes of such an object would mean nothing.
func (b *Blocks) Missing(object, chunk int) bool {
	for _, g := range b.of.Objects[object].Groups {
		if !b.ids[g].Whole(chunk) {
			return true
		}
	}
	return false
}

// Plan plans the copies of parts: out of the engine's blocks, or with load into them. It leaves out blocks that lie entirely in the first
// `skip` tokens.
func (b *Blocks) Plan(parts []store.Part, load bool, skip int) (*paged.Plan, error) {
	plan := &paged.Plan{Load: load}
	for _, part := range parts {
		at := int64(0)
		for _, i := range b.of.Objects[part.Group].Groups {
			g := &b.of.groups[i]
			n := g.Bytes()
			slots := g.Layers[0].View.Slots
			left := max(0, skip/g.tokensPerBlock*slots-part.Chunk*g.PerChunk*slots)
			if err := plan.Add(&b.ids[i], part.Chunk, part.Bytes[at:at+n], left); err != nil {
				return nil, err
			}
			at += n
		}
	}
	return plan, nil
}
