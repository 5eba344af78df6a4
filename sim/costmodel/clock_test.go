// SPDX-License-Identifier: Apache-2.0

package costmodel_test

import (
	"bytes"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/sim/costmodel"
)

func profile(t *testing.T, name string) *costmodel.Profile {
	t.Helper()
	p, err := costmodel.Get(name)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// The quantities that follow from published dimensions, compared with figures that were calculated separately.
func TestArithmeticOfModels(t *testing.T) {
	f := func(name string, weights, step, kv, linear, attention, head float64) {
		t.Helper()
		m := profile(t, name).Model
		near := func(what string, got, want float64) {
			t.Helper()
			if math.Abs(got/want-1) > 0.005 {
				t.Errorf("%s: %s %v, want %v", name, what, got, want)
			}
		}
		near("weights", m.WeightBytes(), weights)
		near("weights of a step", m.StepBytes(), step)
		near("KV", m.KVBytes(), kv)
		near("linear", m.LinearFLOPs(), linear)
		near("attention", m.AttentionFLOPs(), attention)
		near("head", m.HeadFLOPs(), head)
	}
	f(costmodel.A10Qwen, 15.23e9, 14.14e9, 57344, 13.05e9, 401408, 1.09e9)
	f(costmodel.A10QwenInt4, 5.54e9, 4.45e9, 57344, 13.05e9, 401408, 1.09e9)
	f(costmodel.H100Llama, 16.06e9, 15.01e9, 128<<10, 13.96e9, 524288, 1.05e9)
	f(costmodel.H800Qwen3, 16.38e9, 15.14e9, 144<<10, 13.89e9, 589824, 1.245e9)
	f(costmodel.H100Large, 141.1e9, 139.0e9, 320<<10, 136.9e9, 2621440, 2.1e9)
}

func TestCapacity(t *testing.T) {
	if n := profile(t, costmodel.A10Qwen).KVBlocks(); n < 5300 || n > 5500 {
		t.Errorf("%d blocks on an A10 with 7B, want about 5,400", n)
	}
	p := profile(t, costmodel.A10Qwen)
	p.Blocks = 77
	if p.KVBlocks() != 77 {
		t.Errorf("%d blocks, 77 are set", p.KVBlocks())
	}
}

// Each term of a step is there, by hand, and they are added.
func TestStep(t *testing.T) {
	p := profile(t, costmodel.A10Qwen)
	p.TP = 2
	c := &p.Constants
	c.PrefillEfficiency, c.BandwidthEfficiency, c.HostStepMS, c.HostSequenceMS, c.AllReduceGBps, c.AllReduceUS = 0.5, 0.8, 3, 0.1, 10, 20
	var w costmodel.Work
	w.Add(100, 50, true) // a chunk behind 100 tokens
	w.Add(999, 1, true)  // a decoded token
	flops, bandwidth := 125e12*2*0.5, 600e9*2*0.8
	context := 50*100 + 50*51/2 + 999 + 1
	want := 0.003 + 2*0.0001 + 13.051243520e9*51/flops + 401408*float64(context)/flops + 2*2*152064*3584/flops +
		(6525621760*2+152064*3584*2)/bandwidth + 57344*(150+1000)/bandwidth + 56*(2*0.5*51*3584*2/10e9+20e-6)
	if got := p.Step(w).Seconds(); math.Abs(got/want-1) > 1e-6 {
		t.Errorf("a step of %v s, want %v", got, want)
	}
	if p.Step(costmodel.Work{}) != 0 {
		t.Error("a step without tokens takes time")
	}
}

func TestTransfers(t *testing.T) {
	p := profile(t, costmodel.A10Qwen)
	p.Constants.TransferMS, p.Constants.TransferGBps, p.Constants.DescriptorUS = 2, 1, 10
	link, wait := p.Transfer(3, 2)
	if want := 2*56*10*time.Microsecond + 3*16*57344*time.Nanosecond; link != want || wait != 2*time.Millisecond {
		t.Errorf("a transfer takes %v and %v, want %v and 2ms", link, wait, want)
	}
	if p.TransferBytes(3) != 3*16*57344 {
		t.Errorf("%d bytes", p.TransferBytes(3))
	}
	// The network needs 57.3 ms for 1,000 tokens. Behind a long step only the last layer's transfer is visible.
	if got, want := p.Push(1000, time.Second), 2*time.Millisecond+57344*time.Microsecond/28; got != want {
		t.Errorf("after a long step P waits %v, want %v", got, want)
	}
	if got, want := p.Push(1000, 10*time.Millisecond), 49344*time.Microsecond; got != want {
		t.Errorf("after a short step P waits %v, want %v", got, want)
	}
	p.TP, p.Constants.PipeMBps = 2, 100
	if got, want := p.Pipe(1000), 286720*time.Microsecond; got != want {
		t.Errorf("the pipe takes %v, want %v", got, want)
	}
}

func TestImpossibleProfiles(t *testing.T) {
	f := func(want string, change func(*costmodel.Profile)) {
		t.Helper()
		p := profile(t, costmodel.A10Qwen)
		change(p)
		err := p.Validate()
		if err == nil || !strings.Contains(err.Error(), want) || !errors.Is(err, costmodel.ErrProfile) && !errors.Is(err, costmodel.ErrConstant) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	f("hold no KV", func(p *costmodel.Profile) { p.GPU.MemoryGiB = 12 })
	f("hold no KV", func(p *costmodel.Profile) { p.Constants.ActivationGiB = 100 })
	f("bandwidth", func(p *costmodel.Profile) { p.GPU.Bandwidth = 0 })
	f("operations", func(p *costmodel.Profile) { p.GPU.FLOPS = math.Inf(1) })
	f("parallel", func(p *costmodel.Profile) { p.TP = 0 })
	f("layers -1", func(p *costmodel.Profile) { p.Model.Layers = -1 })
	f("budget", func(p *costmodel.Profile) { p.TokenBudget = 0 })
	f("prefill_efficiency", func(p *costmodel.Profile) { p.Constants.PrefillEfficiency = 1.1 })
	f("bandwidth_efficiency", func(p *costmodel.Profile) { p.Constants.BandwidthEfficiency = 0 })
	f("host_step_ms", func(p *costmodel.Profile) { p.Constants.HostStepMS = math.NaN() })
	f("transfer_gbps", func(p *costmodel.Profile) { p.Constants.TransferGBps = 0 })
	if _, err := costmodel.Get("b200"); !errors.Is(err, costmodel.ErrProfile) || !strings.Contains(err.Error(), costmodel.A10Qwen) {
		t.Errorf("%v does not name the profiles", err)
	}
}

func TestSet(t *testing.T) {
	p := profile(t, costmodel.H100Llama)
	for _, term := range costmodel.Terms {
		if err := p.Constants.Set(term.Name, 0.5); err != nil {
			t.Error(err)
		}
		if v, err := p.Constants.Get(term.Name); v != 0.5 || err != nil {
			t.Errorf("%s is %v, %v", term.Name, v, err)
		}
	}
	if err := p.Constants.Set("speed", 1); !errors.Is(err, costmodel.ErrConstant) || !strings.Contains(err.Error(), "hop_ms") {
		t.Errorf("%v does not name the constants", err)
	}
	for _, v := range []float64{-1, math.NaN(), math.Inf(1), math.Inf(-1)} {
		if err := p.Constants.Set("hop_ms", v); !errors.Is(err, costmodel.ErrConstant) {
			t.Errorf("hop_ms %v: %v", v, err)
		}
	}
}

// Print names every constant and its source, and shows a sum for each step.
func TestPrint(t *testing.T) {
	for _, name := range costmodel.Names {
		var b bytes.Buffer
		p := profile(t, name)
		if err := p.Print(&b); err != nil {
			t.Fatal(err)
		}
		for _, term := range costmodel.Terms {
			if !strings.Contains(b.String(), term.Name) {
				t.Errorf("%s: %s is not printed", name, term.Name)
			}
		}
		for constant, figure := range p.Calibrated {
			if !strings.Contains(b.String(), "calibrated: "+figure) {
				t.Errorf("%s: nothing says that %s is from %q", name, constant, figure)
			}
		}
		if err := p.Validate(); err != nil {
			t.Error(err)
		}
	}
}
