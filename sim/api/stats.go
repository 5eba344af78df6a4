// SPDX-License-Identifier: Apache-2.0

package api

import (
	"github.com/kvasir-kv/kvasir/internal/histogram"
)

// stats are the API's own figures.
type stats struct{ ttft, itl, e2e *histogram.Histogram }

// Metrics has the figures of an engine under vLLM's metric names.
type Metrics struct {
	Running int     `gauge:"vllm:num_requests_running" help:"Requests in the steps of the engine."`
	Waiting int     `gauge:"vllm:num_requests_waiting" help:"Requests that wait to be computed."`
	Usage   float64 `gauge:"vllm:kv_cache_usage_perc" help:"Share of the KV blocks that are in use; 1 is all."`

	Queries         int64 `counter:"vllm:prefix_cache_queries_total" help:"Prompt tokens that were looked up in the prefix cache."`
	Hits            int64 `counter:"vllm:prefix_cache_hits_total" help:"Prompt tokens found in the prefix cache."`
	ExternalQueries int64 `counter:"vllm:external_prefix_cache_queries_total" help:"Prompt tokens that connectors were asked for."`
	ExternalHits    int64 `counter:"vllm:external_prefix_cache_hits_total" help:"Prompt tokens that connectors loaded."`

	Preemptions int64            `counter:"vllm:num_preemptions_total" help:"Requests that lost their blocks and were computed again."`
	Prompt      int64            `counter:"vllm:prompt_tokens_total" help:"Prompt tokens of requests."`
	Generated   int64            `counter:"vllm:generation_tokens_total" help:"Tokens generated."`
	Success     map[string]int64 `counter:"vllm:request_success_total" label:"finished_reason" help:"Requests that ended, by reason."`

	TTFT histogram.Counts `histogram:"vllm:time_to_first_token_seconds" help:"From the request to its first token."`
	ITL  histogram.Counts `histogram:"vllm:inter_token_latency_seconds" help:"Between tokens of a request."`
	E2E  histogram.Counts `histogram:"vllm:e2e_request_latency_seconds" help:"From the request to its end."`

	Queue   histogram.Counts `histogram:"vllm:request_queue_time_seconds" help:"From the request to its first step; waiting for KV from elsewhere counts."`
	Prefill histogram.Counts `histogram:"vllm:request_prefill_time_seconds" help:"From the first step of a request to its first token."`
	Decode  histogram.Counts `histogram:"vllm:request_decode_time_seconds" help:"From the first token of a request to its last."`
	Load    histogram.Counts `histogram:"kvasir_engine_load_seconds" help:"Time that KV from another engine or a cache server took to come; a part of the queue time."`

	WrongBytes int64 `counter:"kvasir_engine_wrong_kv_requests_total" help:"Requests that failed because KV they were given is not theirs; any is a fault of a peer or of Kvasir."`
	Kept       int   `gauge:"kvasir_engine_kept_requests" help:"Ended requests whose blocks a connector still needs."`
	FreeBlocks int   `gauge:"kvasir_engine_free_blocks" help:"KV blocks that no request has."`
}

func (a *API) metrics() *Metrics {
	s := a.e.Stats()
	return &Metrics{
		Running: s.Running, Waiting: s.Waiting, Usage: 1 - float64(s.Free)/float64(s.Blocks), Queries: s.Queries, Hits: s.Hits,
		ExternalQueries: s.ExternalQueries, ExternalHits: s.LoadedTokens, Preemptions: s.Preemptions, Prompt: s.PromptTokens, Generated: s.Generated,
		Success: map[string]int64{"length": s.Finished, "abort": s.Aborted, "error": s.Failed, "stop": 0},
		TTFT:    a.stats.ttft.Counts(), ITL: a.stats.itl.Counts(), E2E: a.stats.e2e.Counts(),
		Queue: s.Queue, Prefill: s.Prefill, Decode: s.Decode, Load: s.Load,
		WrongBytes: s.WrongBytes, Kept: s.Kept, FreeBlocks: s.Free,
	}
}
