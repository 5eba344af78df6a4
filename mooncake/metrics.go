package mooncake

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics are the connector's Prometheus metrics, under vLLM's names, so that
// dashboards keep working. Senders and Receivers of one process may share one; a
// nil one counts nothing.
type Metrics struct {
	seconds, bytes, descriptors          prometheus.Histogram
	failedPushes, failedRecvs, expiredKV prometheus.Counter
}

// NewMetrics returns metrics at zero; register it with Prometheus.
func NewMetrics() *Metrics {
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets})
	}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	return &Metrics{
		seconds: histogram("vllm:mooncake_xfer_time_seconds", "Time of one push of KV blocks.",
			[]float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}),
		bytes: histogram("vllm:mooncake_bytes_transferred", "Bytes of one push of KV blocks.",
			prometheus.ExponentialBuckets(64<<10, 4, 10)),
		descriptors: histogram("vllm:mooncake_num_descriptors", "Descriptors of one push of KV blocks.",
			prometheus.ExponentialBuckets(1, 4, 10)),
		failedPushes: counter("vllm:mooncake_num_failed_transfers", "Pushes that the transfer engine failed."),
		failedRecvs:  counter("vllm:mooncake_num_failed_recvs", "Requests whose KV did not arrive."),
		expiredKV:    counter("vllm:mooncake_num_kv_expired_reqs", "Requests whose KV nobody pulled in time."),
	}
}

func (m *Metrics) all() []prometheus.Collector {
	return []prometheus.Collector{m.seconds, m.bytes, m.descriptors, m.failedPushes, m.failedRecvs, m.expiredKV}
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range m.all() {
		c.Describe(ch)
	}
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range m.all() {
		c.Collect(ch)
	}
}

// Pushed counts one push of KV blocks.
func (m *Metrics) Pushed(d time.Duration, bytes int64, descriptors int) {
	if m == nil {
		return
	}
	m.seconds.Observe(d.Seconds())
	m.bytes.Observe(float64(bytes))
	m.descriptors.Observe(float64(descriptors))
}

func (m *Metrics) failPush() {
	if m != nil {
		m.failedPushes.Inc()
	}
}

func (m *Metrics) failRecv() {
	if m != nil {
		m.failedRecvs.Inc()
	}
}

func (m *Metrics) expire() {
	if m != nil {
		m.expiredKV.Inc()
	}
}
