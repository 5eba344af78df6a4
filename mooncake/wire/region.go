// SPDX-License-Identifier: Apache-2.0

package wire

const (
	// Unsent is the Index, Group or RowOffset of regions whose peer did not send the
	// list: it is older. Such regions take P's index and group, and lie in no row.
	Unsent = -1 << 31

	// SharedGroup is the group of a region that several groups share: the block ids
	// of Region.Shared follow one another.
	SharedGroup = -1

	// NoRow is the RowOffset of a region that is no view of a packed row.
	NoRow = -1
)

// Region is a run of KV blocks in one worker's memory, of one layer: block i has
// Payload bytes at Base + i*Stride.
type Region struct {
	Layer     string // "" from a peer before 0.24: regions pair in their order
	Index     int    // of the layer
	Base      uint64 // published address
	Stride    uint64 // bytes from block to block (block_len)
	Payload   uint64 // bytes of a block that carry KV (kv_block_len)
	Group     int    // KV cache group, or SharedGroup
	Shared    []int  // the groups of a shared region; nil: not sent
	RowOffset int    // from the start of the packed row of several layers; NoRow
}
