// SPDX-License-Identifier: Apache-2.0

package store

// Counters counts since the start.
type Counters struct {
	Lookups            uint64 // that have their result
	PendingLookups     uint64 // that did not have it at once
	LateLookups        uint64 // of those, the ones that took what was there after LoadTimeout
	StoredChunks       uint64
	StoredBytes        uint64
	LoadedChunks       uint64
	LoadedBytes        uint64
	EvictedChunks      uint64
	EvictedBytes       uint64
	DeadChunks         uint64 // of the evicted, those of windows that no hit could load any more
	Cleared            uint64 // chunks
	ExpiredChunks      uint64 // dropped after their TTL without a use
	ExpiredBytes       uint64
	EndedChunks        uint64 // dropped because the TTL of their request was over
	EndedBytes         uint64
	AllocationFailures uint64 // reserves that did not fit whole
	ReadFailures       uint64 // loads refused
	LateCommits        uint64 // commits of detached workers
	HoldsExpired       uint64 // transfers that no commit ended
	RestoredChunks     uint64 // found in the pool at the start
	SummedChunks       uint64 // whose checksum was computed and recorded
	VerifiedChunks     uint64 // of an earlier server, equal to their checksums
	BelowChunks        uint64 // objects that came from the tier below
	BelowBytes         uint64
	WarmedChunks       uint64 // of those, read by Warm and not by a lookup
	WarmedBytes        uint64
	BelowFailures      uint64 // calls of it that failed, and objects that did not fit
	BelowCorrupt       uint64 // of those, objects that differed from their checksums
	WrittenChunks      uint64 // objects written to the tier below, or found there
	WrittenBytes       uint64
	WriteFailures      uint64 // objects that the tier failed to write
	NotKeptBelow       uint64 // objects that it did not take
	AnswerChunks       uint64 // objects with tokens of an answer that were not written below at their commit
	LostChunks         uint64 // evicted before they were below
	GoneBelow          uint64 // objects that were recorded as being below and that were not there
	ComparedBytes      uint64 // read of an earlier server's, to compare them
	UnsummedChunks     uint64 // of an earlier server that was killed, without a checksum: dropped
	CorruptChunks      uint64 // of an earlier server, different from them: dropped
	SessionsExpired    uint64
	SessionsPushed     uint64 // ended early to make room
}
