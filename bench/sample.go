// SPDX-License-Identifier: Apache-2.0

// Package bench measures what the clients of an engine experience: times to first token, times per token, throughputs, and their
// statistics, as vllm bench serve computes and prints them. It sends nothing: package bench/load sends requests, and simulators make
// samples of their own.
//
// The definitions, after vllm/benchmarks/serve.py and lib/endpoint_request_func.py of vLLM
// 0.32.0:
//
//	TTFT  from sending a request to the first event of its stream with a choice
//	ITL   each gap between such events; all gaps of all requests are one population
//	E2EL  from sending a request to the last such event
//	TPOT  (E2EL - TTFT) / (output tokens - 1), for requests of two tokens and more
//
// None of them includes the time that a request waits in the client for its turn. Percentiles are interpolated linearly, as numpy does;
// standard deviations are those of a population.
package bench

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Sample is one request as its client experienced it. Times are in seconds.
type Sample struct {
	Start   float64 // when it was sent, since a moment that is the same for all samples
	Queue   float64 // from its arrival to Start: the wait for the client's own limit on concurrency
	TTFT    float64
	Latency float64   // E2EL
	ITL     []float64 // gaps between events with a choice; one less than such events
	Input   int       // prompt tokens
	Output  int       // generated tokens
	Cached  int       // prompt tokens that the engine did not compute; -1: the engine does not tell
	Text    string    // generated text, if it is kept
	Error   string    // why it failed; empty: it succeeded
}

// Failed reports whether the request failed. Then its times have no meaning.
func (s *Sample) Failed() bool { return s.Error != "" }

// TPOT returns the time per output token after the first token; ok is false for a request with one token.
func (s *Sample) TPOT() (seconds float64, ok bool) {
	if s.Output < 2 {
		return 0, false
	}
	return (s.Latency - s.TTFT) / float64(s.Output-1), true
}

// SLO is a limit that a request must meet to count for the goodput.
type SLO struct {
	Metric string  // ttft, tpot or e2el
	Millis float64 // largest value that meets the limit
}

// ParseSLOs parses limits in the form of vllm bench serve: ttft:500 tpot:50 e2el:3000, in ms.
func ParseSLOs(words []string) ([]SLO, error) {
	var out []SLO
	for _, w := range words {
		name, value, ok := strings.Cut(w, ":")
		ms, err := strconv.ParseFloat(value, 64)
		switch {
		case !ok || err != nil:
			return nil, fmt.Errorf("%q is no limit: want NAME:MILLISECONDS, as ttft:500", w)
		case !slices.Contains([]string{"ttft", "tpot", "e2el"}, name):
			return nil, fmt.Errorf("%q: no metric %q, want ttft, tpot or e2el", w, name)
		case !(ms > 0) || math.IsInf(ms, 0):
			return nil, fmt.Errorf("%q: no request can keep it, want more than 0 ms", w)
		case slices.ContainsFunc(out, func(s SLO) bool { return s.Metric == name }):
			return nil, fmt.Errorf("%q: %s has a limit already", w, name)
		}
		out = append(out, SLO{name, ms})
	}
	return out, nil
}

// Meets reports whether a request that succeeded met all limits. The TPOT of a request with one token counts as 0.
func (s *Sample) Meets(slos []SLO) bool {
	for _, o := range slos {
		v := s.TTFT
		switch o.Metric {
		case "tpot":
			v, _ = s.TPOT()
		case "e2el":
			v = s.Latency
		}
		if !(v <= o.Millis/1000) {
			return false
		}
	}
	return true
}
