// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"bytes"
	"testing"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
)

// FuzzDriven registers whatever a peer may describe of a real segment, and copies
// with whatever block ids: an answer each time, nothing outside the segment is
// touched (that would end the test), nothing stays in progress.
func FuzzDriven(f *testing.F) {
	good := lmcache.KVCache{Groups: []lmcache.EngineGroup{
		{Layers: []int{0}, TokensPerBlock: 16, WindowTokens: 40}, {ID: 1, Layers: []int{1}, TokensPerBlock: 16, WindowTokens: -1},
	}}
	frames := good.Frames()
	f.Add(int64(2), int64(engineBlocks), int64(16), int64(1), int64(4), int64(engineBlocks*64), int64(64), int64(4), int64(4), int64(0), int64(engineBytes),
		false, frames[5], frames[6], lmcache.AppendBlockIDs(nil, [][]int{{0, 2, 3, 4}, {5, 6, 7, 8}}))
	f.Add(int64(engineBlocks), int64(2), int64(1), int64(16), int64(4), int64(128), int64(64), int64(64), int64(4), int64(0), int64(engineBytes),
		true, frames[5], []byte{0x90}, lmcache.AppendBlockIDs(nil, [][]int{{1, 2, 3, 4}}))
	n := startDriven(f, f.TempDir(), "pool", server.Options{SeparateGroups: true})
	merged := startDriven(f, f.TempDir(), "pool", server.Options{})
	e, m := n.newEngine(), merged.newEngine()
	f.Cleanup(func() { n.stop(); merged.stop() })
	prompt := tokens(2*drivenChunk, 1)
	f.Fuzz(func(t *testing.T, a, b, c, d, g, sa, sb, sc, sd, offset, size int64, separate bool, hints, groups, blocks []byte) {
		e := e
		if !separate {
			e = m
		}
		e.t = t
		defer func() { e.t = f }()
		desc := lmcache.Descriptor{
			Type: lmcache.CPUShm, Bytes: size, DType: "float16", Shape: []int64{a, b, c, d, g}, Stride: []int64{sa, sb, sc, sd, 1}, Offset: offset, Device: "cpu",
		}
		reg := e.reg
		reg.Descriptors = nil
		for i := range e.segs {
			desc.ShmName = e.reg.Descriptors[i].ShmName
			reg.Descriptors = append(reg.Descriptors, desc)
		}
		frames := reg.Frames()
		frames[5], frames[6] = hints, groups
		e.call(lmcache.OpRegisterKVCache, frames...)
		for _, op := range []lmcache.Op{lmcache.OpStore, lmcache.OpRetrieve} {
			p := [][]byte{e.key(prompt, 0, 64, "f").Append(nil), lmcache.AppendInt(nil, reg.InstanceID), blocks, lmcache.AppendBytes(nil, nil)}
			if op == lmcache.OpRetrieve {
				e.lookup(prompt, "f")
				p = append(p, lmcache.AppendInt(nil, 20))
			}
			if _, err := lmcache.DecodeCopied(e.call(op, p...)); err != nil {
				t.Fatalf("%v: %v", op, err)
			}
		}
		e.call(lmcache.OpEndSession, lmcache.AppendString(nil, "f"))
		e.call(lmcache.OpUnregisterKVCache, lmcache.AppendInt(nil, reg.InstanceID))
		if st := e.store.Stats(); st.Transfers != 0 || st.StagedBytes != 0 || st.Sessions != 0 {
			t.Fatalf("left over: %+v", st)
		}
		e.store.Clear(true)
		e.log.mu.Lock()
		e.log.b = bytes.Buffer{}
		e.log.mu.Unlock()
	})
}
