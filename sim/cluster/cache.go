// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"math/bits"
	"os"
	"strconv"
	"time"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	kvstore "github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// realStore is the store of a run with bytes: the server's own store, without background work and expiry, so that only calls change it.
// One chunk is one block of the engines.
type realStore struct {
	run   *run
	store *kvstore.Store
	shard object.Shard
}

// maxLoad is the largest number of blocks in one load. Of a longer hit, only so many blocks count.
const maxLoad = 1 << 16

// slotBytes returns how many bytes a block takes in the store: a power of two, so that free places fit.
func slotBytes(block int64) int64 { return max(64, int64(1)<<bits.Len64(uint64(block-1))) }

func newKept(r *run, blocks int) (_ *realStore, err error) {
	g := r.o.geometry()
	block := int64(g.TokenBytes()) * int64(g.BlockTokens)
	slot := slotBytes(block)
	dir, err := os.MkdirTemp(cmp.Or(r.o.Bytes.Dir, os.TempDir()), "kvasir-sim-")
	if err != nil {
		return nil, fmt.Errorf("cluster: make the memory of the store: %w", err)
	}
	p, err := pool.Open(pool.Options{Name: "kvasir_sim", Bytes: int64(blocks) * slot, Align: slot, Dir: dir, ChunkTokens: g.BlockTokens})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("cluster: make the memory of the store: %w", err), os.Remove(dir))
	}
	const forever = 1000 * time.Hour
	k := &realStore{run: r, store: kvstore.New(p, kvstore.Options{Quarantine: forever, SessionIdle: forever, MaxSessions: maxOpen + 1, MaxHolds: 1 << 24})}
	k.shard = object.Shard{Namespace: kv.NamespaceOf(r.o.Profile.Model.Name, "", "simulated"), World: 1, Groups: object.FullAttention(g.BlockTokens, block)}
	if err := errors.Join(p.Remove(), os.Remove(dir)); err != nil { // the mapping stays, however this process ends
		return nil, errors.Join(err, k.close())
	}
	return k, nil
}

func (k *realStore) close() error { return k.store.Close() }

func session(q *request) []byte { return strconv.AppendInt(nil, int64(q.number), 10) }

// hit returns how many leading blocks of q's prompt, at most limit, the store has. It does not pin them: load looks them up again.
func (k *realStore) hit(q *request, limit int) int {
	id := session(q)
	r := k.store.Lookup(id, k.shard, kvstore.Hashed(q.names[:limit]), 1)
	k.store.EndSession(id, lease.Owner{})
	return r.Hit
}

// load begins to read the blocks [from, to) of q's prompt. The caller must call land when the load has ended; land copies the blocks
// into table.
func (k *realStore) load(e *engine, q *request, table []int32, from, to int) (land func()) {
	id, m := session(q), e.memory
	r := k.store.Lookup(id, k.shard, kvstore.Hashed(q.names[:to]), 1)
	t := &kvstore.Transfer{Own: true}
	why := k.store.BeginLoad(id, k.name(e, q, from, to, true), q.names, t)
	if r.Hit < to || len(t.Parts) != to-from {
		k.run.fail(fmt.Errorf("cluster: the store has %d of %d blocks of request %d: %v", r.Hit, to, q.number, why))
		return func() {}
	}
	return func() {
		for _, part := range t.Parts {
			b := table[from+part.Chunk]
			k.run.fail(shm.Guard(func() {
				m.group.Scatter(part.Bytes, []int{int(b)}, 0)
				k.run.carried.count(part.Bytes, &k.run.carried.Loaded)
			}))
			m.blockArrived(b)
		}
		t.Done(q.names, true)
		k.store.EndSession(id, lease.Owner{})
		m.check(span{q, table, from * m.kv.BlockTokens, to * m.kv.BlockTokens})
	}
}

// put stores the full blocks of q's prompt, whose KV is in the blocks of table.
func (k *realStore) put(e *engine, q *request, table []int32) {
	n := len(q.names)
	if n == 0 {
		return
	}
	t := &kvstore.Transfer{Own: true}
	_, err := k.store.BeginStore(k.name(e, q, 0, n, false), session(q), q.names, t)
	if err != nil {
		k.run.fail(fmt.Errorf("cluster: %w", err))
		return
	}
	if len(t.Parts) == 0 {
		return
	}
	for _, part := range t.Parts {
		k.run.fail(shm.Guard(func() {
			e.memory.group.Gather(part.Bytes, []int{int(table[part.Chunk])})
			k.run.carried.count(part.Bytes, &k.run.carried.Stored)
		}))
	}
	t.Done(q.names, true)
}

func (k *realStore) name(e *engine, q *request, from, to int, load bool) hold.Transfer {
	return hold.Transfer{Instance: int64(e.number) + 1, Shard: k.shard, From: from, To: to, Last: q.names[to-1], Load: load}
}
