// SPDX-License-Identifier: Apache-2.0

package wire

const (
	// Unsent is the Index, Group or RowOffset of a region whose peer is too old to send that list. Such a region gets P's index and
	// group, and lies in no packed row.
	Unsent = -1 << 31

	// SharedGroup is the Group of a region that several groups share. Its blocks are those of the groups in Region.Shared, one group's
	// block ids after the other's.
	SharedGroup = -1

	// NoRow is the RowOffset of a region that is not part of a packed row.
	NoRow = -1
)

// Region is the memory of the KV blocks of one layer in one worker: block i has Payload bytes at Base + i*Stride.
type Region struct {
	Layer     string // "" from a peer before 0.24: then regions pair in their order
	Index     int    // of the layer
	Base      uint64 // published address
	Stride    uint64 // bytes from block to block (block_len)
	Payload   uint64 // bytes of a block that carry KV (kv_block_len)
	Group     int    // KV cache group, or SharedGroup
	Shared    []int  // the groups of a shared region; nil: not sent
	RowOffset int    // offset of the region in its packed row of several layers; NoRow: none
}
