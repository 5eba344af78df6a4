// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"log/slog"
	"os"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// 24 conversations of 128k tokens, asked for in turns, and each then stored by 8
// ranks, which send the whole prompt again: the memo must hold them all. Reported
// are the median and the 90th percentile of a lookup.
func BenchmarkManyConversations(b *testing.B) {
	const conversations, ranks, promptTokens, chunk = 24, 8, 128 << 10, 256
	dir, err := os.MkdirTemp("/dev/shm", "kvasir-scale")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = os.RemoveAll(dir) })
	const chunks = promptTokens / chunk
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: conversations * ranks * (chunks + 8) * 64, Align: 64, Dir: dir, ChunkTokens: chunk})
	if err != nil {
		b.Fatal(err)
	}
	st := store.New(p, store.Options{})
	s := server.New(st, server.Options{ChunkTokens: chunk, Log: slog.New(slog.DiscardHandler)})
	b.Cleanup(func() {
		_ = s.Close()
		_ = st.Close()
	})
	ask := func(op lmcache.Op, payload ...[]byte) []byte {
		got := s.Answer(append([][]byte{{0}, lmcache.AppendOp(nil, op)}, payload...))
		if len(got) < 3 {
			return nil
		}
		return got[2]
	}
	for rank := range int64(ranks) {
		reg := lmcache.EngineDriven{
			InstanceID: rank, Model: "m", WorldSize: ranks, BlockSize: 16, Layers: 1, Hidden: 1, DType: "int8", SinglePlane: true, PhysicalSlots: 1,
		}
		ask(lmcache.OpRegisterEngineDriven, reg.Append(nil))
	}
	var keys [conversations][1 + ranks][]byte
	for c := range keys {
		for rank := range keys[c] {
			k := lmcache.Key{Model: "m", WorldSize: ranks, Worker: rank - 1, Tokens: tokens(promptTokens, c+1), End: promptTokens, RequestID: "r", Readers: 1}
			keys[c][rank] = k.Append(nil)
		}
	}
	for c := range keys { // stored in steps, as prefill does
		for rank := range ranks {
			ask(lmcache.OpPrepareStore, keys[c][1+rank], lmcache.AppendInt(nil, int64(rank)))
			ask(lmcache.OpCommitStore, keys[c][1+rank], lmcache.AppendInt(nil, int64(rank)), lmcache.AppendBytes(nil, nil))
		}
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var took []time.Duration
	for b.Loop() {
		for c := range keys {
			begin := threadTime()
			ask(lmcache.OpLookup, keys[c][0], lmcache.AppendInt(nil, 1))
			took = append(took, threadTime()-begin)
			n, err := lmcache.DecodeInt(ask(lmcache.OpQueryPrefetchStatus, lmcache.AppendString(nil, "r")))
			if err != nil || n != chunks {
				b.Fatalf("conversation %d: %d chunks hit, %v", c, n, err)
			}
			ask(lmcache.OpEndSession, lmcache.AppendString(nil, "r"))
			for rank := range ranks {
				ask(lmcache.OpPrepareStore, keys[c][1+rank], lmcache.AppendInt(nil, int64(rank)))
			}
		}
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-us")
	b.ReportMetric(float64(took[len(took)*9/10].Microseconds()), "p90-us")
}

// threadTime is what this thread has worked.
func threadTime() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts)
	return time.Duration(ts.Nano())
}
