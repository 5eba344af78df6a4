// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/histogram"
)

// Metrics counts what Senders and Receivers do. All Senders and Receivers of a process may share one Metrics. A nil *Metrics counts
// nothing.
type Metrics struct {
	times, bytes, descriptors            *histogram.Histogram
	failedPushes, failedRecvs, expiredKV atomic.Uint64
}

// The upper bounds of the buckets of vLLM 0.33's histograms.
var (
	pushTimes       = []int64{5e6, 10e6, 25e6, 50e6, 75e6, 100e6, 200e6, 300e6, 500e6, 750e6, 1e9, 5e9} // ns
	pushDescriptors = []int64{10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000}
)

// pushBytes returns the bucket bounds of pushed bytes: the powers of 4 from 2 KiB to 8 GiB.
func pushBytes() (bounds []int64) {
	for bound := int64(2 << 10); bound <= 8<<30; bound *= 4 {
		bounds = append(bounds, bound)
	}
	return bounds
}

// NewMetrics returns metrics at zero.
func NewMetrics() *Metrics {
	return &Metrics{times: histogram.New(1e-9, pushTimes...), bytes: histogram.New(1, pushBytes()...), descriptors: histogram.New(1, pushDescriptors...)}
}

// MetricsStats are the figures of Metrics, under vLLM's names, so that dashboards keep
// working.
type MetricsStats struct {
	PushTimes       histogram.Counts `histogram:"vllm:mooncake_xfer_time_seconds" help:"Time of one push of KV blocks."`
	PushBytes       histogram.Counts `histogram:"vllm:mooncake_bytes_transferred" help:"Bytes of one push of KV blocks."`
	PushDescriptors histogram.Counts `histogram:"vllm:mooncake_num_descriptors" help:"Descriptors of one push of KV blocks."`
	FailedPushes    uint64           `counter:"vllm:mooncake_num_failed_transfers_total" help:"Pushes that the transfer engine failed."`
	FailedRecvs     uint64           `counter:"vllm:mooncake_num_failed_recvs_total" help:"Requests whose KV did not arrive; D computes them."`
	ExpiredKV       uint64           `counter:"vllm:mooncake_num_kv_expired_reqs_total" help:"Requests whose KV no D pulled in time."`
}

// Stats returns the figures.
func (m *Metrics) Stats() MetricsStats {
	return MetricsStats{
		PushTimes: m.times.Counts(), PushBytes: m.bytes.Counts(), PushDescriptors: m.descriptors.Counts(),
		FailedPushes: m.failedPushes.Load(), FailedRecvs: m.failedRecvs.Load(), ExpiredKV: m.expiredKV.Load(),
	}
}

// Pushed counts one push of KV blocks: how long it took, its bytes and its descriptors.
func (m *Metrics) Pushed(d time.Duration, bytes int64, descriptors int) {
	if m == nil {
		return
	}
	m.times.Took(d)
	m.bytes.Observe(bytes)
	m.descriptors.Observe(int64(descriptors))
}

func (m *Metrics) failPush() {
	if m != nil {
		m.failedPushes.Add(1)
	}
}

func (m *Metrics) failRecv() {
	if m != nil {
		m.failedRecvs.Add(1)
	}
}

// Expire counts a request whose KV no D pulled in time.
func (m *Metrics) Expire() {
	if m != nil {
		m.expiredKV.Add(1)
	}
}
