// SPDX-License-Identifier: Apache-2.0

package scheduler

import "sync/atomic"

type schedulerCounters struct {
	pulls, emptyPulls, loaded, failed, fenced atomic.Uint64
	announced, delayed, sent, notProcessed    atomic.Uint64
	truncated, refused, unknown               atomic.Uint64
}

// Stats are counts since New, and current numbers.
type Stats struct {
	Receiving int `gauge:"kvasir_mooncake_scheduler_receiving" help:"Pulls in the workers' hands."`
	Sending   int `gauge:"kvasir_mooncake_scheduler_sending" help:"Requests whose blocks wait for D, or are being sent."`

	Pulls        uint64 `counter:"kvasir_mooncake_scheduler_pulls_total" help:"Pulls handed to the workers, with blocks."`
	EmptyPulls   uint64 `counter:"kvasir_mooncake_scheduler_empty_pulls_total" help:"Pulls handed to the workers so that P frees its blocks."`
	Loaded       uint64 `counter:"kvasir_mooncake_scheduler_loaded_total" help:"Pulls that ended well."`
	Failed       uint64 `counter:"kvasir_mooncake_scheduler_failed_total" help:"Pulls that ended badly."`
	Fenced       uint64 `counter:"kvasir_mooncake_scheduler_fenced_total" help:"Requests that ended during their pull."`
	Announced    uint64 `counter:"kvasir_mooncake_scheduler_announced_total" help:"Transfers announced to the workers, again after a preemption."`
	Delayed      uint64 `counter:"kvasir_mooncake_scheduler_delayed_total" help:"Requests whose blocks were kept for D."`
	Sent         uint64 `counter:"kvasir_mooncake_scheduler_sent_total" help:"Of the delayed requests, those whose blocks came back."`
	NotProcessed uint64 `counter:"kvasir_mooncake_scheduler_not_processed_total" help:"Transfers that will not be sent."`
	Truncated    uint64 `counter:"kvasir_mooncake_scheduler_truncated_total" help:"Prompts whose last token was left to D."`
	Refused      uint64 `counter:"kvasir_mooncake_scheduler_refused_total" help:"Requests that go on without a transfer."`
	Unknown      uint64 `counter:"kvasir_mooncake_scheduler_unknown_total" help:"Reports about requests that are in no transfer."`
}

// Stats returns the counts. It may be called from any goroutine.
func (s *Scheduler) Stats() Stats {
	n := &s.n
	// Read the counts of ended transfers before those of begun ones, so that no difference is negative.
	loaded, failed, sent := n.loaded.Load(), n.failed.Load(), n.sent.Load()
	pulls, delayed := n.pulls.Load(), n.delayed.Load()
	return Stats{
		Receiving: int(pulls - loaded - failed), Sending: int(delayed - sent),
		Pulls: pulls, EmptyPulls: n.emptyPulls.Load(), Loaded: loaded, Failed: failed, Fenced: n.fenced.Load(),
		Announced: n.announced.Load(), Delayed: delayed, Sent: sent, NotProcessed: n.notProcessed.Load(),
		Truncated: n.truncated.Load(), Refused: n.refused.Load(), Unknown: n.unknown.Load(),
	}
}
