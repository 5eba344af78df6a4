// SPDX-License-Identifier: Apache-2.0

package scheduler

import (
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// rule is a decision that a published release of vLLM makes differently from this package. A Scheduler with Options.Release follows the
// rules of that release.
type rule uint32

const (
	matchIgnoresRole rule = 1 << iota
	trusting
	keepsFlags
	dropsUnusable
	pullsNothing
	raisesOnGroups
	readsParamsAtBuild
	consumerAnnounces
	takesAnyTransferID
	freesDuringPull
	endNeedsTransferID
	endsSilently
	keepsAnnouncement
	sendsEmptyLists
	alwaysAnswers
	assertsOneGroup
)

// departures lists all rules: what the release does, which releases do it, and what a Scheduler without a Release does instead.
var departures = []struct {
	rule rule
	in   []wire.Release
	does string
	ours string
	read bool // known only from the release's source: no recorded event shows it
}{
	{matchIgnoresRole, []wire.Release{13}, "a producer loads a prompt from P", "the request is refused at once", false},
	{trusting, []wire.Release{13, 33}, "ids in use, values of another type and any number of transfers are taken", "they are refused: two requests under one transfer id mix their blocks, and what is unbounded fills memory", false},
	{keepsFlags, []wire.Release{13, 33}, "what was refused or has ended keeps its flag, and is refused at each call", "the flag is cleared: the request is refused once and goes on without a transfer", false},
	{dropsUnusable, []wire.Release{13, 33}, "a request without a source waits for a load that no worker starts", "the request is refused and computed", false},
	{pullsNothing, []wire.Release{13, 33}, "tokens are to be pulled, but no blocks: P frees its own, the engine waits", "the request is refused; P frees its blocks", false},
	{raisesOnGroups, []wire.Release{13, 33}, "lists of blocks that do not fit the groups raise, and P keeps its blocks until its deadline", "the same error, and the other side learns of it", true},
	{readsParamsAtBuild, []wire.Release{13, 33}, "a missing key raises at every step after an aborted request", "params are read when the pull is asked for; Build never fails", false},
	{consumerAnnounces, []wire.Release{13}, "a consumer keeps an entry for each prefill for ever", "the request is refused", false},
	{takesAnyTransferID, []wire.Release{33}, "a prefill without a transfer id goes on unsent, in silence; a number is a transfer id without text", "the request is refused with vLLM's own text", false},
	{freesDuringPull, []wire.Release{13, 33}, "a request that ends during its pull frees blocks that P still writes to", "its blocks are kept until the pull has ended", false},
	{endNeedsTransferID, []wire.Release{33}, "a request without a transfer id ends without a word to P", "P learns of it where it can", false},
	{endsSilently, []wire.Release{13}, "a prefill that ends before its length does not reach the workers: D waits for its deadline", "the workers hear that it will not be sent", false},
	{keepsAnnouncement, []wire.Release{13, 33}, "a prefill with nothing to send stays announced", "the announcement is withdrawn, so that D need not wait", false},
	{sendsEmptyLists, []wire.Release{13, 33}, "blocks that are all in groups that stay are sent as empty lists", "there is nothing to send, and the workers hear so", true},
	{alwaysAnswers, []wire.Release{13}, "P's answer names its side channel also when nothing will be sent", "it does not: D computes the prompt", false},
	{assertsOneGroup, []wire.Release{13}, "lists of blocks other than one raise an AssertionError", "no list is nothing to send; more are vLLM's later error", true},
}

// rulesOf returns the rules of a release. Release 0 has no rules, nor has a release whose decisions are unknown.
func rulesOf(r wire.Release) (all rule) {
	for _, d := range departures {
		for _, in := range d.in {
			if in == r {
				all |= d.rule
			}
		}
	}
	return all
}

// follows reports whether the Scheduler follows the rule r.
func (s *Scheduler) follows(r rule) bool { return s.rules&r != 0 }
