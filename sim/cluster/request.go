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

// Record is the history of one request. Times are since the start of the run; 0 means that the request did not get so far.
type Record struct {
	Input  int `json:"input"`
	Output int `json:"output"` // tokens generated
	Cached int `json:"cached"` // prompt tokens that P did not compute

	Sent       time.Duration `json:"sent"`       // when the client sent it
	Queued     time.Duration `json:"queued"`     // when it was queued at P, or at the engine that does both
	Started    time.Duration `json:"started"`    // when its first step there began
	Prefilled  time.Duration `json:"prefilled"`  // end of the step that computed its last prompt token
	Dispatched time.Duration `json:"dispatched"` // when it reached D
	Loading    time.Duration `json:"loading"`    // when the transfer to D began
	Loaded     time.Duration `json:"loaded"`     // when the transfer to D ended
	Decoding   time.Duration `json:"decoding"`   // when its first step at D began
	First      time.Duration `json:"first"`      // when the client got the first token
	Last       time.Duration `json:"last"`       // when the client got the last token

	Gaps []time.Duration `json:"-"` // time between tokens at the client

	Prefill int    `json:"prefill"` // index of P; -1: none
	Decode  int    `json:"decode"`  // index of D, or of the engine that does both
	Error   string `json:"error,omitempty"`
}

// request is a request in the deployment.
type request struct {
	Record
	number int
	from   *workload.Request
	limit  int // most tokens to generate

	p, d     *engine
	atP, atD sched.Request
	pulled   bool // its KV was requested

	// Used in runs with bytes, while the request is open:
	chain  kvmem.Chain // determines the KV of its tokens
	names  []kv.Hash   // hashes of the prompt's full blocks, for the store
	pushed []byte      // KV of the prompt that D has not taken in yet

	alone sequence // its state in an engine that prefills alone
}

// hash returns the hash of block i. For a block of the prompt it follows from the workload's name of the block and the place there; for
// any other block it follows from the request.
func (q *request) hash(blockTokens, i int) (h sched.Hash) {
	size := q.from.BlockTokens
	if (i+1)*blockTokens <= q.Input && size >= blockTokens && size%blockTokens == 0 {
		at := i * blockTokens
		if j := at / size; j < len(q.from.Blocks) {
			if q.chain != nil { // then the hash follows from the tokens, whatever the workload calls the block
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
