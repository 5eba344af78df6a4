// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"encoding/binary"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/evict"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/tier/disk"
)

// BenchmarkAgents plays 2,212 requests of 14 coding agents at a time into a store whose pool their live sessions fill 1.8 times,
// with a disk of the pool's size below it. It reports the share of prompt tokens that hit and the number of chunks written, for each
// --l2-write. A step of an engine stores 8 chunks of 256 tokens.
//
//	go test -run - -bench Agents -benchtime 1x ./cmd/kvasir/internal/cli
func BenchmarkAgents(b *testing.B) {
	for _, trace := range []struct {
		name string
		o    workload.AgentOptions
	}{{"pauses of seconds and minutes", workload.AgentOptions{}}, {"pauses alike", workload.AgentOptions{Spread: 0.05, SubAgents: -1}}} {
		requests := workload.Agents(2212, trace.o)
		for _, write := range []string{"never", "commit", "hit"} {
			b.Run(trace.name+"/"+write, func(b *testing.B) {
				for b.Loop() {
					playAgents(b, requests, write)
				}
			})
		}
	}
}

// agentChunk is the length of a chunk, bytes.
const agentChunk = 64 << 10

func playAgents(b *testing.B, requests []workload.Request, write string) {
	b.Helper()
	ctx, cancel := context.WithCancel(b.Context())
	dir, bytes := b.TempDir(), int64(agentPool(requests))*agentChunk
	p, err := pool.Open(pool.Options{Name: "agents", Bytes: bytes, Dir: dir, ChunkTokens: 256})
	if err != nil {
		b.Fatal(err)
	}
	o := store.Options{Write: writePolicies[write], ChecksumRate: 1 << 33, LoadTimeout: 20 * time.Second, WorkerShare: 1, PeerShare: 1}
	if o.Policy, err = evict.New(evict.Default, bytes); err != nil {
		b.Fatal(err)
	}
	if write != "never" {
		d, err := disk.Open(disk.Options{Dirs: []disk.Dir{{Path: filepath.Join(dir, "disk"), Bytes: bytes}}, SegmentBytes: 1 << 20})
		if err != nil {
			b.Fatal(err)
		}
		<-d.Opened()
		o.Below = d
	}
	st := store.New(p, o)
	ended := make(chan struct{})
	go func() { st.Run(ctx); close(ended) }()
	hit, below, tokens := 0, 0, 0
	for i := range requests {
		q := &requests[i]
		h := agentHashes(q)
		tokens += q.Input
		got := serveAgent(b, st, fmt.Append(nil, "r", i), h)
		hit, below = hit+got.Hit, below+got.Below
	}
	stats := st.Stats()
	b.ReportMetric(100*float64(hit*256)/float64(tokens), "%hit")
	b.ReportMetric(100*float64(below*256)/float64(tokens), "%disk")
	b.ReportMetric(float64(stats.WrittenChunks), "written")
	b.ReportMetric(float64(stats.LostChunks), "lost")
	cancel()
	<-ended
	if err := st.Close(); err != nil {
		b.Fatal(err)
	}
}

// agentPool returns a pool size in chunks: the mean size of the live sessions divided by 1.8.
func agentPool(requests []workload.Request) int {
	left, live := map[int]int{}, map[int]int{}
	for i := range requests {
		left[requests[i].Conversation]++
	}
	sum, now := 0, 0
	for i := range requests {
		q := &requests[i]
		now += len(q.Blocks) - live[q.Conversation]
		live[q.Conversation] = len(q.Blocks)
		if left[q.Conversation]--; left[q.Conversation] == 0 {
			now -= len(q.Blocks)
		}
		sum += now
	}
	return sum / len(requests) * 10 / 18
}

func agentHashes(q *workload.Request) []kv.Hash {
	var tokens []uint32 // two stand for the 256 of a chunk
	for _, name := range q.Blocks[:min(len(q.Blocks), q.Input/q.BlockTokens)] {
		var x [8]byte
		binary.LittleEndian.PutUint64(x[:], uint64(name))
		tokens = append(tokens, binary.LittleEndian.Uint32(x[:4]), binary.LittleEndian.Uint32(x[4:]))
	}
	return kv.ChunkHashes(tokens, 2)
}

// serveAgent does what a server does for a request: lookup, load, and the stores of the chunks that did not hit.
func serveAgent(b *testing.B, st *store.Store, id []byte, h []kv.Hash) store.LookupResult {
	const step = 8
	if len(h) == 0 {
		return store.LookupResult{}
	}
	shard := object.Shard{Namespace: kv.NamespaceOf("model", "", "layout"), World: 1, Groups: object.FullAttention(256, agentChunk)}
	got := st.Lookup(id, shard, store.Hashed(h), 1)
	if got.State == store.Pending {
		got = st.Await(b.Context(), id, lease.Owner{})
	}
	if got.Hit > 0 {
		name := hold.Transfer{Instance: 1, Shard: shard, To: got.Hit, Last: h[got.Hit-1], Load: true}
		var place store.Transfer
		if why := st.BeginLoad(id, name, h, &place); why != miss.None {
			b.Fatal(why)
		}
		st.CommitLoad(name, id)
	}
	for from := got.Hit; from < len(h); from += step {
		to := min(from+step, len(h))
		name := hold.Transfer{Instance: 1, Shard: shard, From: from, To: to, Last: h[to-1]}
		var place store.Transfer
		if _, err := st.BeginStore(name, id, h, &place); err == nil && len(place.Offsets) > 0 {
			st.CommitStore(name, id, h, true)
		}
		time.Sleep(2 * time.Millisecond) // an engine computes for far longer
	}
	st.EndSession(id, lease.Owner{})
	return got
}
