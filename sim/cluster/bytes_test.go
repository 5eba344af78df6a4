// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"context"
	"errors"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/sim/cluster"
	"github.com/kvasir-kv/kvasir/sim/costmodel"
)

// small is a profile with a model of three layers and four KV heads.
func small(t *testing.T, blocks int) *costmodel.Profile {
	t.Helper()
	p := profile(t)
	p.Model.Layers, p.Model.KVHeads, p.Blocks = 3, 4, blocks
	return p
}

const tokenBytes = 3 * 4 * 8

// chats are conversations of short turns, blocks of 16 tokens.
func chats(t *testing.T, n int) []workload.Request {
	t.Helper()
	list := workload.Chats(n, workload.ChatOptions{Seed: 5})
	if err := workload.Arrive(list, 40, 1, 2); err != nil {
		t.Fatal(err)
	}
	list, err := workload.Scaled(list, 32)
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// same compares two runs without their byte counts.
func same(a, b *cluster.Result) bool {
	x, y := *a, *b
	x.Bytes, y.Bytes = nil, nil
	return reflect.DeepEqual(x, y)
}

// A run with bytes has the same schedule as one without, by every transport, with little KV memory, and with a
// store that holds all blocks. A second run has the same bytes in the same order.
func TestBytesChangeNothing(t *testing.T) {
	list := chats(t, 80)
	f := func(name string, o cluster.Options) {
		t.Helper()
		without := run(t, list, o)
		o.Bytes = &cluster.Bytes{Dir: t.TempDir()}
		with, again := run(t, list, o), run(t, list, o)
		if !same(without, with) {
			t.Errorf("%s: the run with bytes differs from that without", name)
		}
		if !reflect.DeepEqual(with, again) {
			t.Errorf("%s: two runs differ: %+v, %+v", name, with.Bytes, again.Bytes)
		}
		b := with.Bytes
		if b.Wrong != 0 || b.Checked < b.Moved+b.Loaded-int64(2*len(list)*16*tokenBytes) { // the unused ends of last blocks are not checked
			t.Errorf("%s: %+v", name, b)
		}
		if (b.Moved > 0) != (o.Prefill > 0) || (b.Loaded > 0 && b.Stored > 0) != (o.Store.Blocks > 0) {
			t.Errorf("%s: %+v", name, b)
		}
		if n := with.Figures().Completed; n != len(list) {
			t.Errorf("%s: %d requests completed", name, n)
		}
	}
	p := small(t, 400)
	tight := small(t, 70)
	f("pull", cluster.Options{Profile: p, Prefill: 2, Decode: 2})
	f("pull into little memory", cluster.Options{Profile: tight, Prefill: 2, Decode: 1})
	f("P's first token", cluster.Options{Profile: p, Prefill: 1, Decode: 2, FirstToken: true})
	f("push", cluster.Options{Profile: p.NCCL(), Prefill: 2, Decode: 1, Transport: cluster.Push})
	f("pipe", cluster.Options{Profile: p, Prefill: 1, Decode: 1, Transport: cluster.Pipe})
	f("both", cluster.Options{Profile: tight, Decode: 2})
	f("without prefix cache", cluster.Options{Profile: p, Prefill: 1, Decode: 1, NoPrefixCache: true})
	f("store", cluster.Options{Profile: tight, Prefill: 2, Decode: 1, Store: cluster.Store{Blocks: 5000, GBps: 10}})
	f("store of engines that do both", cluster.Options{Profile: tight, Decode: 2, Store: cluster.Store{Blocks: 5000, GBps: 10}})
}

// The moved bytes are all blocks of all prompts except those that D already had. Each of them is compared.
func TestBytesAreCounted(t *testing.T) {
	o := cluster.Options{Profile: small(t, 400), Prefill: 1, Decode: 1, Bytes: &cluster.Bytes{HeadBytes: 16}}
	r := run(t, equal(2, 100, 3), o)
	block := int64(16 * 2 * tokenBytes)
	if b := r.Bytes; b.Moved != 2*7*block || b.Memory != 2*400*block || b.Stored+b.Loaded != 0 || b.Checked < 2*100*2*tokenBytes || b.CRC32C == 0 {
		t.Errorf("%+v", b)
	}
	prompt := workload.Request{Input: 100, Output: 3, Blocks: []int64{1}, BlockTokens: 112}
	later := prompt
	later.Arrival = time.Minute
	if b := run(t, []workload.Request{prompt, later}, o).Bytes; b.Moved != 8*block {
		t.Errorf("a prompt, and its last block again: %+v, a block has %d bytes", b, block)
	}
}

// One wrong bit in an arriving block fails the requests that read it, and no others. The times
// do not change.
func TestWrongBitIsNoticed(t *testing.T) {
	f := func(name string, list []workload.Request, blocks int, o cluster.Options, others bool) {
		t.Helper()
		o.Bytes = &cluster.Bytes{Dir: t.TempDir()}
		want := run(t, list, o)
		for n := 1; n <= blocks; n++ {
			o.Bytes.Corrupt = n
			r := run(t, list, o)
			wrong := 0
			for i := range r.Records {
				if q := &r.Records[i]; strings.Contains(q.Error, "wrong bytes") {
					wrong++
					q.Error = ""
				}
			}
			if wrong == 0 || wrong != r.Bytes.Wrong || others && wrong == len(list) {
				t.Errorf("%s: a wrong bit in block %d: %d requests fail, %+v", name, n, wrong, r.Bytes)
			}
			if !same(r, want) {
				t.Errorf("%s: a wrong bit in block %d changes the schedule", name, n)
			}
		}
		o.Bytes.Corrupt = blocks + 1
		if r := run(t, list, o); r.Bytes.Wrong != 0 {
			t.Errorf("%s: %d blocks arrive, and block %d is wrong: %+v", name, blocks, o.Bytes.Corrupt, r.Bytes)
		}
	}
	p := small(t, 200)
	two := equal(2, 40, 3) // blocks of 16 tokens: 3 each
	f("pull", two, 6, cluster.Options{Profile: p, Prefill: 1, Decode: 1}, true)
	f("push", two, 6, cluster.Options{Profile: p.NCCL(), Prefill: 1, Decode: 1, Transport: cluster.Push}, true)
	prompt := workload.Request{Input: 48, Output: 2, Blocks: []int64{1}, BlockTokens: 48}
	later, other := prompt, workload.Request{Input: 48, Output: 2, Blocks: []int64{2}, BlockTokens: 48}
	later.Arrival, other.Arrival = time.Minute, 2*time.Minute
	f("store", []workload.Request{prompt, later, other}, 2,
		cluster.Options{Profile: p, Decode: 1, NoPrefixCache: true, Store: cluster.Store{Blocks: 100, GBps: 10}}, true)
}

// A small store evicts, and the blocks that it still has are right.
func TestBytesWithSmallStore(t *testing.T) {
	list := chats(t, 100)
	o := cluster.Options{Profile: small(t, 70), Prefill: 2, Decode: 1, Store: cluster.Store{Blocks: 120, GBps: 10}, Bytes: &cluster.Bytes{Dir: t.TempDir()}}
	a, b := run(t, list, o), run(t, list, o)
	if !reflect.DeepEqual(a, b) {
		t.Error("two runs differ")
	}
	if c := a.Bytes; c.Wrong != 0 || c.Loaded == 0 || c.Stored <= 120*16*tokenBytes {
		t.Errorf("%+v", c)
	}
	if left, err := os.ReadDir(o.Bytes.Dir); err != nil || len(left) != 0 {
		t.Errorf("the store leaves %v, %v", left, err)
	}
}

// Two equal prompts run in one step. The second begins with blocks that the first still computes. They
// are compared when the first has computed them.
func TestSharedWithinAStep(t *testing.T) {
	p := small(t, 100)
	p.Constants.SpacingMS = 0
	prompt := workload.Request{Arrival: time.Millisecond, Input: 48, Output: 1, Blocks: []int64{1}, BlockTokens: 48}
	list := append(equal(1, 16, 1), prompt, prompt) // the first keeps the engine busy until both are there
	r := run(t, list, cluster.Options{Profile: p, Decode: 1, Bytes: &cluster.Bytes{}})
	if a, b := r.Records[1], r.Records[2]; a.Started != b.Started || b.Cached != 32 || r.Bytes.Wrong != 0 || r.Bytes.Checked != 32*tokenBytes {
		t.Errorf("%+v, %+v, %+v", a, b, r.Bytes)
	}
}

// In a workload whose block names do not stand for prefixes, equal names may have different KV. The run does not
// count these as hits.
func TestNamesThatAreNoPrefixes(t *testing.T) {
	prompt := func(at time.Duration, blocks ...int64) workload.Request {
		return workload.Request{Arrival: at, Input: 16 * len(blocks), Output: 2, Blocks: blocks, BlockTokens: 16}
	}
	list := []workload.Request{
		prompt(0, 1, 2, 3, 4), prompt(time.Minute, 9, 2, 3, 4), prompt(2*time.Minute, 1, 2, 3, 4), prompt(3*time.Minute, 9, 2, 3, 5), prompt(4*time.Minute, 1, 2, 3, 4),
	}
	r := run(t, list, cluster.Options{Profile: small(t, 9), Decode: 1, Bytes: &cluster.Bytes{}}) // each prompt evicts a part of the one before it
	if r.Bytes.Wrong != 0 || r.Bytes.Checked == 0 {
		t.Errorf("%+v", r.Bytes)
	}
}

// An interrupted run returns its results so far, and leaves nothing behind.
func TestInterruptedWithBytes(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	o := cluster.Options{
		Profile: small(t, 200), Prefill: 1, Decode: 1, Store: cluster.Store{Blocks: 500, GBps: 0.001}, Bytes: &cluster.Bytes{Dir: t.TempDir()},
		Progress: func(done, _ int) {
			if done >= 10 {
				cancel()
			}
		},
	}
	r, err := cluster.Run(ctx, chats(t, 2000), o)
	if !errors.Is(err, context.Canceled) || r == nil || r.Bytes.Moved == 0 {
		t.Fatalf("%v, %v", r, err)
	}
	if left, err := os.ReadDir(o.Bytes.Dir); err != nil || len(left) != 0 {
		t.Errorf("the store leaves %v, %v", left, err)
	}
}

func TestOptionsOfBytes(t *testing.T) {
	f := func(want string, o cluster.Options) {
		t.Helper()
		if _, err := cluster.Run(t.Context(), equal(1, 1, 1), o); !errors.Is(err, cluster.ErrOptions) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	f("2 GiB at most", cluster.Options{Profile: profile(t), Prefill: 8, Decode: 8, Bytes: &cluster.Bytes{HeadBytes: 256}})
	f("2 GiB at most", cluster.Options{Profile: small(t, 10), Decode: 1, Bytes: &cluster.Bytes{}, Store: cluster.Store{Blocks: 1 << 25, GBps: 1}})
	f("7 bytes", cluster.Options{Profile: small(t, 10), Decode: 1, Bytes: &cluster.Bytes{HeadBytes: 7}})
	f("PrefillAlone", cluster.Options{Profile: small(t, 10), Decode: 1, PrefillAlone: true, Bytes: &cluster.Bytes{}})
	f("block -1", cluster.Options{Profile: small(t, 10), Decode: 1, Bytes: &cluster.Bytes{Corrupt: -1}})
	o := cluster.Options{Profile: small(t, 10), Decode: 1, Bytes: &cluster.Bytes{Dir: "/nonexistent"}, Store: cluster.Store{Blocks: 10, GBps: 1}}
	if _, err := cluster.Run(t.Context(), equal(1, 1, 1), o); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a directory that is not there: %v", err)
	}
}
