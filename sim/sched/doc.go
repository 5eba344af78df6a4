// SPDX-License-Identifier: Apache-2.0

// Package sched makes the same decisions as vLLM's scheduler: which requests run in a step and with how many tokens, which blocks of
// the paged KV cache they get, which request is preempted, what hits the prefix cache, and what waits for remote KV.
//
// It is a state machine without a clock, goroutines or tokens: a request gives the hash of each of its blocks, and the engine reports
// the outcome of each step. Only one goroutine may call it.
//
// An engine uses it like this; under Config.Async two steps may be in flight:
//
//	step := s.Schedule()              // rows to compute, blocks to use
//	result := s.Process(sched.Output{}) // the oldest step is done
//
// Source: Scheduler, AsyncScheduler, KVCacheManager and BlockPool of vLLM 0.32.0; vectors in
// internal/testkit/testdata/vllm-scheduler, of one group of full attention or of a sliding
// window. No speculation. The package departs from vLLM where vLLM would use KV that is not there:
// a load of a hybrid model that fails in part begins anew, and a prompt that was loaded whole keeps
// the blocks that its last token looks at. It departs where vLLM stands still: a request whose load
// failed begins again although it does not fit beside the reservation that it left. It follows vLLM
// in one case of KV that is not there: under Config.Priority, a victim that is preempted in the pass
// that scheduled it leaves blocks that can be found but were not computed.
package sched
