// SPDX-License-Identifier: Apache-2.0

package lmcache_test

import (
	"bytes"
	"math"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
)

// field is one entry of a map that a client sends.
type field struct {
	name  string
	value []byte
}

func mapOf(fields []field) []byte {
	b := msgp.AppendMapHeader(nil, uint32(len(fields)))
	for _, f := range fields {
		b = append(msgp.AppendString(b, f.name), f.value...)
	}
	return b
}

// changed returns the fields with another value of one, or without it for nil.
func changed(fields []field, name string, value []byte) (out []field) {
	for _, f := range fields {
		if f.name == name && value == nil {
			continue
		}
		if f.name == name {
			f.value = value
		}
		out = append(out, f)
	}
	return out
}

func intFrame(n int64) []byte { return lmcache.AppendInt(nil, n) }
func textFrame(n int) []byte  { return lmcache.AppendString(nil, strings.Repeat("x", n)) }
func listFrame(n int) []byte {
	return append(msgp.AppendArrayHeader(nil, uint32(n)), make([]byte, n)...)
}

func decodes(frames [][]byte, op lmcache.Op) error {
	_, err := new(lmcache.Decoder).Decode(lmcache.NewMemo(4, 0), lmcache.Only(lmcache.Latest), op, frames)
	return err
}

// A key's fields are taken up to their limits and refused beyond, and each one that has
// no default must be there.
func TestKeyLimits(t *testing.T) {
	good := []field{
		{"model_name", textFrame(1)},
		{"world_size", intFrame(2)},
		{"worker_id", intFrame(1)},
		{"token_ids", listFrame(8)},
		{"start", intFrame(0)},
		{"end", intFrame(8)},
		{"request_id", textFrame(1)},
		{"cache_salt", textFrame(0)},
		{"request_configs", []byte{0xc0}},
		{"num_kv_readers", intFrame(1)},
	}
	f := func(name string, value []byte, ok bool) {
		t.Helper()
		err := decodes([][]byte{mapOf(changed(good, name, value)), intFrame(1)}, lmcache.OpLookup)
		if (err == nil) != ok {
			t.Errorf("%s %.20x (%d bytes): %v", name, value, len(value), err)
		}
	}
	for i, name := range []string{"model_name", "world_size", "worker_id", "token_ids", "start", "end", "request_id", "cache_salt", "request_configs", "num_kv_readers"} {
		f(name, nil, i >= 7)
	}
	f("model_name", textFrame(1024), true)
	f("model_name", textFrame(1025), false)
	f("request_id", textFrame(lmcache.MaxRequestBytes), true)
	f("request_id", textFrame(lmcache.MaxRequestBytes+1), false)
	f("world_size", intFrame(kv.MaxWorldSize), true)
	f("world_size", intFrame(kv.MaxWorldSize+1), false)
	f("world_size", intFrame(0), false)
	f("world_size", intFrame(1), false) // worker 1 of one
	f("worker_id", intFrame(0), true)
	f("worker_id", intFrame(2), false)
	f("worker_id", intFrame(-1), false)
	f("worker_id", []byte{0xc0}, true)            // of a scheduler
	f("start", intFrame(8), true)                 // an empty range
	f("start", intFrame(lmcache.MaxTokens), true) // of a lookup; ChunkRange refuses it
	f("start", intFrame(lmcache.MaxTokens+1), false)
	f("start", intFrame(-1), true) // as before
	f("end", intFrame(lmcache.MaxTokens), true)
	f("end", intFrame(lmcache.MaxTokens+1), false)
	f("end", msgp.AppendUint64(nil, math.MaxUint64), false)
	f("token_ids", listFrame(lmcache.MaxTokens), true)
	f("token_ids", listFrame(lmcache.MaxTokens+1), false)
	f("token_ids", append(msgp.AppendArrayHeader(nil, 9), make([]byte, 8)...), false)
	f("cache_salt", lmcache.AppendString(nil, "@"), kv.CheckSalt("@") == nil)
	f("later_field", nil, true)
}

