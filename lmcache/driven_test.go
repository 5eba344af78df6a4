// SPDX-License-Identifier: Apache-2.0

package lmcache_test

import (
	"bytes"
	"reflect"
	"slices"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/lmcache"
)

func exampleKVCache() *lmcache.KVCache {
	return &lmcache.KVCache{
		InstanceID: 5, Model: "m", WorldSize: 1, EngineType: "vllm", KVLayout: "HND",
		Descriptors: []lmcache.Descriptor{{
			Type: lmcache.CPUShm, ShmName: "/lmcache_kv_1_0", Bytes: 1 << 20, DType: "bfloat16",
			Shape: []int64{4, 2, 16, 8}, Stride: []int64{256, 128, 8, 1}, Offset: 3, Device: "cpu",
		}},
		Groups: []lmcache.EngineGroup{{ID: 1, Layers: []int{0}, TokensPerBlock: 16, WindowTokens: 64, ExtraTag: 2, Recurrent: true}},
	}
}

// decodeKVCache decodes a registration as a server does.
func decodeKVCache(frames [][]byte) (lmcache.KVCache, error) {
	r, err := new(lmcache.Decoder).Decode(nil, lmcache.AllGenerations, lmcache.OpRegisterKVCache, frames)
	if err != nil {
		return lmcache.KVCache{}, err
	}
	return *r.(*lmcache.KVCache), nil
}

// decodeBlockIDs decodes the block ids of a store as a server does.
func decodeBlockIDs(frame []byte) ([][]int, error) {
	key := (&lmcache.Key{Model: "m", WorldSize: 1, RequestID: "r", Readers: 1}).Append(nil)
	p := [][]byte{key, lmcache.AppendInt(nil, 1), frame, lmcache.AppendBytes(nil, nil)}
	r, err := new(lmcache.Decoder).Decode(lmcache.NewMemo(4, 0), lmcache.Only(lmcache.Latest), lmcache.OpStore, p)
	if err != nil {
		return nil, err
	}
	return r.(*lmcache.StoreRequest).Blocks, nil
}

func TestKVCacheRoundTrip(t *testing.T) {
	want := exampleKVCache()
	got, err := decodeKVCache(want.Frames())
	if err != nil || !reflect.DeepEqual(&got, want) {
		t.Errorf("%+v, %v, want %+v", got, err, want)
	}
}

// wrappers returns the frames of a registration whose only descriptor is data.
func wrappers(t *testing.T, code int8, data []byte) [][]byte {
	t.Helper()
	b, err := msgp.AppendExtension(msgp.AppendArrayHeader(nil, 1), &msgp.RawExtension{Type: code, Data: data})
	if err != nil {
		t.Fatal(err)
	}
	frames := exampleKVCache().Frames()
	frames[1] = b
	return frames
}

// Descriptors of other kinds are named, not opened; a pickle is never read.
func TestDescriptorKinds(t *testing.T) {
	f := func(data []byte, want string) {
		t.Helper()
		got, err := decodeKVCache(wrappers(t, 1, data))
		if err != nil || len(got.Descriptors) != 1 || got.Descriptors[0].Type != want {
			t.Errorf("%x: %+v, %v", data, got.Descriptors, err)
		}
	}
	f([]byte("\x80\x05\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x08builtins"), lmcache.PickledDescriptor)
	cuda := msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(nil, 2), "type"), "cuda")
	cuda = msgp.AppendInt(msgp.AppendString(cuda, "version"), 1)
	f(cuda, "cuda")
}

func TestDescriptorRefuses(t *testing.T) {
	f := func(what string, code int8, data []byte) {
		t.Helper()
		if _, err := decodeKVCache(wrappers(t, code, data)); err == nil {
			t.Errorf("%s is accepted", what)
		}
	}
	good := exampleKVCache().Frames()[1]
	good = good[bytes.IndexByte(good, 0x85):]
	f("another ext code", 2, good)
	f("a truncated descriptor", 1, good[:len(good)-1])
	f("bytes after it", 1, append(bytes.Clone(good), 0))
	f("version 2", 1, bytes.Replace(good, []byte("version\x01"), []byte("version\x02"), 1))
	f("an unknown field", 1, bytes.Replace(good, []byte("nbytes"), []byte("nbites"), 1))
	f("an unknown field inside", 1, bytes.Replace(good, []byte("stride"), []byte("strife"), 1))
	f("a missing field", 1, bytes.Replace(bytes.Replace(good, []byte("\xa6nbytes\xd2\x00\x10\x00\x00"), nil, 1), []byte{0x85}, []byte{0x84}, 1))
	f("no map", 1, []byte{1})
}

// FuzzKVCache: whatever decodes encodes to something that decodes to the same.
func FuzzKVCache(f *testing.F) {
	frames := exampleKVCache().Frames()
	f.Add(frames[1], frames[5], frames[6], lmcache.AppendBlockIDs(nil, [][]int{{1, 2}, {}}))
	f.Fuzz(func(t *testing.T, layers, hints, groups, blocks []byte) {
		frames := exampleKVCache().Frames()
		frames[1], frames[5], frames[6] = layers, hints, groups
		if got, err := decodeKVCache(frames); err == nil {
			cpu := true
			for _, d := range got.Descriptors {
				cpu = cpu && d.Type == lmcache.CPUShm
			}
			if again, err := decodeKVCache(got.Frames()); cpu && (err != nil || !slices.EqualFunc(again.Frames(), got.Frames(), bytes.Equal)) {
				t.Fatalf("%+v decodes again to %+v, %v", got, again, err)
			}
		}
		if ids, err := decodeBlockIDs(blocks); err == nil {
			again, err := decodeBlockIDs(lmcache.AppendBlockIDs(nil, ids))
			if err != nil || !slices.EqualFunc(again, ids, slices.Equal) {
				t.Fatalf("%v decodes again to %v, %v", ids, again, err)
			}
		}
	})
}
