// SPDX-License-Identifier: Apache-2.0

package lmcache

import "github.com/tinylib/msgp/msgp"

// Direction says which way the blocks of a LoadStore move.
type Direction uint8

// The directions.
const (
	Store    Direction = iota // engine → cache
	Retrieve                  // cache → engine
)

// String returns the name that vLLM's connector gives the direction.
func (d Direction) String() string {
	if d == Store {
		return "STORE"
	}
	return "RETRIEVE"
}

// LoadStore is one operation that an engine's scheduler gives to its workers: to move the KV of the tokens [Start, End) between the
// engine's Blocks and the cache.
type LoadStore struct {
	Direction Direction
	RequestID string
	Salt      string
	Tokens    []uint32 // the request's from token 0, at least End; read only
	Blocks    [][]int  // engine block ids of [Start, End), in order, by KV cache group; 0 where a hybrid engine keeps nothing
	Start     int      // multiple of the chunk size
	End       int      // exclusive; multiple of the chunk size
	SkipFirst int      // Retrieve: leading tokens of the range that must not be overwritten
}

// AppendBlockAllocations appends the third payload of report_block_allocation.
func AppendBlockAllocations(b []byte, records []BlockAllocation) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(records)))
	for i := range records {
		r := &records[i]
		b = msgp.AppendMapHeader(b, 3)
		b = msgp.AppendString(msgp.AppendString(b, "req_id"), r.RequestID)
		b = appendInts(msgp.AppendString(b, "new_block_ids"), r.NewBlocks)
		b = appendInts(msgp.AppendString(b, "new_token_ids"), r.NewTokens)
	}
	return b
}

func appendInts[T ~int | ~int64](b []byte, list []T) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(list)))
	for _, v := range list {
		b = appendInt(b, v)
	}
	return b
}
