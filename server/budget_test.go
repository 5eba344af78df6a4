// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"bytes"
	"encoding/json"
	"runtime"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
)

// What a message claims or repeats takes no memory beyond its own, and a long
// request uid is not sent back.
func TestMessagesTakeNoMoreThanTheirLength(t *testing.T) {
	d := newDesk(t, server.Options{})
	d.register(7, 1, 4)
	const n = 8 << 20
	maps := append([]byte{0xdd, 0, 0x80, 0, 0}, bytes.Repeat([]byte{0x80}, n)...)
	f := func(name string, m ...[]byte) {
		t.Helper()
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		reply := d.Answer(m)
		runtime.ReadMemStats(&after)
		if got := after.TotalAlloc - before.TotalAlloc; got > n/2 {
			t.Errorf("%s of %d MiB took %d MiB", name, n>>20, got>>20)
		}
		size := 0
		for _, b := range reply {
			size += len(b)
		}
		if size > 4096 {
			t.Errorf("%s: the reply has %d bytes", name, size)
		}
	}
	op := func(o lmcache.Op) []byte { return lmcache.AppendOp(nil, o) }
	id := lmcache.AppendInt(nil, 7)
	f("a list of empty records", []byte{1}, op(lmcache.OpReportBlockAllocation), id, lmcache.AppendString(nil, "m"), maps)
	f("a key that is a list", []byte{1}, op(lmcache.OpLookup), maps, lmcache.AppendInt(nil, 1))
	f("block ids", []byte{1}, op(lmcache.OpStore), deskKey(1, 0, 1, "r").Append(nil), id, maps, lmcache.AppendBytes(nil, nil))
	f("object keys", []byte{1}, op(lmcache.OpP2PUnlockObjects), maps)
	f("object keys to look up", []byte{1}, op(lmcache.OpP2PLookupAndLock), maps)
	f("a long uid", make([]byte, n), op(lmcache.OpNoop))
	f("a long request id", []byte{1}, op(lmcache.OpEndSession), lmcache.AppendString(nil, string(make([]byte, n))))
	f("a registration", []byte{1}, op(lmcache.OpRegisterEngineDriven), maps)
	f("groups of a lent KV", append([][]byte{{1}, op(lmcache.OpRegisterKVCache)}, lentFrames(maps)...)...)
}

// lentFrames are a registration's with one frame replaced by every other.
func lentFrames(bad []byte) [][]byte {
	reg := lmcache.KVCache{InstanceID: 9, Model: "m", WorldSize: 1, EngineType: "vllm", KVLayout: "NHD", Descriptors: []lmcache.Descriptor{descriptor("/lmcache_kv_1_1")}}
	frames := reg.Frames()
	frames[len(frames)-1] = bad
	return frames
}

// A refused registration keeps and logs a bounded part of what the peer sent.
func TestRefusedRegistrationKeepsLittle(t *testing.T) {
	d := newDesk(t, server.Options{})
	long := string(bytes.Repeat([]byte("A\x1b]0;\n"), 1<<20))
	for id := range int64(max(4, testkit.Volume(20))) {
		desc := descriptor("/lmcache_kv_1_1")
		desc.Type = long
		reg := lmcache.KVCache{InstanceID: id, Model: "m", WorldSize: 1, EngineType: "vllm", KVLayout: "NHD", Descriptors: []lmcache.Descriptor{desc}}
		d.ask(lmcache.OpRegisterKVCache, reg.Frames()...)
		desc.Type, desc.DType = lmcache.CPUShm, long
		reg.Descriptors = []lmcache.Descriptor{desc}
		d.ask(lmcache.OpRegisterKVCache, reg.Frames()...)
		reg.KVLayout, reg.Descriptors = long, []lmcache.Descriptor{descriptor("/lmcache_kv_1_1")}
		d.ask(lmcache.OpRegisterKVCache, reg.Frames()...)
	}
	if n := len(d.log.String()); n > 64<<10 {
		t.Errorf("%d KiB were logged", n>>10)
	}
	if b, err := json.Marshal(d.Status()); err != nil || len(b) > 64<<10 {
		t.Errorf("the status has %d KiB, %v", len(b)>>10, err)
	}
}