// Integers are taken up to 2^63-1, and none is left to be read.
func TestIntegerLimits(t *testing.T) {
	if n, err := lmcache.DecodeInt(msgp.AppendUint64(nil, math.MaxInt64)); err != nil || n != math.MaxInt64 {
		t.Errorf("2^63-1 is read as %d, %v", n, err)
	}
	if n, err := lmcache.DecodeInt(msgp.AppendUint64(nil, math.MaxInt64+1)); err == nil {
		t.Errorf("2^63 is read as %d", n)
	}
	for v, want := range map[int64]bool{0: false, 1: true, -1: true} {
		if got, err := lmcache.DecodeBool(intFrame(v)); err != nil || got != want {
			t.Errorf("%d is read as %v, %v", v, got, err)
		}
	}
	for v, want := range map[bool]int64{true: 1, false: 0} {
		if got, err := lmcache.DecodeInt(lmcache.AppendBool(nil, v)); err != nil || got != want {
			t.Errorf("%v is read as %d, %v", v, got, err)
		}
	}
}

// A worker's registration is taken up to the limits of its fields, and each one that has
// no default must be there.
func TestEngineDrivenLimits(t *testing.T) {
	good := []field{
		{"instance_id", intFrame(1)},
		{"model_name", textFrame(1)},
		{"world_size", intFrame(1)},
		{"block_size", intFrame(16)},
		{"num_layers", intFrame(2)},
		{"hidden_dim_size", intFrame(8)},
		{"dtype_str", textFrame(7)},
		{"use_mla", []byte{0xc2}},
		{"num_physical_slots", []byte{0xc0}},
	}
	f := func(name string, value []byte, ok bool) {
		t.Helper()
		err := decodes([][]byte{mapOf(changed(good, name, value))}, lmcache.OpRegisterEngineDriven)
		if (err == nil) != ok {
			t.Errorf("%s %.20x (%d bytes): %v", name, value, len(value), err)
		}
	}
	for _, of := range good {
		f(of.name, nil, of.name == "num_physical_slots")
	}
	f("num_physical_slots", intFrame(16), true)
	f("model_name", textFrame(1024), true)
	f("model_name", textFrame(1025), false)
	f("dtype_str", textFrame(64), true)
	f("dtype_str", textFrame(65), false)
	f("world_size", intFrame(0), false)
	f("world_size", intFrame(kv.MaxWorldSize), true)
	f("world_size", intFrame(kv.MaxWorldSize+1), false)
}

