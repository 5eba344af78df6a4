// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"fmt"
	"slices"
)

// Group is one KV cache group of an engine: layers that share one list of block ids. All groups of an engine have blocks of the same size.
type Group struct {
	Window int  // tokens that a layer looks back; 0: all (full attention)
	State  bool // recurrent: a block holds the state after its last token

	// Layers are the indices of the group's layers in Paged.Layers; default all. Groups may share memory, as vLLM's do, because a block
	// belongs to one group at a time. Only a worker reads this field.
	Layers []int
}

// maxGroups bounds the groups of an engine, as LMCache's own servers do. Options with more are refused.
const maxGroups = 256

// defaultGroups returns groups, or one group of full attention if groups is empty.
func defaultGroups(groups []Group) []Group {
	if len(groups) == 0 {
		return []Group{{}}
	}
	return groups
}

// hybrid reports whether groups are anything other than one group of full attention.
func hybrid(groups []Group) bool {
	return len(groups) > 1 || len(groups) == 1 && groups[0].sparse()
}

func (g *Group) sparse() bool { return g.State || g.Window > 0 }

func (g *Group) check() error {
	switch {
	case g.Window < 0 || g.Window > maxLimit:
		return fmt.Errorf("a window of %d tokens is outside 0 to %d", g.Window, maxLimit)
	case g.Window > 0 && g.State:
		return fmt.Errorf("a recurrent group has a window of %d tokens", g.Window)
	}
	return nil
}

// left returns how many leading blocks the engine has freed when `computed` tokens are computed, because no later token attends to them.
// vLLM: get_num_skipped_tokens.
func (g *Group) left(computed, blockTokens int) int {
	switch {
	case g.State:
		return max(0, computed-1) / blockTokens
	case g.Window > 0:
		return max(0, computed-g.Window+1) / blockTokens
	}
	return 0
}

// cutBlocks returns the blocks [from, to) of each group, or fewer if the group has fewer.
func cutBlocks(blocks [][]int, from, to int) [][]int {
	out := make([][]int, len(blocks))
	for g, list := range blocks {
		out[g] = slices.Clone(list[min(from, len(list)):min(to, len(list))])
	}
	return out
}
