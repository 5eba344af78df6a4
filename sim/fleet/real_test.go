// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"iter"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/sim/fleet"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/tier"
)

const slot = 64 // bytes of a block in the nodes below

// realNode is a server's store over the tier of a fleet, and an engine that plays prompts.
type realNode struct {
	*store.Store
	tier  *tier.Counting
	shard object.Shard
	run   sync.WaitGroup
	end   context.CancelFunc
}

func newRealNode(t *testing.T, blocks int, shared tier.Tier) *realNode {
	t.Helper()
	p, err := pool.Open(pool.Options{Name: "fleet", Bytes: int64(blocks) * slot, Align: slot, Dir: t.TempDir(), ChunkTokens: 512})
	if err != nil {
		t.Fatal(err)
	}
	n := &realNode{tier: tier.Counted(shared, "shared")}
	n.Store = store.New(p, store.Options{Below: n.tier, ChecksumRate: 1 << 30, WorkerShare: 1, PeerShare: 1})
	n.shard = object.Shard{Namespace: kv.NamespaceOf("model", "", "layout"), World: 1, Groups: object.FullAttention(512, slot)}
	ctx, cancel := context.WithCancel(t.Context())
	n.end = cancel
	n.run.Go(func() { n.Run(ctx) })
	return n
}

func (n *realNode) close(t *testing.T) {
	t.Helper()
	n.end()
	n.run.Wait()
	if err := n.Close(); err != nil {
		t.Error(err)
	}
}

// play looks a prompt up, stores the blocks that did not hit, and returns the number of hits and of hits in the tier.
func (n *realNode) play(t *testing.T, number int, q *workload.Request) (hit, below int) {
	t.Helper()
	hashes := make([]kv.Hash, q.Input/q.BlockTokens)
	for i := range hashes {
		binary.LittleEndian.PutUint64(hashes[i][:], uint64(q.Blocks[i])+1)
	}
	id := strconv.AppendInt(nil, int64(number), 10)
	if most := (q.Input - 1) / q.BlockTokens; most > 0 {
		r := n.Lookup(id, n.shard, store.Hashed(hashes[:most]), 1)
		if r.State == store.Pending {
			r = n.Await(t.Context(), id, lease.Owner{})
		}
		hit, below = r.Hit, r.Below
		n.EndSession(id, lease.Owner{})
	}
	if hit == len(hashes) {
		return hit, below
	}
	name := hold.Transfer{Instance: 1, Shard: n.shard, From: hit, To: len(hashes), Last: hashes[len(hashes)-1]}
	tr := &store.Transfer{Own: true}
	if _, err := n.BeginStore(name, id, hashes, tr); err != nil {
		t.Fatal(err)
	}
	for _, part := range tr.Parts {
		copy(part.Bytes, fmt.Sprint(hashes[hit+part.Chunk]))
	}
	tr.Done(hashes, true)
	return hit, below
}

// Real stores over one tier have the same hits, key lookups and moved objects as the simulation, when
// requests are so far apart that speeds do not matter. With a small RAM the evictions depend on the order
// in which concurrent reads and writes end, so those figures are only nearly equal. So is the number of key
// lookups.
func TestAsRealNodes(t *testing.T) {
	for _, c := range []struct{ nodes, pool int }{{1, 60}, {2, 60}, {2, 400}, {4, 60}, {4, 4000}} {
		t.Run(fmt.Sprintf("%d nodes of %d blocks", c.nodes, c.pool), func(t *testing.T) {
			list := workload.Chats(max(100, testkit.Volume(250)), workload.ChatOptions{Seed: 3})
			for i := range list {
				list[i].Arrival = time.Duration(i) * time.Minute
			}
			o := fleet.Options{Profile: profile(t, 512), Nodes: []int{c.nodes}, Pool: c.pool}
			o.Requests = func(int) iter.Seq2[workload.Request, error] { return workload.Each(list) }
			want := run(t, o)[0]
			synctest.Test(t, func(t *testing.T) {
				shared := tier.NewMemory(1 << 30)
				var nodes []*realNode
				for range c.nodes {
					nodes = append(nodes, newRealNode(t, c.pool, shared))
				}
				ram, below := 0, 0
				for i := range list {
					h, b := nodes[i%c.nodes].play(t, i, &list[i])
					ram, below = ram+h-b, below+b
					time.Sleep(time.Minute) // until all writes are done
				}
				var asked, reads, writes uint64
				for _, n := range nodes {
					n.close(t)
					s := n.tier.Stats()
					asked, reads, writes = asked+s.Hits+s.Misses, reads+s.Reads, writes+s.Writes
				}
				slack := 0
				if c.pool < want.Puts {
					slack = want.Blocks / 50
				}
				near := func(a, b int) bool { return a-b <= slack && b-a <= slack }
				if ram+below != want.RAMBlocks+want.StoreBlocks || !near(ram, want.RAMBlocks) || int(asked) < want.Stats-slack || int(asked) > want.Stats+want.Blocks/50 || !near(int(reads), want.Gets) || int(writes) != want.Heads {
					t.Errorf("%d hits in RAM, %d from the tier, %d keys asked, %d reads, %d writes; the simulation says %+v", ram, below, asked, reads, writes, want)
				}
				if below == 0 && c.nodes > 1 {
					t.Error("nothing came from the tier: this compares nothing")
				}
			})
		})
	}
}
