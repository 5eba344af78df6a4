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

// Snapshot is what a server said at one moment.
type Snapshot struct {
	At     time.Time
	Status admin.Status
	Live   admin.Live          // zero where the server did not tell
	Chosen explain.Explanation // of one request, where one was asked for
	counts map[string]float64  // of /metrics, those of counted, by name
	times  map[string][]bucket
}

// bucket counts the requests that took at most seconds.
type bucket struct{ seconds, count float64 }

// counted are the metrics that are read.
var counted = map[string]bool{"kvasir_stored_bytes_total": true, "kvasir_retrieved_bytes_total": true, "kvasir_below_read_bytes_total": true, "kvasir_evicted_bytes_total": true}

// timed is the histogram that is read.
const timed = "kvasir_request_duration_seconds_bucket"

// Take asks a server, at /status, /metrics, /now, and of a request, unless it is empty, at /explain. at is the time of the snapshot.
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
	if a.hourOf != id || at.Sub(a.askedAt) > maxGap { // the whole hour once: other answers have only the newest two points
		now += "?history=1"
	}
	a.hourOf = "" // until the server has answered; an earlier version does not answer
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

// maxGap is about the least time that two points of a server's history cover.
const maxGap = 8 * time.Second

// maxOperations bounds the operations that are kept of a histogram.
const maxOperations = 64

// read takes what is wanted from a Prometheus text.
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
		bound, err := strconv.ParseFloat(le, 64) // +Inf too
		if err != nil || len(s.times) == maxOperations && s.times[operation] == nil {
			continue
		}
		s.times[operation] = append(s.times[operation], bucket{bound, v})
	}
	for _, b := range s.times {
		slices.SortFunc(b, func(a, b bucket) int { return cmp.Compare(a.seconds, b.seconds) })
	}
}

// label returns a label's value of a="x",b="y"}; escapes are left as they are.
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

// isLater reports whether s is the same server's as before, at a later time: only then do
// their differences mean anything.
func (s *Snapshot) isLater(before *Snapshot) bool {
	return before != nil && s.At.After(before.At) && s.Status.PID == before.Status.PID && s.Status.Started == before.Status.Started
}

// rate returns how much a counter grew in a second; false when that is not known.
func (s *Snapshot) rate(before *Snapshot, of func(*Snapshot) float64) (float64, bool) {
	if !s.isLater(before) {
		return 0, false
	}
	return max(0, of(s)-of(before)) / s.At.Sub(before.At).Seconds(), true
}

// hitRate returns the share of tokens that hit since before; false if none were asked for.
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

// operation is how long requests of one kind took.
type operation struct {
	name     string
	count    float64
	p50, p99 float64 // seconds, the upper bounds of their buckets; +Inf above the last
}

// operations returns those since before, or since the server's start; the slowest first.
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
