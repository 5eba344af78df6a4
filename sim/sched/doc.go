// SPDX-License-Identifier: Apache-2.0

// Package sched decides like vLLM's scheduler: which requests run in a step and how many
// tokens of each, which blocks of the paged KV cache they get, who is preempted, what hits
// the prefix cache, what waits for remote KV.
//
// It is a state machine without a clock, a goroutine or tokens: a request has the hash of
// each of its blocks, an engine reports the outcome of each step. One goroutine calls it.
//
// An engine turns like this; under Config.Async two steps may be in flight:
//
//	step := s.Schedule()              // rows to compute, blocks to use
//	result := s.Process(sched.Output{}) // the oldest step is done
//
// Source: Scheduler, AsyncScheduler, KVCacheManager and BlockPool of vLLM 0.32.0; vectors in
// internal/testkit/testdata/vllm-scheduler, of one group of full attention or of a sliding
// window. No speculation. Where vLLM would use KV that is not there, it is not followed: a load
// of a hybrid model that fails in part begins anew, and a prompt that was loaded whole keeps what
// its last token looks at. Nor where vLLM stands still: a request whose load failed begins again although it does not fit beside the
// reservation that it left. One such case is as recorded: under Config.Priority a victim that
// gives way in the pass that scheduled it leaves blocks that can be found and were not computed.
package sched
