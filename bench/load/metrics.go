// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/bench"
)

// Roles of engines, as results name them.
const (
	Prefill = "P"
	Decode  = "D"
)

// Watcher reads the metrics of engines, under vLLM's names, during a run.
type Watcher struct {
	client  *http.Client
	began   time.Time
	stop    context.CancelFunc
	wg      sync.WaitGroup
	engines []*watched
}

type watched struct {
	bench.Engine
	url           string
	before, after samples
}

// Limits of reading metrics.
const (
	watchEvery  = time.Second
	scrapeWait  = 3 * time.Second // limit for one answer
	scrapeLimit = 16 << 20        // most bytes of one answer that are read
	maxPoints   = 4096            // most points of an engine; then every second point is dropped, and the interval doubles
)

// Watch begins to watch the engines at urls, whose keys are roles. A URL need not end in /metrics. An engine that reports nothing gets
// an Error in the result of Stop.
func (g *Generator) Watch(ctx context.Context, urls map[string]string) *Watcher {
	ctx, stop := context.WithCancel(ctx)
	w := &Watcher{client: g.client, began: time.Now(), stop: stop}
	for _, role := range []string{Prefill, Decode, ""} {
		url := urls[role]
		if url == "" {
			continue
		}
		if !strings.HasSuffix(url, "/metrics") {
			url = strings.TrimRight(url, "/") + "/metrics"
		}
		e := &watched{url: url}
		e.Role = role
		w.engines = append(w.engines, e)
		var err error
		if e.before, err = w.scrape(ctx, url); err != nil {
			e.Error = reason(err)
			continue
		}
		w.wg.Go(func() { w.follow(ctx, e) })
	}
	return w
}

// follow records the state of an engine every second until ctx ends, at longer intervals once there are maxPoints. It leaves out a point
// when the engine does not answer.
func (w *Watcher) follow(ctx context.Context, e *watched) {
	t := time.NewTicker(watchEvery)
	defer t.Stop()
	skip := 0
	for n := 0; ; n++ {
		if n&skip == 0 {
			if s, err := w.scrape(ctx, e.url); err == nil {
				e.Points = append(e.Points, bench.Point{
					At: time.Since(w.began).Seconds(), Running: int(s["vllm:num_requests_running"]), Waiting: int(s["vllm:num_requests_waiting"]), Usage: s["vllm:kv_cache_usage_perc"],
				})
			}
		}
		if len(e.Points) == maxPoints {
			for i := range maxPoints / 2 {
				e.Points[i] = e.Points[2*i]
			}
			e.Points, skip = e.Points[:maxPoints/2], 2*skip+1
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
	}
}

// Stop ends the watching. It returns the figures of each engine, and the stages from a prompt to its first token. ttft is the client's
// mean time to first token, in ms.
func (w *Watcher) Stop(ttft float64) (engines []bench.Engine, stages []bench.Stage) {
	w.stop()
	w.wg.Wait()
	by := map[string]*watched{}
	for _, e := range w.engines {
		var err error
		if e.Error == "" {
			if e.after, err = w.scrape(context.Background(), e.url); err != nil {
				e.Error = reason(err)
			}
		}
		e.Queries, e.Hits, e.Loaded = e.delta("vllm:prefix_cache_queries_total"), e.delta("vllm:prefix_cache_hits_total"), e.delta("vllm:external_prefix_cache_hits_total")
		by[e.Role] = e
		engines = append(engines, e.Engine)
	}
	return engines, handover(by[Prefill], by[Decode], ttft)
}

func (e *watched) delta(name string) int64 { return int64(max(0, e.after[name]-e.before[name])) }

// mean returns the mean of a histogram over the run, in ms; ok is false if it counted nothing.
func (e *watched) mean(name string) (millis float64, ok bool) {
	n := e.after[name+"_count"] - e.before[name+"_count"]
	if !(n > 0) {
		return 0, false
	}
	return max(0, 1000*(e.after[name+"_sum"]-e.before[name+"_sum"])/n), true
}

// transfers are the histograms in which engines report how long the transfer of KV took.
var transfers = []string{"kvasir_engine_load_seconds", "vllm:nixl_xfer_time_seconds"}

// handover divides the time to the first token among the engines. An engine counts the wait for remote KV as queue time, so the
// transfer, if known, is subtracted from D's queue. If P and D get the request at the same time, D also waits for P; that is
// subtracted, too.
func handover(p, d *watched, ttft float64) (stages []bench.Stage) {
	if p == nil || d == nil || p.Error != "" || d.Error != "" {
		return nil
	}
	add := func(name string, v float64) { stages = append(stages, bench.Stage{Name: name, Millis: v}) }
	queueP, ok1 := p.mean("vllm:request_queue_time_seconds")
	prefill, ok2 := p.mean("vllm:request_prefill_time_seconds")
	queueD, ok3 := d.mean("vllm:request_queue_time_seconds")
	first, ok4 := d.mean("vllm:request_prefill_time_seconds")
	if !ok1 || !ok2 || !ok3 || !ok4 {
		return nil
	}
	add("queue of P", queueP)
	add("prefill", prefill)
	if queueP+prefill+queueD+first > ttft {
		queueD = max(0, queueD-queueP-prefill)
	}
	known := false
	for _, name := range transfers {
		if t, ok := d.mean(name); ok && !known {
			known = true
			t = min(t, queueD)
			add("transfer", t)
			add("queue of D", queueD-t)
		}
	}
	if !known {
		add("transfer and queue of D", queueD)
	}
	add("first decode step", first)
	if rest := ttft - queueP - prefill - queueD - first; rest > 0 {
		add("proxy, network, the rest", rest)
	}
	return stages
}

// samples holds the values of one answer by name, summed over their labels; of histograms only the sums and counts.
type samples map[string]float64

func (w *Watcher) scrape(ctx context.Context, url string) (samples, error) {
	ctx, cancel := context.WithTimeout(ctx, scrapeWait)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	res, err := w.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: HTTP %d", url, res.StatusCode)
	}
	s, err := parseMetrics(io.LimitReader(res.Body, scrapeLimit))
	if err == nil && len(s) == 0 {
		err = fmt.Errorf("%s has no metrics of an engine", url)
	}
	return s, err
}

// parseMetrics parses the text format of Prometheus.
func parseMetrics(r io.Reader) (samples, error) {
	out := samples{}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := bytes.TrimSpace(lines.Bytes())
		if !bytes.HasPrefix(line, []byte("vllm:")) && !bytes.HasPrefix(line, []byte("kvasir_engine_")) {
			continue
		}
		name, rest := line, []byte(nil)
		if open := bytes.IndexByte(line, '{'); open >= 0 {
			end := bytes.LastIndexByte(line, '}')
			if end < open {
				continue
			}
			name, rest = line[:open], line[end+1:]
		} else if blank := bytes.IndexByte(line, ' '); blank >= 0 {
			name, rest = line[:blank], line[blank:]
		}
		fields := bytes.Fields(rest)
		if len(fields) == 0 || bytes.HasSuffix(name, []byte("_bucket")) {
			continue
		}
		v, err := strconv.ParseFloat(string(fields[0]), 64)
		if err != nil || v != v || v > 1e300 || v < -1e300 {
			continue
		}
		out[string(name)] += v
	}
	return out, lines.Err()
}
