// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"encoding/binary"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/sim/kvmem"
	"github.com/kvasir-kv/kvasir/sim/sched"
)

// Record is the history of one request. Times are from the start of the run; 0 is not reached.
type Record struct {
	Input  int `json:"input"`
	Output int `json:"output"` // generated
	Cached int `json:"cached"` // prompt tokens that P did not compute

	Sent       time.Duration `json:"sent"`       // by the client
	Queued     time.Duration `json:"queued"`     // at P, or at the engine that does both
	Started    time.Duration `json:"started"`    // its first step there
	Prefilled  time.Duration `json:"prefilled"`  // end of the step with its last prompt token
	Dispatched time.Duration `json:"dispatched"` // at D
	Loading    time.Duration `json:"loading"`    // the transfer to D began
	Loaded     time.Duration `json:"loaded"`     // the transfer to D ended
	Decoding   time.Duration `json:"decoding"`   // its first step at D
	First      time.Duration `json:"first"`      // token at the client
	Last       time.Duration `json:"last"`       // token at the client

	Gaps []time.Duration `json:"-"` // between its tokens at the client

	Prefill int    `json:"prefill"` // number of P; -1: none
	Decode  int    `json:"decode"`  // number of D, or of the engine that does both
	Error   string `json:"error,omitempty"`
}

// request is a request in the deployment.
type request struct {
	Record
	number int
	from   *workload.Request
	limit  int // tokens to generate

	p, d     *engine
	atP, atD sched.Request
	pulled   bool // its KV was asked for

	// With bytes, while the request is open:
	chain  kvmem.Chain // what the KV of its tokens follows from
	names  []kv.Hash   // of the prompt's full blocks, in the store
	pushed []byte      // KV of the prompt that D has not received

	alone sequence // in an engine that prefills alone
}

// hash names block i: a block of the prompt by the workload's name of it and its place there,
// any other by the request.
func (q *request) hash(blockTokens, i int) (h sched.Hash) {
	size := q.from.BlockTokens
	if (i+1)*blockTokens <= q.Input && size >= blockTokens && size%blockTokens == 0 {
		at := i * blockTokens
		if j := at / size; j < len(q.from.Blocks) {
			if q.chain != nil { // what the tokens make, whatever the workload calls them
				binary.LittleEndian.PutUint64(h[:8], q.chain[at+blockTokens-1])
				return h
			}
			binary.LittleEndian.PutUint64(h[:8], uint64(q.from.Blocks[j]))
			binary.LittleEndian.PutUint32(h[8:12], uint32(at%size/blockTokens))
			return h
		}
	}
	binary.LittleEndian.PutUint64(h[:8], uint64(q.number))
	binary.LittleEndian.PutUint32(h[8:12], uint32(i))
	h[12] = 1
	return h
}
