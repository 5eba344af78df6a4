// SPDX-License-Identifier: Apache-2.0

package coordinator

// Release names a published version of vLLM whose decisions a Coordinator repeats, refusals
// included. The zero Release stands for Kvasir's own rules, without the defects of vLLM.
type Release uint8

// The releases that a Coordinator can repeat.
const (
	VLLM023 Release = 23 // 0.23.0
	VLLM033 Release = 33 // 0.33.0
)

// String returns the name and the version of the software whose rules these are.
func (r Release) String() string {
	switch r {
	case 0:
		return "Kvasir"
	case VLLM023:
		return "vLLM 0.23.0"
	case VLLM033:
		return "vLLM 0.33.0"
	}
	return "unknown"
}

// rule is a set of bits: each stands for one way in which a published version decides
// differently from Kvasir. A Coordinator with a Release follows the rules of that release.
type rule uint32

const (
	raises rule = 1 << iota
	noScratchKinds
	noPartialHits
	splitsWindows
	looksAheadInRequest
	longSecondFull
	ignoresScheduler
	repeatsMasks
	joinsDigests
	masksOfLastPass
	verifiedOnce
	oneTokenWindow
	shortPromptLosesTwo
	unseenChunks
	emptyLayoutHits
)

// releaseRules lists every rule: which releases follow it, what they do, and what Kvasir does
// instead.
var releaseRules = []struct {
	rule rule
	in   []Release
	does string
	ours string
}{
	{raises, []Release{VLLM023, VLLM033}, "cross attention, and chunks under EAGLE or beside unequal blocks, raise at lookup", "the hit is empty and says why"},
	{noScratchKinds, []Release{VLLM023}, "groups of scratch memory have no manager: the layout is refused", "they never hit and never hinder"},
	{noPartialHits, []Release{VLLM023}, "hits end on block boundaries, and nothing is retained by intervals", "as the layout says"},
	{splitsWindows, []Release{VLLM023}, "windows of equal reach are unlike when they are split into window and extra differently", "only the sum counts"},
	{looksAheadInRequest, []Release{VLLM023}, "EAGLE looks no further than the asked length, and Mamba looks a block ahead: tokens of the hit are never loaded", "as far as there are hashes; Mamba looks nothing ahead"},
	{longSecondFull, []Release{VLLM023}, "a second full-type group is left longer than the hit", "it is cut to the hit"},
	{ignoresScheduler, []Release{VLLM023}, "a single group ignores the scheduler block", "it obeys it"},
	{repeatsMasks, []Release{VLLM023}, "store masks repeat one segment, under EAGLE without its last block: short, shifted, perhaps empty; there are no lookup masks", "each group's own tails"},
	{joinsDigests, []Release{VLLM023}, "a block's key is the digests of its units one after the other", "it is the last unit's digest"},
	{masksOfLastPass, []Release{VLLM023, VLLM033}, "masks are what the last pass left, and may differ in length from the hit", "they are those of a load at the hit"},
	{verifiedOnce, []Release{VLLM023, VLLM033}, "under EAGLE a group's extra block is verified once, perhaps far beyond the final hit; one more stored block can then cost a hit", "it is present right after every hit"},
	{oneTokenWindow, []Release{VLLM023, VLLM033}, "a window of one token asks for a block that is never stored, and under EAGLE may load none", "the block is kept and loaded"},
	{shortPromptLosesTwo, []Release{VLLM023, VLLM033}, "a prompt shorter than a window loses two segments to EAGLE", "it loses one"},
	{unseenChunks, []Release{VLLM023, VLLM033}, "where chunk and block sizes do not divide, a hit can end in a chunk that was not looked at", "that chunk is looked at"},
	{emptyLayoutHits, []Release{VLLM023, VLLM033}, "with no cacheable group everything is a hit", "nothing is"},
}

// rulesOf returns the rules of a release; none for zero.
func rulesOf(r Release) (all rule) {
	for _, d := range releaseRules {
		for _, in := range d.in {
			if in == r {
				all |= d.rule
			}
		}
	}
	return all
}

// has reports whether r is one of the rules.
func (all rule) has(r rule) bool { return all&r != 0 }

// follows reports whether the Coordinator follows r.
func (c *Coordinator) follows(r rule) bool { return c.rules.has(r) }