// The registration of a worker that lends its memory, and the block ids of its
// transfers, are taken up to their limits.
func TestKVCacheLimits(t *testing.T) {
	f := func(what string, ok bool, change func(c *lmcache.KVCache)) {
		t.Helper()
		c := exampleKVCache()
		change(c)
		if _, err := decodeKVCache(c.Frames()); (err == nil) != ok {
			t.Errorf("%s: %v", what, err)
		}
	}
	text := func(n int) string { return strings.Repeat("x", n) }
	for over := range 2 {
		ok := over == 0
		f("layers", ok, func(c *lmcache.KVCache) {
			for len(c.Descriptors) < 8192+over {
				c.Descriptors = append(c.Descriptors, c.Descriptors[0])
			}
		})
		f("groups", ok, func(c *lmcache.KVCache) {
			for len(c.Groups) < 256+over {
				c.Groups = append(c.Groups, c.Groups[0])
			}
		})
		f("shm_name", ok, func(c *lmcache.KVCache) { c.Descriptors[0].ShmName = text(255 + over) })
		f("dtype", ok, func(c *lmcache.KVCache) { c.Descriptors[0].DType = text(256 + over) })
		f("device", ok, func(c *lmcache.KVCache) { c.Descriptors[0].Device = text(256 + over) })
		f("model_name", ok, func(c *lmcache.KVCache) { c.Model = text(1024 + over) })
		f("kv_layout", ok, func(c *lmcache.KVCache) { c.KVLayout = text(256 + over) })
		f("engine_type", ok, func(c *lmcache.KVCache) { c.EngineType = text(256 + over) })
		if _, err := decodeBlockIDs(lmcache.AppendBlockIDs(nil, make([][]int, 256+over))); (err == nil) != ok {
			t.Errorf("block ids of %d groups: %v", 256+over, err)
		}
	}
	if _, err := decodeBlockIDs(append([]byte{0x91}, listFrame(lmcache.MaxTokens+1)...)); err == nil {
		t.Error("more block ids than tokens are taken")
	}
	half := listFrame(lmcache.MaxTokens / 2)
	for groups := 2; groups <= 3; groups++ {
		frame := []byte{0x90 | byte(groups)}
		for range groups {
			frame = append(frame, half...)
		}
		if _, err := decodeBlockIDs(frame); (err == nil) != (groups == 2) {
			t.Errorf("%d groups of half the ids of a transfer each: %v", groups, err)
		}
	}
	for over := range 2 {
		c := exampleKVCache()
		c.Descriptors[0].Shape, c.Descriptors[0].Stride = make([]int64, 16+over), make([]int64, 16+over)
		if _, err := decodeKVCache(c.Frames()); (err == nil) != (over == 0) {
			t.Errorf("a tensor of %d dimensions: %v", 16+over, err)
		}
		c = exampleKVCache()
		c.Groups[0].Layers = make([]int, 8192+over)
		if _, err := decodeKVCache(c.Frames()); (err == nil) != (over == 0) {
			t.Errorf("a group of %d layers: %v", 8192+over, err)
		}
	}
	frames := exampleKVCache().Frames()
	for i := range frames {
		for _, spoil := range [][]byte{nil, append(bytes.Clone(frames[i]), 0), {0xc1}} {
			of := append([][]byte(nil), frames...)
			of[i] = spoil
			if got, err := decodeKVCache(of); err == nil {
				t.Errorf("frame %d as %.10x: %+v", i, spoil, got)
			}
		}
	}
	frames[5] = []byte{0xc0}
	if got, err := decodeKVCache(frames); err != nil || got.KVLayout != "" {
		t.Errorf("without hints: %q, %v", got.KVLayout, err)
	}
	if got, err := decodeKVCache(frames[:6]); err != nil || len(got.Groups) != 0 {
		t.Errorf("without groups, as 0.4.6 sends: %+v, %v", got.Groups, err)
	}
}

// A descriptor is read in each of msgpack's forms of an extension, its code compared in
// each, and each cut is an error.
func TestDescriptorsInEveryExtensionForm(t *testing.T) {
	pickled := func(n int) []byte { return append([]byte{0x80, 5}, make([]byte, n-2)...) }
	form := func(code byte, lengths ...byte) func(kind byte, data []byte) []byte {
		return func(kind byte, data []byte) []byte {
			return append(append(append([]byte{0x91, code}, lengths...), kind), data...)
		}
	}
	f := func(name string, data []byte, want string, make func(kind byte, data []byte) []byte) {
		t.Helper()
		frames := exampleKVCache().Frames()
		frames[1] = make(1, data)
		got, err := decodeKVCache(frames)
		if err != nil || len(got.Descriptors) != 1 || got.Descriptors[0].Type != want {
			t.Errorf("%s: %+v, %v", name, got.Descriptors, err)
		}
		whole := frames[1]
		for cut := range whole {
			frames[1] = bytes.Clone(whole[:cut:cut])
			if got, err := decodeKVCache(frames); err == nil {
				t.Errorf("%s, cut to %d of %d bytes: %+v", name, cut, len(whole), got.Descriptors)
			}
		}
		for _, kind := range []byte{0, 2, 255} {
			frames[1] = make(kind, data)
			if got, err := decodeKVCache(frames); err == nil {
				t.Errorf("%s of code %d: %+v", name, kind, got.Descriptors)
			}
		}
	}
	f("fixext 1", []byte{0x80}, "", form(0xd4))
	f("fixext 2", pickled(2), lmcache.PickledDescriptor, form(0xd5))
	f("fixext 4", pickled(4), lmcache.PickledDescriptor, form(0xd6))
	f("fixext 8", pickled(8), lmcache.PickledDescriptor, form(0xd7))
	f("fixext 16", pickled(16), lmcache.PickledDescriptor, form(0xd8))
	f("ext 8", pickled(20), lmcache.PickledDescriptor, form(0xc7, 20))
	f("ext 16", pickled(20), lmcache.PickledDescriptor, form(0xc8, 0, 20))
	f("ext 32", pickled(20), lmcache.PickledDescriptor, form(0xc9, 0, 0, 0, 20))
}

