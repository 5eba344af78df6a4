// SPDX-License-Identifier: Apache-2.0

// Package costmodel says how long the steps and transfers of an engine take on GPUs: hardware
// profiles, the terms of their cost, and the arithmetic behind each.
//
// The time of a step is the sum of the host's time, the operations of its tokens, the reading of weights and KV, and the all-reduces of
// its ranks. They are added because compute and memory do not overlap. That explains published inter-token latencies, whose P99 is a
// fifth above the median; a maximum of both would not have such a slope.
package costmodel

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// Profile is an engine together with its hardware.
type Profile struct {
	Name  string `json:"name"`
	GPU   GPU    `json:"gpu"`
	Model Model  `json:"model"`
	TP    int    `json:"tensor_parallel_size"`

	BlockTokens int `json:"block_size"`
	TokenBudget int `json:"max_num_batched_tokens"`
	MaxSeqs     int `json:"max_num_seqs"`
	MaxModel    int `json:"max_model_len"`
	Blocks      int `json:"num_gpu_blocks,omitempty"` // 0: as many as the memory holds

	Constants Constants `json:"constants"`
	// Calibrated says, for each calibrated constant, from which figure it was derived.
	Calibrated map[string]string `json:"calibrated,omitempty"`
}

// ErrProfile means that a profile is not valid.
var ErrProfile = errors.New("costmodel: profile")

// Validate returns everything that is wrong with p.
func (p *Profile) Validate() error {
	var errs []error
	f := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf("%w %s: %s", ErrProfile, p.Name, fmt.Sprintf(format, args...)))
		}
	}
	positive := func(name string, v float64) {
		f(v > 0 && v <= 1e18, "%s %v is not between 0 and 1e18", name, v)
	}
	positive("memory bandwidth", p.GPU.Bandwidth)
	positive("operations per second", p.GPU.FLOPS)
	positive("memory", p.GPU.MemoryGiB)
	m := &p.Model
	for _, d := range []struct {
		name string
		n    int
	}{{"layers", m.Layers}, {"hidden", m.Hidden}, {"heads", m.Heads}, {"kv_heads", m.KVHeads}, {"head_dim", m.HeadDim}, {"vocabulary", m.Vocabulary}} {
		f(d.n >= 1 && d.n <= 1<<20, "the model's %s %d is outside 1 to 2^20", d.name, d.n)
	}
	positive("parameters", m.Parameters)
	positive("layer parameters", m.LayerParameters)
	positive("bytes of a parameter", m.LayerBytes)
	f(m.LayerParameters <= m.Parameters, "the layers have %v parameters, more than the %v of the model", m.LayerParameters, m.Parameters)
	f(p.TP >= 1 && p.TP <= 1024, "tensor parallel size %d is outside 1 to 1024", p.TP)
	f(p.BlockTokens >= 1 && p.BlockTokens <= 1<<16, "blocks of %d tokens; 1 to 2^16 are possible", p.BlockTokens)
	f(p.TokenBudget >= 1 && p.TokenBudget <= 1<<24, "token budget %d is outside 1 to 2^24", p.TokenBudget)
	f(p.MaxSeqs >= 1 && p.MaxSeqs <= 1<<20, "%d sequences; 1 to 2^20 are possible", p.MaxSeqs)
	f(p.MaxModel >= 2 && p.MaxModel <= 1<<24, "a longest sequence of %d tokens; 2 to 2^24 are possible", p.MaxModel)
	f(p.Blocks >= 0 && p.Blocks <= 1<<24, "%d blocks of KV; 0 to 2^24 are possible", p.Blocks)
	errs = append(errs, p.Constants.Validate())
	if err := errors.Join(errs...); err != nil {
		return err
	}
	f(p.KVBlocks() >= 2, "%.1f GiB on %d GPUs hold no KV beside %.1f GiB of weights", p.GPU.MemoryGiB*float64(p.TP), p.TP, m.WeightBytes()/(1<<30))
	return errors.Join(errs...)
}

// KVBlocks returns how many blocks fit into the KV cache.
func (p *Profile) KVBlocks() int {
	if p.Blocks > 0 {
		return p.Blocks
	}
	return int(min(max(p.kvBytes()/p.blockBytes(), 0), 1<<24))
}

func (p *Profile) blockBytes() float64 { return p.Model.KVBytes() * float64(p.BlockTokens) }

// kvBytes returns how many bytes of all ranks are left for KV.
func (p *Profile) kvBytes() float64 {
	each := p.GPU.MemoryGiB*p.Constants.MemoryUtilization - p.Constants.ActivationGiB
	return each*float64(p.TP)*(1<<30) - p.Model.WeightBytes()
}

// Work is what one step computes.
type Work struct {
	Tokens    int   // prompt tokens and decoded tokens
	Context   int64 // sum over these tokens of the number of tokens that each attends to
	KVTokens  int64 // sum over the sequences of the number of tokens whose KV is read
	Sequences int
	Sampled   int // sequences that get a token
}

