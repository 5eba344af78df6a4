// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

// TableMetrics are the populations that vLLM's table shows by default.
var TableMetrics = []string{"ttft", "tpot", "itl"}

// Table prints the result as vllm bench serve does, line by line, with the same blanks. metrics names the populations to print, by the
// names of --percentile-metrics; nil: TableMetrics.
func (r *Result) Table(w io.Writer, metrics []string) error {
	if metrics == nil {
		metrics = TableMetrics
	}
	var b strings.Builder
	whole := func(name string, n int) { fmt.Fprintf(&b, "%-40s %-10d\n", name, n) }
	real := func(name string, v float64) { fmt.Fprintf(&b, "%-40s %-10.2f\n", name, v) }
	b.WriteString(centred(" Serving Benchmark Result ", "="))
	whole("Successful requests:", r.Completed)
	whole("Failed requests:", r.Failed)
	if r.MaxConcurrency != nil {
		whole("Maximum request concurrency:", *r.MaxConcurrency)
	}
	if r.limited() {
		real("Request rate configured (RPS):", float64(r.Rate))
	}
	real("Benchmark duration (s):", r.Duration)
	whole("Total input tokens:", r.TotalInput)
	whole("Total generated tokens:", r.TotalOutput)
	real("Request throughput (req/s):", r.RequestThroughput)
	if r.RequestGoodput != nil {
		real("Request goodput (req/s):", *r.RequestGoodput)
	}
	real("Output token throughput (tok/s):", r.OutputThroughput)
	real("Peak output token throughput (tok/s):", r.PeakOutput)
	real("Peak concurrent requests:", float64(r.PeakConcurrent))
	real("Total token throughput (tok/s):", r.TotalThroughput)
	for _, d := range r.distributions() {
		if *d.at == nil || !slices.Contains(metrics, d.key) {
			continue
		}
		b.WriteString(centred(d.title, "-"))
		real("Mean "+d.short+" (ms):", (*d.at).Mean)
		real("Median "+d.short+" (ms):", (*d.at).Median)
		for _, p := range (*d.at).Percentiles {
			real("P"+word(p.P)+" "+d.short+" (ms):", p.Millis)
		}
	}
	b.WriteString(strings.Repeat("=", tableWidth) + "\n")
	_, err := io.WriteString(w, b.String())
	return err
}

const tableWidth = 50

// centred returns a line with text in the middle, filled on both sides.
func centred(text, fill string) string {
	n := max(0, tableWidth-len(text))
	return strings.Repeat(fill, n/2) + text + strings.Repeat(fill, n-n/2) + "\n"
}

// More prints the figures for which vLLM's table has no line, if there are any.
func (r *Result) More(w io.Writer) error {
	var b strings.Builder
	title := func(s string) { b.WriteString(centred(" "+s+" ", "-")) }
	line := func(name string, v float64) { fmt.Fprintf(&b, "%-40s %.2f\n", name, v) }
	if r.Interrupted {
		fmt.Fprintf(&b, "%-40s %d\n", "Interrupted; requests not finished:", r.Unfinished)
	}
	if r.TotalPerGPU > 0 {
		title("Per GPU and per user")
		line("Total tokens per second and GPU:", r.TotalPerGPU)
		line("Output tokens per second and GPU:", r.OutputPerGPU)
		line("Input tokens per second and GPU:", r.InputPerGPU)
	}
	if r.Interactivity > 0 {
		line("Interactivity (tok/s/user):", r.Interactivity)
	}
	if rate, ok := r.HitRate(); ok {
		line("Prompt tokens not computed (%):", 100*rate)
	}
	if len(r.Stages) > 0 {
		title("From prompt to first token")
		for _, s := range r.Stages {
			line("Mean "+s.Name+" (ms):", s.Millis)
		}
	}
	for _, e := range r.Engines {
		if e.Error != "" {
			fmt.Fprintf(&b, "%s reports no figures: %s\n", e.name(), e.Error)
		}
	}
	texts := slices.Sorted(maps.Keys(r.Errors))
	slices.SortStableFunc(texts, func(x, y string) int { return r.Errors[y] - r.Errors[x] })
	for i, text := range texts {
		if i == 5 {
			fmt.Fprintf(&b, "and %d other errors\n", len(texts)-i)
			break
		}
		fmt.Fprintf(&b, "%d failed: %s\n", r.Errors[text], text)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (e *Engine) name() string {
	if e.Role == "" {
		return "the engine"
	}
	return e.Role
}

// HitRate returns the share of the prompt tokens that the engine did not compute, according to its answers; ok is false if they do not
// tell.
func (r *Result) HitRate() (share float64, ok bool) {
	cached, all := 0, 0
	for i := range r.samples {
		s := &r.samples[i]
		if s.Failed() {
			continue
		}
		all += s.Input
		if s.Cached >= 0 {
			ok = true
			cached += s.Cached
		}
	}
	if !ok || all == 0 {
		return 0, false
	}
	return float64(cached) / float64(all), true
}