// Only memory of CPUs, of lmcache 0.5.6 or pickled before it, is lent on a CPU.
func TestOnCPU(t *testing.T) {
	f := func(want bool, of ...lmcache.Descriptor) {
		t.Helper()
		if got := (&lmcache.KVCache{Descriptors: of}).OnCPU(); got != want {
			t.Errorf("%+v: on a CPU %v", of, got)
		}
	}
	cpu, pickled, gpu := lmcache.Descriptor{Type: lmcache.CPUShm}, lmcache.Descriptor{Type: lmcache.PickledDescriptor, Device: "cpu"}, lmcache.Descriptor{Type: "cuda"}
	f(true, cpu, cpu)
	f(true, pickled)
	f(false, gpu)
	f(false, cpu, gpu)
	f(false, lmcache.Descriptor{Type: lmcache.PickledDescriptor})
}

// The result of a copy has two elements, neither more nor fewer.
func TestCopiedHasTwoElements(t *testing.T) {
	good := lmcache.Copied{Event: "e", OK: true}
	if got, err := lmcache.DecodeCopied(good.Append(nil)); err != nil || got != good {
		t.Errorf("%+v, %v", got, err)
	}
	event := lmcache.AppendBytes(nil, []byte("e"))
	for n, elements := range [][]byte{nil, event, nil, append(bytes.Clone(event), 0xc3, 0xc3)} {
		if elements == nil && n > 0 {
			continue
		}
		if got, err := lmcache.DecodeCopied(append(msgp.AppendArrayHeader(nil, uint32(n)), elements...)); err == nil {
			t.Errorf("%d elements: %+v", n, got)
		}
	}
}

// A prepared store has as many slots as chunks.
func TestPreparedStoreNamesAChunkForEachSlot(t *testing.T) {
	s := lmcache.Slots{Layouts: []kv.Layout{{Layers: 1, Slots: 2, Hidden: 3, DType: "float16"}}, Lengths: []int64{24}, Offsets: []int64{0, 4096}, Indices: []int{0, 1}}
	for n := range 4 {
		of := s
		of.Indices = []int{0, 1, 2, 3}[:n]
		if got, err := lmcache.DecodePrepareStore(lmcache.AppendPrepareStore(nil, &of)); (err == nil) != (n == 2) {
			t.Errorf("%d chunks for two slots: %+v, %v", n, got, err)
		}
	}
}

// Clients before 0.5.5 do not say how many read an object: it follows from their tensor
// parallelism, within the protocol's limits.
func TestReadersFollowFromTensorParallelism(t *testing.T) {
	f := func(said int, tensorParallel int64, singlePlane bool, want int) {
		t.Helper()
		k := lmcache.KeyView{Readers: said, WorldSize: 4}
		if got := k.ReadersOf(tensorParallel, singlePlane); got != want {
			t.Errorf("%d said, tensor parallel %d, single plane %v: %d readers, want %d", said, tensorParallel, singlePlane, got, want)
		}
	}
	f(3, 8, true, 3)
	f(0, 8, true, 0)
	f(lmcache.ReadersUnsaid, 4, false, 1)
	f(lmcache.ReadersUnsaid, 5, false, 5)
	f(lmcache.ReadersUnsaid, 2, true, 2)
	f(lmcache.ReadersUnsaid, 0, true, 1)
	f(lmcache.ReadersUnsaid, 1000, true, lmcache.MaxKVReaders)
}

