package mooncake

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

type schedulerCounters struct {
	pulls, emptyPulls, loaded, failed, fenced atomic.Uint64
	announced, delayed, sent, notProcessed    atomic.Uint64
	truncated, refused, unknown               atomic.Uint64
}

// SchedulerStats counts since NewScheduler.
type SchedulerStats struct {
	Receiving int // pulls in the workers' hands
	Sending   int // requests whose blocks wait for D, or are being sent

	Pulls        uint64 // handed to the workers, with blocks
	EmptyPulls   uint64 // handed to the workers so that P frees its blocks
	Loaded       uint64 // pulls that ended well
	Failed       uint64 // pulls that ended badly
	Fenced       uint64 // requests that ended during their pull
	Announced    uint64 // transfers announced to the workers, again after a preemption
	Delayed      uint64 // requests whose blocks were kept for D
	Sent         uint64 // of those, the ones whose blocks came back
	NotProcessed uint64 // transfers that will not be sent
	Truncated    uint64 // prompts whose last token was left to D
	Refused      uint64 // requests that go on without a transfer
	Unknown      uint64 // reports about requests that are in no transfer
}

// Stats returns the counts. It may be called from any goroutine.
func (s *Scheduler) Stats() SchedulerStats {
	n := &s.n
	// What ended is read first, so that no difference is negative.
	loaded, failed, sent := n.loaded.Load(), n.failed.Load(), n.sent.Load()
	pulls, delayed := n.pulls.Load(), n.delayed.Load()
	return SchedulerStats{
		Receiving: int(pulls - loaded - failed), Sending: int(delayed - sent),
		Pulls: pulls, EmptyPulls: n.emptyPulls.Load(), Loaded: loaded, Failed: failed, Fenced: n.fenced.Load(),
		Announced: n.announced.Load(), Delayed: delayed, Sent: sent, NotProcessed: n.notProcessed.Load(),
		Truncated: n.truncated.Load(), Refused: n.refused.Load(), Unknown: n.unknown.Load(),
	}
}

// Describe implements prometheus.Collector as an unchecked collector.
func (s *Scheduler) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector. It may be called from any goroutine.
func (s *Scheduler) Collect(ch chan<- prometheus.Metric) {
	v := s.Stats()
	emit := func(kind prometheus.ValueType, name, help string, v float64) {
		ch <- prometheus.MustNewConstMetric(prometheus.NewDesc("kvasir_mooncake_scheduler_"+name, help, nil, nil), kind, v)
	}
	count := func(name, help string, v uint64) { emit(prometheus.CounterValue, name, help, float64(v)) }
	emit(prometheus.GaugeValue, "receiving", "Pulls in the workers' hands.", float64(v.Receiving))
	emit(prometheus.GaugeValue, "sending", "Requests whose blocks wait for D or are being sent.", float64(v.Sending))
	count("pulls_total", "Pulls handed to the workers.", v.Pulls)
	count("empty_pulls_total", "Pulls handed to the workers so that P frees its blocks.", v.EmptyPulls)
	count("loaded_total", "Pulls that ended well.", v.Loaded)
	count("failed_total", "Pulls that ended badly.", v.Failed)
	count("fenced_total", "Requests that ended during their pull.", v.Fenced)
	count("announced_total", "Transfers announced to the workers.", v.Announced)
	count("delayed_total", "Requests whose blocks were kept for D.", v.Delayed)
	count("sent_total", "Requests whose kept blocks came back.", v.Sent)
	count("not_processed_total", "Transfers that will not be sent.", v.NotProcessed)
	count("truncated_total", "Prompts whose last token was left to D.", v.Truncated)
	count("refused_total", "Requests that go on without a transfer.", v.Refused)
	count("unknown_total", "Reports about requests in no transfer.", v.Unknown)
}
