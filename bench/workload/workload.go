// SPDX-License-Identifier: Apache-2.0

// Package workload has requests to be played: conversations, random prompts, and traces of real services in the formats in which people
// publish them.
//
// A workload depends only on its seed, so that two tools, or two runs, play the same requests. A request names the blocks of its
// prompt, and makes the tokens only when asked: an hour of production with 145 million tokens fits into memory.
package workload

import (
	"fmt"
	"iter"
	"math"
	"math/rand/v2"
	"slices"
	"time"
)

// Vocabulary is the number of distinct generated tokens, 0 to Vocabulary-1: a common size of vocabularies.
const Vocabulary = 151936

// Request is one request of a workload.
type Request struct {
	Arrival time.Duration // since the start
	Input   int           // prompt tokens
	Output  int           // tokens to generate; 0: unknown

	// Blocks are the names of the prompt's blocks of BlockTokens tokens: equal names mean equal tokens after equal prefixes. The last
	// block may be partial.
	Blocks      []int64
	BlockTokens int

	// Conversation is the number of the chat to which the request belongs, and Turn its place there, both from 0. A single request has
	// a conversation of its own.
	Conversation, Turn int
	// Pause is the time between the end of the turn before this one and this turn, for players that know when a turn ends.
	Pause time.Duration

	// Text is the prompt if the source has only text and no tokens. Blocks is then empty, and Input is an estimate.
	Text string
}

// Tokens makes the tokens of the prompt.
func (r *Request) Tokens() []uint32 {
	out := make([]uint32, 0, r.Input)
	for _, id := range r.Blocks {
		rnd := rand.New(rand.NewPCG(uint64(id), 2))
		for range min(r.BlockTokens, r.Input-len(out)) {
			out = append(out, rnd.Uint32N(Vocabulary))
		}
	}
	return out
}

// Random makes n requests with unrelated prompts. Their lengths are distributed evenly around input and output tokens, by the fraction
// spread (0 to 1) up and down.
func Random(n, input, output int, spread float64, seed uint64) ([]Request, error) {
	if n < 1 || input < 1 || output < 0 || spread < 0 || spread > 1 || input > maxInputTokens || n > maxRequests {
		return nil, fmt.Errorf("workload: %d requests of %d prompt tokens and %d to generate, spread %v: 1 to %d requests, 1 to %d prompt tokens, 0 or more, 0 to 1 are possible",
			n, input, output, spread, maxRequests, maxInputTokens)
	}
	rnd := rand.New(rand.NewPCG(seed, 3))
	around := func(mean int) int {
		d := int(float64(mean) * spread)
		return max(1, mean-d+rnd.IntN(2*d+1))
	}
	out := make([]Request, n)
	for i := range out {
		r := &out[i]
		r.Input, r.Conversation, r.BlockTokens = around(input), i, maxInputTokens
		if output > 0 {
			r.Output = around(output)
		}
		r.Blocks = []int64{int64(rnd.Uint64() >> 1)}
	}
	return out, nil
}

// ChatOptions describes conversations. A zero field means its default.
type ChatOptions struct {
	Seed    uint64
	Open    int // conversations in progress at a time; default 12
	Systems int // number of system prompts with which conversations begin; default 3
	Turns   int // largest number of turns of a conversation; default 8
}

// chatBlock is the number of tokens in a block of the conversations that Chats makes.
const chatBlock = 512

