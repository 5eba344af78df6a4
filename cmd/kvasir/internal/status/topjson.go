// SPDX-License-Identifier: Apache-2.0

package status

import (
	"context"
	"encoding/json"
	"io"
	"math"

	"github.com/kvasir-kv/kvasir/server/admin"
)

// topFigures are the figures that Top computes from two snapshots, and the answer of the server at the second one. A figure that is not
// known is null.
type topFigures struct {
	URL         string             `json:"url"`
	Time        string             `json:"time"`
	Seconds     float64            `json:"seconds"`  // between the two snapshots
	HitRate     *float64           `json:"hit_rate"` // of the tokens that were asked for between them
	BytesPerSec map[string]float64 `json:"bytes_per_second"`
	Requests    []requestFigures   `json:"requests"` // of requests between them, or since the start of the server; the slowest first
	Status      admin.Status       `json:"status"`
}

// requestFigures say how long requests of one kind took. The times are upper bounds of the histogram's buckets.
type requestFigures struct {
	Operation  string   `json:"operation"`
	Count      float64  `json:"count"`
	P50Seconds *float64 `json:"p50_seconds"` // null if the time is above the last bound
	P99Seconds *float64 `json:"p99_seconds"`
}

// rates says which counter each rate in bytes per second is computed from, by the rate's name in JSON.
var rates = map[string]string{
	"stored": "kvasir_stored_bytes_total", "retrieved": "kvasir_retrieved_bytes_total", "read_from_tiers": "kvasir_below_read_bytes_total",
	"evicted": "kvasir_evicted_bytes_total",
}

// OnceJSON asks a server twice, one interval apart, and writes what Top computes as one JSON object.
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
