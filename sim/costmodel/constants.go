// SPDX-License-Identifier: Apache-2.0

package costmodel

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
)

// Constants are the quantities that no data sheet names. Each can be changed by its name; Terms describes each.
type Constants struct {
	PrefillEfficiency   float64 `json:"prefill_efficiency"`
	BandwidthEfficiency float64 `json:"bandwidth_efficiency"`

	HostStepMS     float64 `json:"host_step_ms"`
	HostSequenceMS float64 `json:"host_sequence_ms"`
	HostFixedMS    float64 `json:"host_fixed_ms"`
	HostTokenUS    float64 `json:"host_token_us"`
	HopMS          float64 `json:"hop_ms"`
	SpacingMS      float64 `json:"spacing_ms"`

	AllReduceGBps float64 `json:"all_reduce_gbps"`
	AllReduceUS   float64 `json:"all_reduce_us"`

	MemoryUtilization float64 `json:"memory_utilization"`
	ActivationGiB     float64 `json:"activation_gib"`

	TransferMS     float64 `json:"transfer_ms"`
	TransferGBps   float64 `json:"transfer_gbps"`
	DescriptorUS   float64 `json:"descriptor_us"`
	SetupMS        float64 `json:"setup_ms"`
	ReceiveLayerUS float64 `json:"receive_layer_us"`
	PipeMBps       float64 `json:"pipe_mbps"`
}

// Term describes one constant: its meaning, and the range in which it can reasonably be.
type Term struct {
	Name, Unit string
	Low, High  float64 // range over which sim runs vary an assumed value; 0, 0: none
	What       string  // meaning, and for an assumed constant the reason for its value

	least, most float64 // limits of a value that can be set
	at          func(*Constants) *float64
}

// most is the largest value that most constants can be set to.
const most = 1e9

// Terms describes all constants, in the order of the fields of Constants.
var Terms = []Term{
	{"prefill_efficiency", "", 0, 0, "share of the peak operations that matrix products and attention reach", 0.001, 1, func(c *Constants) *float64 { return &c.PrefillEfficiency }},
	{"bandwidth_efficiency", "", 0, 0, "share of the memory's bandwidth that reading weights and KV reaches", 0.001, 1, func(c *Constants) *float64 { return &c.BandwidthEfficiency }},
	{"host_step_ms", "ms", 0.5, 4.5, "of a step: schedule, prepare inputs, sample, detokenize. Of vLLM v1 without async scheduling 0.5 to 5 are published, most near 2; at 5 the A10 would have to read faster than its peak", 0, most, func(c *Constants) *float64 { return &c.HostStepMS }},
	{"host_sequence_ms", "ms", 0, 0.05, "of a sequence in a step: its row of inputs and of outputs", 0, most, func(c *Constants) *float64 { return &c.HostSequenceMS }},
	{"host_fixed_ms", "ms", 0, 20, "of a request at its engine before it can be scheduled", 0, most, func(c *Constants) *float64 { return &c.HostFixedMS }},
	{"host_token_us", "µs", 0.5, 5, "of a prompt token at each engine that gets the request: JSON, tokenizer, block hashes. Fast tokenizers make about a million tokens a second", 0, most, func(c *Constants) *float64 { return &c.HostTokenUS }},
	{"hop_ms", "ms", 1, 10, "of each way through the proxy: client to P, P to D, D to client", 0, most, func(c *Constants) *float64 { return &c.HopMS }},
	{"spacing_ms", "ms", 1, 10, "between requests that are sent at once: one Python client, one Python proxy", 0, most, func(c *Constants) *float64 { return &c.SpacingMS }},
	{"all_reduce_gbps", "GB/s", 10, 25, "bus bandwidth of an all-reduce. PCIe 4.0 x16 has 31.5 in each direction; through the host about half is left", 0.001, most, func(c *Constants) *float64 { return &c.AllReduceGBps }},
	{"all_reduce_us", "µs", 10, 50, "latency of an all-reduce", 0, most, func(c *Constants) *float64 { return &c.AllReduceUS }},
	{"memory_utilization", "", 0.8, 0.95, "of the GPU's memory, that vLLM uses", 0.01, 1, func(c *Constants) *float64 { return &c.MemoryUtilization }},
	{"activation_gib", "GiB", 0.5, 3, "memory of activations and graphs on each GPU", 0, most, func(c *Constants) *float64 { return &c.ActivationGiB }},
	{"transfer_ms", "ms", 0.2, 3, "of a transfer, besides its bytes: question, answer, completion", 0, most, func(c *Constants) *float64 { return &c.TransferMS }},
	{"transfer_gbps", "GB/s", 2, 25, "that the KV moves with between two engines", 0.001, most, func(c *Constants) *float64 { return &c.TransferGBps }},
	{"descriptor_us", "µs", 0.2, 3, "of each contiguous piece of a transfer", 0, most, func(c *Constants) *float64 { return &c.DescriptorUS }},
	{"setup_ms", "ms", 0, 0, "of the first transfer between two engines, which makes P wait: a communicator of NCCL", 0, most, func(c *Constants) *float64 { return &c.SetupMS }},
	{"receive_layer_us", "µs", 0, 0, "of a received layer of a request, in D's step", 0, most, func(c *Constants) *float64 { return &c.ReceiveLayerUS }},
	{"pipe_mbps", "MB/s", 0, 0, "of each rank's KV through the pipe of vLLM v0, while P waits", 0.001, most, func(c *Constants) *float64 { return &c.PipeMBps }},
}

// ErrConstant means that a constant is unknown, or that a value is not possible for it.
var ErrConstant = errors.New("costmodel: constant")

func term(name string) (*Term, error) {
	i := slices.IndexFunc(Terms, func(t Term) bool { return t.Name == name })
	if i < 0 {
		var names []string
		for _, t := range Terms {
			names = append(names, t.Name)
		}
		return nil, fmt.Errorf("%w: %.64q is none of %s", ErrConstant, name, strings.Join(names, ", "))
	}
	return &Terms[i], nil
}

// Set changes the constant with that name.
func (c *Constants) Set(name string, value float64) error {
	t, err := term(name)
	if err != nil {
		return err
	}
	if err := t.check(value); err != nil {
		return err
	}
	*t.at(c) = value
	return nil
}

// Get returns the constant with that name.
func (c *Constants) Get(name string) (float64, error) {
	t, err := term(name)
	if err != nil {
		return 0, err
	}
	return *t.at(c), nil
}

func (t *Term) check(value float64) error {
	if math.IsNaN(value) || value < t.least || value > t.most {
		return fmt.Errorf("%w: %s %v is outside %v to %v", ErrConstant, t.Name, value, t.least, t.most)
	}
	return nil
}

// Validate returns everything that is wrong with c.
func (c *Constants) Validate() error {
	var errs []error
	for _, t := range Terms {
		errs = append(errs, t.check(*t.at(c)))
	}
	return errors.Join(errs...)
}
