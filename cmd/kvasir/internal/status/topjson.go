// SPDX-License-Identifier: Apache-2.0

package status

import (
	"context"
	"encoding/json"
	"io"
	"math"

	"github.com/kvasir-kv/kvasir/server/admin"
)

// topFigures are the figures that Top computes from two snapshots, and the server's answer at the second one. An unknown figure is null.
type topFigures struct {
	URL         string             `json:"url"`
	Time        string             `json:"time"`
	Seconds     float64            `json:"seconds"`  // between the two looks
	HitRate     *float64           `json:"hit_rate"` // of the tokens that were asked for between them
	BytesPerSec map[string]float64 `json:"bytes_per_second"`
	Requests    []requestFigures   `json:"requests"` // that were served between them, or since the start; the slowest first
	Status      admin.Status       `json:"status"`
}

// requestFigures are how long the requests of one kind took, as the upper bounds of the histogram's buckets.
type requestFigures struct {
	Operation  string   `json:"operation"`
	Count      float64  `json:"count"`
	P50Seconds *float64 `json:"p50_seconds"` // null above the last bound
	P99Seconds *float64 `json:"p99_seconds"`
}

// rates are the names of byte rates in JSON, and the counters that they come of.
var rates = map[string]string{
	"stored": "kvasir_stored_bytes_total", "retrieved": "kvasir_retrieved_bytes_total", "read_from_tiers": "kvasir_below_read_bytes_total",
	"evicted": "kvasir_evicted_bytes_total",
}

// OnceJSON asks a server twice, an interval apart, and writes what Top computes as one JSON object.
func OnceJSON(ctx context.Context, o Options, w io.Writer) error {
	var before, now *Snapshot
	if err := twice(ctx, &o, func(s *Snapshot) { before, now = now, s }); err != nil {
		return err
	}
	out := topFigures{
		URL: o.URL, Time: now.At.UTC().Format("2006-01-02T15:04:05.000Z"), Seconds: now.At.Sub(before.At).Seconds(), BytesPerSec: make(map[string]float64),
		Requests: []requestFigures{}, Status: now.Status,
	}
	if rate, ok := now.hitRate(before); ok {
		out.HitRate = &rate
	}
	for name, counter := range rates {
		if rate, ok := now.rate(before, func(s *Snapshot) float64 { return s.counts[counter] }); ok {
			out.BytesPerSec[name] = rate
		}
	}
	bound := func(seconds float64) *float64 {
		if math.IsInf(seconds, 0) || math.IsNaN(seconds) {
			return nil
		}
		return &seconds
	}
	for _, op := range now.operations(before) {
		out.Requests = append(out.Requests, requestFigures{op.name, op.count, bound(op.p50), bound(op.p99)})
	}
	return json.NewEncoder(w).Encode(out)
}