// Where the number could mean several operations, the types of the payloads identify the operation:
// they fit it, and no other one.
func TestPayloadTypesIdentifyOperations(t *testing.T) {
	float, null := msgp.AppendFloat64(nil, 1.5), []byte{0xc0}
	f := func(id int64, want lmcache.Op, payloads ...[]byte) {
		t.Helper()
		m := append([][]byte{intFrame(9), intFrame(id)}, payloads...)
		got, err := lmcache.AllGenerations.Read(m, nil)
		found := false
		for _, r := range got {
			found = found || r.Op == want
		}
		if err != nil || found != (want != lmcache.OpUnknown) || want == lmcache.OpUnknown && len(got) > 0 {
			t.Errorf("operation %d with %x: %+v, %v, want %v", id, payloads, got, err, want)
		}
	}
	f(10, lmcache.OpWaitPrefetchStatus, textFrame(3), float)
	f(10, lmcache.OpWaitPrefetchStatus, textFrame(3), intFrame(2))
	f(10, lmcache.OpUnknown, textFrame(3), textFrame(3))
	f(10, lmcache.OpUnknown, intFrame(3), float)
	f(22, lmcache.OpPing, intFrame(3))
	f(22, lmcache.OpPing, null)
	f(22, lmcache.OpUnknown, textFrame(3))
	f(13, lmcache.OpEndSession, textFrame(3))
	f(13, lmcache.OpUnknown, intFrame(3))
	f(20, lmcache.OpClear, lmcache.AppendBool(nil, true))
	f(20, lmcache.OpUnknown, textFrame(1))
	f(23, lmcache.OpReportBlockAllocation, intFrame(1), textFrame(1), listFrame(0))
	f(23, lmcache.OpUnknown, intFrame(1), textFrame(1), null)
	f(14, lmcache.OpRegisterEngineDriven, msgp.AppendMapHeader(nil, 0))
	f(14, lmcache.OpUnknown, listFrame(0))
	kv := exampleKVCache().Frames()
	f(1, lmcache.OpRegisterKVCache, kv...)
	kv[5] = null
	f(1, lmcache.OpRegisterKVCache, kv...)
	kv[5] = textFrame(1)
	f(1, lmcache.OpUnknown, kv...)
}

// A set of generations has a behaviour only if all generations of the set have it. The empty set
// has none.
func TestGenerationSetHasCommonBehaviour(t *testing.T) {
	f := func(s lmcache.Generations, settled, pickles, pings, event, eventGPU bool) {
		t.Helper()
		if s.Settled() != settled || s.PickleOnly() != pickles || s.PingsWithoutID() != pings || s.NeedsEvent(true) != event || s.NeedsEvent(false) != eventGPU {
			t.Errorf("%v: settled %v, pickles only %v, pings without an id %v, needs an event %v, on a GPU %v",
				s, s.Settled(), s.PickleOnly(), s.PingsWithoutID(), s.NeedsEvent(true), s.NeedsEvent(false))
		}
	}
	of := func(g ...lmcache.Generation) (s lmcache.Generations) {
		for _, g := range g {
			s |= lmcache.Only(g)
		}
		return s
	}
	f(0, false, false, false, false, false)
	f(of(lmcache.Gen046), true, true, true, true, true)
	f(of(lmcache.Gen047), true, false, true, true, true)
	f(of(lmcache.Gen050), true, false, false, true, true)
	f(of(lmcache.Gen053), true, false, false, false, true)
	f(of(lmcache.Gen055), true, false, false, false, false)
	f(of(lmcache.Gen056), true, false, false, false, false)
	f(of(lmcache.Gen046, lmcache.Gen047), false, true, true, true, true)
	f(of(lmcache.Gen047, lmcache.Gen050), false, false, false, true, true)
	f(of(lmcache.Gen050, lmcache.Gen053), false, false, false, false, true)
	f(of(lmcache.Gen053, lmcache.Gen055, lmcache.Gen056), true, false, false, false, false)
	f(of(lmcache.Gen050, lmcache.Gen056), false, false, false, false, false)
	f(lmcache.AllGenerations, false, true, false, false, false)
}
