// SPDX-License-Identifier: Apache-2.0

package connector

// Release names a published version of vLLM. A Scheduler with a Release repeats that version's
// decisions, call by call, defects included. The zero Release decides without these defects.
type Release uint8

// The releases whose decisions are known.
const (
	VLLM018 Release = 18 // 0.18 to 0.20
	VLLM033 Release = 33 // 0.33.0
)

// String returns the versions that make the same decisions as r.
func (r Release) String() string {
	switch r {
	case 0:
		return "kvasir"
	case VLLM018:
		return "0.18-0.20"
	case VLLM033:
		return "0.33.0"
	}
	return "unknown"
}

// rule is a decision of a published version that differs from the decision of the zero Release. A
// Scheduler with a Release follows the rules of that release.
type rule uint32

const (
	noSalts rule = 1 << iota
	freesWithoutSalt
	hitsAddUp
	takesAnyHit
	forgetsOwnHit
	matchesWholePrompt
	preemptedIsNotLookedUp
	failedLoadWaits
	keepsPins
	loadsUnasked
	loadsIntoNothing
	oldBlocksStay
	sumsTotals
	hitsCountAsComputed
	reportsNothing
	oneGroup
)

// departures lists all the rules: what the published version does, which releases do it, and what a Scheduler does without the rule.
var departures = []struct {
	rule rule
	in   []Release
	does string
	ours string
}{
	{noSalts, []Release{VLLM018}, "lookups and operations carry no salt", "all carry it: tenants share nothing"},
	{freesWithoutSalt, []Release{VLLM018, VLLM033}, "pins are given back without the salt, under another key: they stay", "they are given back under the key that pinned them"},
	{hitsAddUp, []Release{VLLM018, VLLM033}, "a hit asked for twice, because blocks were short, counts twice: later chunks are not stored", "it counts once"},
	{takesAnyHit, []Release{VLLM018, VLLM033}, "a hit that is no whole number of chunks, or longer than the prompt, raises in the scheduler", "the hit is cut"},
	{forgetsOwnHit, []Release{VLLM018, VLLM033}, "the engine's own hit is kept only where the cache has one, too", "it is always kept"},
	{matchesWholePrompt, []Release{VLLM018, VLLM033}, "a hit of the whole prompt leaves no token to compute; the engine must care for that", "one token less is reported, the retrieve stays whole; not with blocks of one token"},
	{preemptedIsNotLookedUp, []Release{VLLM018, VLLM033}, "a preempted request is computed and stored anew without a lookup", "it is looked up and loaded like any other"},
	{failedLoadWaits, []Release{VLLM018, VLLM033}, "a request whose load failed waits for a load that no worker starts", "it is computed without the cache, and stored again"},
	{keepsPins, []Release{VLLM018, VLLM033}, "a request that ends, or starts anew, before its load leaves its pins to their lifetime", "they are given back"},
	{loadsUnasked, []Release{VLLM018}, "tokens that the engine does not want loaded are loaded all the same", "they are not loaded"},
	{loadsIntoNothing, []Release{VLLM018, VLLM033}, "a load into fewer blocks than it fills is emitted", "the allocation is refused"},
	{oldBlocksStay, []Release{VLLM018, VLLM033}, "block ids of an allocation are only appended: after a failed load old ids may remain", "they replace the known ones"},
	{sumsTotals, []Release{VLLM018}, "totals are added up, so blocks are stored that are not computed yet", "a store ends at the tokens computed by the end of the step"},
	{hitsCountAsComputed, []Release{VLLM033}, "a hit counts as computed, loaded or not; after a hit of the engine's own cache alone stores come late by the length of that hit", "a store ends at the tokens computed by the end of the step"},
	{reportsNothing, []Release{VLLM018}, "block allocations and extra cached tokens are not reported", "they are reported"},
	{oneGroup, []Release{VLLM018, VLLM033}, "an engine with several KV cache groups is refused", "it is served, by workers that lend their memory or with a server of 0.5.7"},
}

// rulesOf returns the rules of a release. The zero Release has none.
func rulesOf(r Release) (all rule) {
	for _, d := range departures {
		for _, in := range d.in {
			if in == r {
				all |= d.rule
			}
		}
	}
	return all
}

// follows reports whether the Scheduler follows rule r.
func (t *Scheduler) follows(r rule) bool { return t.rules&r != 0 }
