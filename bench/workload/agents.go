// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"bufio"
	"cmp"
	"container/heap"
	"fmt"
	"iter"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"time"
)

// Agentic is the name for which Load makes requests of coding agents instead of reading a file.
const Agentic = "agentic"

// agenticRequests is how many such requests Load makes by default.
const agenticRequests = 2212

// Load reads the trace in a file and returns its requests in the order of their timestamps. For the name Agentic it makes the requests
// of Agents instead. The error is one of ReadTrace, or of the file, with the file's name.
func Load(name string, o TraceOptions) ([]Request, error) {
	if err := o.defaults(); err != nil {
		return nil, err
	}
	if name == Agentic {
		o.Max = cmp.Or(o.Max, agenticRequests)
		if err := checkAgentic(&o); err != nil {
			return nil, err
		}
		return Agents(o.Max, AgentOptions{Block: o.BlockTokens}), nil
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	o.TokenTime = cmp.Or(o.TokenTime, tokenTime)
	out, err := ReadTrace(bufio.NewReaderSize(f, 1<<20), o)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	slices.SortStableFunc(out, func(a, b Request) int { return cmp.Compare(a.Arrival, b.Arrival) })
	return out, nil
}

// checkAgentic returns an error if the options ask for requests of Agents that Load does not make.
func checkAgentic(o *TraceOptions) error {
	if o.Max > MaxAgentic || o.BlockTokens < minAgentBlock {
		return fmt.Errorf("%w: %s: %d requests, blocks of %d tokens: %d requests at most and blocks of %d tokens at least are made", ErrTrace, Agentic, o.Max, o.BlockTokens, MaxAgentic, minAgentBlock)
	}
	return nil
}

// MaxAgentic is the largest number of requests of Agents that Load makes. Asked for more, it returns ErrTrace.
const MaxAgentic = 1 << 19

// minAgentBlock is the smallest number of tokens in a block for Load: with smaller blocks, prompts would have thousands of them. Load
// returns ErrTrace for those.
const minAgentBlock = 16

// AgentOptions describes sessions of coding agents. A zero field means its default.
type AgentOptions struct {
	Seed      uint64
	Open      int           // sessions at a time; default 14
	Steps     int           // most steps of a session; default 158; the least is 4
	MaxTokens int           // most tokens of a prompt; default 34600
	Block     int           // tokens of a block; default 256
	Pause     time.Duration // median of the time that a tool runs; default 4 s
	Spread    float64       // spread of the pauses: standard deviation of their logarithm; default 0.8
	SubAgents float64       // share of the steps that start a sub-agent; default 0.02; below 0: none
}

func (o *AgentOptions) defaults() {
	set := func(v *int, to int) {
		if *v < 1 {
			*v = to
		}
	}
	set(&o.Open, 14)
	set(&o.Steps, 158)
	set(&o.MaxTokens, 34600)
	set(&o.Block, 256)
	if o.Pause <= 0 {
		o.Pause = 4 * time.Second
	}
	if !(o.Spread > 0) {
		o.Spread = 0.8
	}
	if o.SubAgents == 0 {
		o.SubAgents = 0.02
	}
}

// agentSystem is how many tokens at the start of its first prompt a session shares with all others: system prompt and tools.
const agentSystem = 1800

// agentSession is the state of a session between two steps.
type agentSession struct {
	at     time.Duration // when its next step begins
	id     int
	turn   int
	left   int // steps left
	tokens int
	grow   float64 // mean number of tokens that a step adds
	blocks []int64
	parent *agentSession // session that waits until this sub-agent ends
}

// Agents makes n requests of coding agents, in the order of their arrivals. A session begins with the system prompt of all sessions and
// a task. Each step sends the session so far together with the tool's answer. While the tool runs, the session pauses: mostly for
// seconds, sometimes for minutes, when a person reads or a build runs. Some steps start a sub-agent, with the same system prompt and a
// task of its own; the session pauses until the sub-agent ends. A session that ends is replaced by a new one.
func Agents(n int, o AgentOptions) []Request {
	out := make([]Request, 0, max(n, 0))
	for q := range AgentRequests(n, o) {
		out = append(out, q)
	}
	return out
}

// AgentRequests returns the requests of Agents as a sequence. Each time that the sequence is read, the same requests are made again.
func AgentRequests(n int, o AgentOptions) iter.Seq2[Request, error] {
	o.defaults()
	return func(yield func(Request, error) bool) {
		g := generator{o: o, rnd: rand.New(rand.NewPCG(o.Seed, 6)), next: 1 << 20}
		for range o.Open {
			heap.Push(&g.sessions, g.begin(time.Duration(g.rnd.Float64()*float64(10*o.Pause)), nil))
		}
		for range n {
			s := heap.Pop(&g.sessions).(*agentSession)
			output := 40 + g.rnd.IntN(300)
			if !yield(Request{
				Arrival: s.at, Input: s.tokens, Output: output, Blocks: slices.Clone(s.blocks), BlockTokens: o.Block, Conversation: s.id, Turn: s.turn,
			}, nil) {
				return
			}
			g.after(s, output)
		}
	}
}

// generator makes the requests of agents.
type generator struct {
	o        AgentOptions
	rnd      *rand.Rand
	next     int64 // name for the next new block
	ids      int
	sessions agentQueue
}

// begin creates a session whose first step is at the time `at`. parent is the session that waits until this one, a sub-agent, ends; nil:
// none.
func (g *generator) begin(at time.Duration, parent *agentSession) *agentSession {
	s := &agentSession{at: at, id: g.ids, left: 4 + int(float64(g.o.Steps-3)*g.rnd.Float64()), parent: parent}
	if parent != nil {
		s.left = 2 + g.rnd.IntN(6)
	}
	g.ids++
	s.left = min(s.left, g.o.Steps)
	for i := range int64(min(agentSystem, g.o.MaxTokens-1) / g.o.Block) {
		s.blocks = append(s.blocks, i)
	}
	s.tokens = len(s.blocks) * g.o.Block
	final := float64(g.o.MaxTokens) * (0.4 + 0.6*g.rnd.Float64())
	s.grow = max(1, (final-float64(s.tokens))/float64(s.left+3))
	g.add(s, int(3*s.grow)) // tokens of the task
	return s
}

// add appends tokens to the prompt of a session, as new blocks after its full ones.
func (g *generator) add(s *agentSession, tokens int) {
	s.blocks = s.blocks[:s.tokens/g.o.Block]
	s.tokens = min(s.tokens+max(tokens, 1), g.o.MaxTokens)
	for len(s.blocks) < (s.tokens+g.o.Block-1)/g.o.Block {
		s.blocks = append(s.blocks, g.next)
		g.next++
	}
}

// after plans the next step of a session.
func (g *generator) after(s *agentSession, output int) {
	pause := time.Duration(float64(g.o.Pause) * math.Exp(g.o.Spread*g.rnd.NormFloat64()))
	if g.o.Spread > 0.2 && g.rnd.IntN(25) == 0 {
		pause *= 20
	}
	at := s.at + pause + time.Duration(output)*20*time.Millisecond
	s.left--
	s.turn++
	switch {
	case s.left <= 0 && s.parent != nil:
		s.parent.at = max(at, s.parent.at)
		heap.Push(&g.sessions, s.parent)
	case s.left <= 0 || s.tokens >= g.o.MaxTokens:
		next := g.begin(at, s.parent)
		if s.parent != nil {
			s.parent.at, next = at, s.parent
		}
		heap.Push(&g.sessions, next)
	default:
		g.add(s, int(s.grow*(0.4+1.2*g.rnd.Float64())))
		if s.at = at; s.parent == nil && g.rnd.Float64() < g.o.SubAgents {
			heap.Push(&g.sessions, g.begin(at, s))
			return
		}
		heap.Push(&g.sessions, s)
	}
}

// agentQueue is a heap of sessions, by the time of their next step.
type agentQueue []*agentSession

func (q agentQueue) Len() int { return len(q) }

func (q agentQueue) Less(a, b int) bool {
	return q[a].at < q[b].at || q[a].at == q[b].at && q[a].id < q[b].id
}

func (q agentQueue) Swap(a, b int) { q[a], q[b] = q[b], q[a] }

func (q *agentQueue) Push(x any) { *q = append(*q, x.(*agentSession)) }

func (q *agentQueue) Pop() any {
	last := len(*q) - 1
	s := (*q)[last]
	*q = (*q)[:last]
	return s
}