// Add adds n tokens of a sequence to the step; `before` tokens of the sequence are computed already. samples means that the sequence
// gets a token.
func (w *Work) Add(before, n int, samples bool) {
	w.Tokens += n
	w.Context += int64(n)*int64(before) + int64(n)*int64(n+1)/2
	w.KVTokens += int64(before + n)
	w.Sequences++
	if samples {
		w.Sampled++
	}
}

// Cost is the time of a step, divided into its terms, in seconds.
type Cost struct {
	Host, Linear, Attention, Head, Weights, KV, AllReduce float64
}

// Total returns the time of the whole step.
func (c Cost) Total() time.Duration {
	return duration(c.Host + c.Linear + c.Attention + c.Head + c.Weights + c.KV + c.AllReduce)
}

func duration(seconds float64) time.Duration {
	ns := math.Round(seconds * 1e9)
	if !(ns < math.MaxInt64/4) {
		return math.MaxInt64 / 4
	}
	return time.Duration(ns)
}

// Cost returns the cost of a step; without tokens, it is zero.
func (p *Profile) Cost(w Work) Cost {
	if w.Tokens == 0 {
		return Cost{}
	}
	c, m, tp := &p.Constants, &p.Model, float64(p.TP)
	flops := p.GPU.FLOPS * tp * c.PrefillEfficiency
	bandwidth := p.GPU.Bandwidth * tp * c.BandwidthEfficiency
	cost := Cost{
		Host:      (c.HostStepMS + c.HostSequenceMS*float64(w.Sequences)) / 1e3,
		Linear:    m.LinearFLOPs() * float64(w.Tokens) / flops,
		Attention: m.AttentionFLOPs() * float64(w.Context) / flops,
		Head:      m.HeadFLOPs() * float64(w.Sampled) / flops,
		Weights:   m.StepBytes() / bandwidth,
		KV:        m.KVBytes() * float64(w.KVTokens) / bandwidth,
	}
	if p.TP > 1 {
		moved := 2 * (tp - 1) / tp * float64(w.Tokens) * float64(m.Hidden) * 2
		cost.AllReduce = float64(2*m.Layers) * (moved/(c.AllReduceGBps*1e9) + c.AllReduceUS/1e6)
	}
	return cost
}

// Step returns how long a step takes.
func (p *Profile) Step(w Work) time.Duration { return p.Cost(w).Total() }

// Transfer returns how long it takes to transfer the KV of `blocks` blocks between two engines, in `runs` runs of blocks that are
// contiguous on both sides. link is how long the network of both ends is occupied, wait is the time in addition. K and V of a layer are
// separate pieces.
func (p *Profile) Transfer(blocks, runs int) (link, wait time.Duration) {
	c := &p.Constants
	pieces := float64(runs * 2 * p.Model.Layers)
	return duration(pieces*c.DescriptorUS/1e6 + float64(blocks)*p.blockBytes()/(c.TransferGBps*1e9)), duration(c.TransferMS / 1e3)
}

// TransferBytes returns the number of bytes of the KV of that many blocks.
func (p *Profile) TransferBytes(blocks int) int64 { return int64(float64(blocks) * p.blockBytes()) }

// Push returns how long P waits after a step of that many tokens until the KV that it sends layer by layer is sent: the last layer's
// KV, or more if the network is slower than the step.
func (p *Profile) Push(tokens int, step time.Duration) time.Duration {
	c := &p.Constants
	all := duration(float64(tokens) * p.Model.KVBytes() / (c.TransferGBps * 1e9))
	return duration(c.TransferMS/1e3) + max(all/time.Duration(p.Model.Layers), all-step)
}

// Setup returns how much longer the first push between two engines takes.
func (p *Profile) Setup() time.Duration { return duration(p.Constants.SetupMS / 1e3) }

// Receive returns by how much a step of D that takes in a pushed prompt is longer.
func (p *Profile) Receive() time.Duration {
	return duration(float64(p.Model.Layers) * p.Constants.ReceiveLayerUS / 1e6)
}

// Pipe returns how long P waits while the KV of a prompt of that many tokens goes through the pipe of vLLM v0.
func (p *Profile) Pipe(tokens int) time.Duration {
	return duration(float64(tokens) * p.Model.KVBytes() / float64(p.TP) / (p.Constants.PipeMBps * 1e6))
}

// Host returns how long the engine's host handles a request with that many tokens before it can be scheduled.
func (p *Profile) Host(tokens int) time.Duration {
	return duration(p.Constants.HostFixedMS/1e3 + float64(tokens)*p.Constants.HostTokenUS/1e6)
}

// Hop returns how long a message between two processes takes.
func (p *Profile) Hop() time.Duration { return duration(p.Constants.HopMS / 1e3) }

// Spacing returns the time between two requests that a client sends together.
func (p *Profile) Spacing() time.Duration { return duration(p.Constants.SpacingMS / 1e3) }
