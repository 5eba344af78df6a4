// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
)

// tracePath is the sample trace, in Mooncake's format.
const tracePath = "docs/examples/trace.jsonl"

const traceBlock = 512 // tokens per hash id

// trace returns requests of invented conversations. Two thirds of the requests are turns of 60 conversations that begin with one of
// three system prompts; the prompt of a turn contains the prompt and the answer of the turn before it. The other requests have prompts
// of their own. Each call returns the same trace.
func trace() []byte {
	r := rand.New(rand.NewPCG(1, 2))
	type conversation struct {
		blocks []int
		tokens int
	}
	next := 0
	more := func(c *conversation, tokens int) {
		for c.tokens += tokens; len(c.blocks) < c.tokens/traceBlock; next++ {
			c.blocks = append(c.blocks, next)
		}
	}
	systems := make([]conversation, 3)
	for i := range systems {
		more(&systems[i], 1024*(i+1))
	}
	conversations := make([]conversation, 60)
	for i := range conversations {
		s := systems[i%len(systems)]
		conversations[i] = conversation{append([]int(nil), s.blocks...), s.tokens}
	}
	var b bytes.Buffer
	clock := 0
	for range 1240 {
		clock += r.IntN(1500)
		c, output := &conversation{}, 30+r.IntN(400)
		if r.IntN(3) > 0 {
			c = &conversations[r.IntN(len(conversations))]
		}
		if c.tokens > 24_000 { // the user begins again
			s := systems[r.IntN(len(systems))]
			*c = conversation{append([]int(nil), s.blocks...), s.tokens}
		}
		more(c, 50+r.IntN(1600))
		ids := c.blocks
		if c.tokens%traceBlock != 0 { // the last block is not full, so no other request shares it
			ids = append(ids[:len(ids):len(ids)], next)
			next++
		}
		fmt.Fprintf(&b, `{"timestamp": %d, "input_length": %d, "output_length": %d, "hash_ids": [%s]}`+"\n",
			clock, c.tokens, output, strings.Join(strings.Fields(strings.Trim(fmt.Sprint(ids), "[]")), ", "))
		more(c, output)
	}
	return b.Bytes()
}
