// SPDX-License-Identifier: Apache-2.0

package status

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math"
	neturl "net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/server/admin"
	"github.com/kvasir-kv/kvasir/server/explain"
)

// Snapshot holds the answers of a server at one moment.
type Snapshot struct {
	At     time.Time
	Status admin.Status
	Live   admin.Live          // zero if the server did not answer at /now
	Chosen explain.Explanation // of the request that Take was asked about, if any
	counts map[string]float64  // values of the metrics in counted, by name
	times  map[string][]bucket
}

// bucket says how many requests took at most so many seconds.
type bucket struct{ seconds, count float64 }

// counted are the counters that a Snapshot reads from /metrics.
var counted = map[string]bool{"kvasir_stored_bytes_total": true, "kvasir_retrieved_bytes_total": true, "kvasir_below_read_bytes_total": true, "kvasir_evicted_bytes_total": true}

// timed is the histogram that a Snapshot reads from /metrics.
const timed = "kvasir_request_duration_seconds_bucket"

// Take asks a server at /status, /metrics and /now, and at /explain about a request, unless its ID in request is empty. `at` is the time
// of the snapshot. If /now or /explain is not answered, the snapshot lacks its figures; other failures are errors.
func (a *Asker) Take(ctx context.Context, url, request string, at time.Time) (*Snapshot, error) {
	s := &Snapshot{At: at}
	body, err := a.get(ctx, url+"/status")
	if err != nil {
		return nil, err
	}
	if json.Unmarshal(body, &s.Status) != nil || s.Status.PID == 0 || s.Status.ChunkTokens == 0 {
		return nil, fmt.Errorf("%s/status is not answered by a kvasir server", url)
	}
	if body, err = a.get(ctx, url+"/metrics"); err != nil {
		return nil, err
	}
	s.read(body)
	now := url + "/now"
	id := s.Status.Started + " " + strconv.Itoa(s.Status.PID)
	if a.hourOf != id || at.Sub(a.askedAt) > maxGap { // the whole hour is fetched once: other answers have only the two newest points
		now += "?history=1"
	}
	a.hourOf = "" // until the server has answered; an earlier release has no /now
	if body, err = a.get(ctx, now); err == nil && json.Unmarshal(body, &s.Live) == nil {
		a.hourOf, a.askedAt = id, at
	}
	if request != "" {
		if body, err = a.get(ctx, url+"/explain?limit=1&request_id="+neturl.QueryEscape(request)); err == nil {
			_ = json.Unmarshal(body, &s.Chosen) // missing fields are shown as missing
		}
	}
	return s, nil
}

// maxGap is about how much time two points of a server's history cover at least. After a longer gap the whole hour is fetched again.
const maxGap = 8 * time.Second

// maxOperations is how many operations of the histogram are kept; further ones are ignored.
const maxOperations = 64

// read reads the counters and the histogram from a text of Prometheus.
func (s *Snapshot) read(text []byte) {
	s.counts, s.times = make(map[string]float64), make(map[string][]bucket)
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		name, value, ok := strings.Cut(lines.Text(), " ")
		v, err := strconv.ParseFloat(value, 64)
		if !ok || err != nil {
			continue
		}
		if counted[name] {
			s.counts[name] = v
			continue
		}
		labels, ok := strings.CutPrefix(name, timed+"{")
		if !ok {
			continue
		}
		operation, le := label(labels, "operation"), label(labels, "le")
		bound, err := strconv.ParseFloat(le, 64) // also reads +Inf
		if err != nil || len(s.times) == maxOperations && s.times[operation] == nil {
			continue
		}
		s.times[operation] = append(s.times[operation], bucket{bound, v})
	}
	for _, b := range s.times {
		slices.SortFunc(b, func(a, b bucket) int { return cmp.Compare(a.seconds, b.seconds) })
	}
}

// label returns the value of a label from text of the form a="x",b="y"}. It leaves escapes as they are.
func label(labels, name string) string {
	for rest := labels; ; {
		key, after, ok := strings.Cut(rest, `="`)
		if !ok {
			return ""
		}
		value, next, ok := strings.Cut(after, `"`)
		if !ok {
			return ""
		}
		if strings.TrimLeft(key, ",") == name {
			return value
		}
		rest = next
	}
}

// isLater reports whether s and `before` are snapshots of the same process, and s is the later one. Only then do differences between them
// mean anything.
func (s *Snapshot) isLater(before *Snapshot) bool {
	return before != nil && s.At.After(before.At) && s.Status.PID == before.Status.PID && s.Status.Started == before.Status.Started
}

// rate returns by how much a counter grew per second from the snapshot `before` to s; the function `of` returns the counter's value in a
// snapshot. The bool is false if the two are not snapshots of one process.
func (s *Snapshot) rate(before *Snapshot, of func(*Snapshot) float64) (float64, bool) {
	if !s.isLater(before) {
		return 0, false
	}
	return max(0, of(s)-of(before)) / s.At.Sub(before.At).Seconds(), true
}

// hitRate returns which share of the tokens asked for from the snapshot `before` to s was found. The bool is false if none were asked for,
// or if the two are not snapshots of one process.
func (s *Snapshot) hitRate(before *Snapshot) (float64, bool) {
	if !s.isLater(before) {
		return 0, false
	}
	now, then := &s.Status.Lookup, &before.Status.Lookup
	if now.AskedTokens <= then.AskedTokens || now.HitTokens < then.HitTokens {
		return 0, false
	}
	return min(1, float64(now.HitTokens-then.HitTokens)/float64(now.AskedTokens-then.AskedTokens)), true
}

// operation says how long requests of one kind took.
type operation struct {
	name     string
	count    float64
	p50, p99 float64 // seconds: upper bounds of the buckets; +Inf: above the last bound
}

// operations returns the operations between before and s, or since the start of the server if before is no earlier snapshot of it. The
// slowest comes first.
func (s *Snapshot) operations(before *Snapshot) []operation {
	var out []operation
	for name, buckets := range s.times {
		counts := slices.Clone(buckets)
		if s.isLater(before) && len(before.times[name]) == len(counts) {
			for i, b := range before.times[name] {
				counts[i].count -= b.count
			}
		}
		if n := counts[len(counts)-1].count; n > 0 {
			out = append(out, operation{name, n, quantile(counts, 0.5), quantile(counts, 0.99)})
		}
	}
	slices.SortFunc(out, func(a, b operation) int {
		return cmp.Or(cmp.Compare(b.p99, a.p99), cmp.Compare(b.count, a.count), strings.Compare(a.name, b.name))
	})
	return out
}

func quantile(buckets []bucket, q float64) float64 {
	total := buckets[len(buckets)-1].count
	for _, b := range buckets {
		if b.count >= q*total {
			return b.seconds
		}
	}
	return math.Inf(1)
}