// Chats makes n requests of conversations. Each conversation begins with one of a few system prompts, and each turn sends the
// conversation so far and a new part. The turns of conversations in progress alternate.
func Chats(n int, o ChatOptions) []Request {
	open, systems, turns := o.Open, o.Systems, o.Turns
	if open < 1 {
		open = 12
	}
	if systems < 1 {
		systems = 3
	}
	if turns < 1 {
		turns = 8
	}
	rnd := rand.New(rand.NewPCG(o.Seed, 1))
	type chat struct {
		blocks   []int64
		id, turn int
	}
	chats := make([]chat, open)
	next, id := int64(0), 0
	out := make([]Request, 0, max(n, 0))
	for len(out) < n {
		c := &chats[rnd.IntN(open)]
		if c.turn == 0 || c.turn >= turns || len(c.blocks) > 16 {
			system := int64(rnd.IntN(systems))
			*c = chat{blocks: []int64{system, system + 1000003, system + 2000003}, id: id}
			id++
		}
		for range 1 + rnd.IntN(3) {
			next++
			c.blocks = append(c.blocks, 5000000+next)
		}
		out = append(out, Request{
			Arrival: time.Duration(len(out)) * time.Millisecond, Input: len(c.blocks)*chatBlock - rnd.IntN(chatBlock/2),
			Output: 16 + rnd.IntN(112), Blocks: slices.Clone(c.blocks), BlockTokens: chatBlock, Conversation: c.id, Turn: c.turn,
		})
		c.turn++
	}
	return out
}

// Arrive sets the arrivals of requests to a random process of rate requests per second. With burstiness 1 it is a Poisson process;
// below 1 requests come in bursts, above 1 more evenly (the gaps follow a gamma distribution, as in vllm bench serve). An infinite rate
// sends all at the start.
func Arrive(requests []Request, rate, burstiness float64, seed uint64) error {
	at, err := newArriver(rate, burstiness, seed)
	if err != nil {
		return err
	}
	for i := range requests {
		if requests[i].Arrival, err = at.next(); err != nil {
			return err
		}
	}
	return nil
}

// Arriving does what Arrive does, for requests that come one after another. The sequence ends with its first error.
func Arriving(requests iter.Seq2[Request, error], rate, burstiness float64, seed uint64) iter.Seq2[Request, error] {
	return func(yield func(Request, error) bool) {
		at, err := newArriver(rate, burstiness, seed)
		if err != nil {
			yield(Request{}, err)
			return
		}
		for q, err := range requests {
			if err == nil {
				q.Arrival, err = at.next()
			}
			if !yield(q, err) || err != nil {
				return
			}
		}
	}
}

// arriver computes the arrivals of requests.
type arriver struct {
	rate, burstiness float64
	rnd              *rand.Rand
	at               float64 // arrival of the last request, in seconds
	n                int
}

func newArriver(rate, burstiness float64, seed uint64) (*arriver, error) {
	if !(rate > 0) || !(burstiness > 0) {
		return nil, fmt.Errorf("workload: %v requests per second, burstiness %v: both must be above 0", rate, burstiness)
	}
	return &arriver{rate: rate, burstiness: burstiness, rnd: rand.New(rand.NewPCG(seed, 4))}, nil
}

func (a *arriver) next() (time.Duration, error) {
	if math.IsInf(a.rate, 1) {
		return 0, nil
	}
	a.n++
	a.at += gamma(a.rnd, a.burstiness) / (a.burstiness * a.rate)
	if !(a.at < float64(math.MaxInt64)/1e9) {
		return 0, fmt.Errorf("workload: request %d would arrive after %.3g s, which is more than 292 years", a.n, a.at)
	}
	return time.Duration(a.at * float64(time.Second)), nil
}

// gamma draws a number from the gamma distribution with that shape, which must be above 0, and scale 1. Source: Marsaglia and Tsang, A
// Simple Method for Generating Gamma Variables, 2000.
func gamma(rnd *rand.Rand, shape float64) float64 {
	if shape < 1 {
		return gamma(rnd, shape+1) * math.Pow(1-rnd.Float64(), 1/shape)
	}
	d := shape - 1.0/3
	c := 1 / math.Sqrt(9*d)
	for {
		x := rnd.NormFloat64()
		v := 1 + c*x
		if v <= 0 {
			continue
		}
		v = v * v * v
		if math.Log(1-rnd.Float64()) < x*x/2+d-d*v+d*math.Log(v) {
			return d * v
		}
	}
}
