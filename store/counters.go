// SPDX-License-Identifier: Apache-2.0

package store

// Counters has figures since the start of the store.
type Counters struct {
	Lookups            uint64 // lookups that have their result
	PendingLookups     uint64 // lookups that did not have their result at once
	LateLookups        uint64 // of those, lookups that ended by LoadTimeout with what was resident then
	StoredChunks       uint64
	StoredBytes        uint64
	LoadedChunks       uint64
	LoadedBytes        uint64
	EvictedChunks      uint64
	EvictedBytes       uint64
	DeadChunks         uint64 // of the evicted, chunks of windows that no hit could need any more
	Cleared            uint64 // chunks that clears have dropped
	ExpiredChunks      uint64 // dropped because they were not used for their TTL
	ExpiredBytes       uint64
	EndedChunks        uint64 // dropped because the TTL of their request was over
	EndedBytes         uint64
	AllocationFailures uint64 // stores for which the pool had no room for all chunks
	ReadFailures       uint64 // loads that BeginLoad refused
	LateCommits        uint64 // commits of workers that were detached before
	HoldsExpired       uint64 // holds that ended by time, not by a commit
	RestoredChunks     uint64 // found in the pool at the start
	SummedChunks       uint64 // whose checksum was computed and recorded
	VerifiedChunks     uint64 // of an earlier server; compared and equal to their checksums
	BelowChunks        uint64 // objects that came from the tier below
	BelowBytes         uint64
	WarmedChunks       uint64 // of those, read by Warm and not for a lookup
	WarmedBytes        uint64
	BelowFailures      uint64 // calls of the tier that failed, and objects that did not fit
	BelowCorrupt       uint64 // of those, objects that differed from their checksums
	WrittenChunks      uint64 // objects that were written to the tier below, or that the tier had already
	WrittenBytes       uint64
	WriteFailures      uint64 // objects that the tier failed to write
	NotKeptBelow       uint64 // objects that the tier did not take
	AnswerChunks       uint64 // objects with tokens of an answer that were not written to the tier at their commit
	LostChunks         uint64 // evicted before they were written to the tier below
	GoneBelow          uint64 // objects that were recorded as being in the tier and that the tier did not have
	ComparedBytes      uint64 // bytes of an earlier server's objects that were read for a comparison
	UnsummedChunks     uint64 // of an earlier server that was killed; without a checksum, so dropped
	CorruptChunks      uint64 // of an earlier server; different from their checksums, so dropped
	SessionsExpired    uint64
	SessionsPushed     uint64 // sessions that ended early to make room for others
}
