// SPDX-License-Identifier: Apache-2.0

package server

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/pool"
)

const chunkBytes = 4096

// node is a store of a few chunks and what peers ask of it.
type node struct {
	*peerLookups
	t     *testing.T
	store *store.Store
	shard object.Shard
}

func newNode(t *testing.T, chunks int) *node {
	t.Helper()
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: int64(chunks * chunkBytes), Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	st := store.New(p, store.Options{WorkerShare: 1, PeerShare: 1})
	lookups := newPeerLookups(st)
	lookups.share.peer, lookups.share.all = 1<<20, 1<<20 // the pools of most tests have a few chunks
	return &node{lookups, t, st, object.Shard{Namespace: kv.Namespace{1}, World: 1, Groups: object.FullAttention(1, chunkBytes)}}
}

func (n *node) close() {
	if err := n.store.Close(); err != nil {
		n.t.Error(err)
	}
}

// fill stores the chunks of those numbers, and reports how many found a place.
func (n *node) fill(numbers ...byte) int {
	n.t.Helper()
	got := 0
	for _, number := range numbers {
		hashes := []kv.Hash{{number}}
		name := hold.Transfer{Instance: 1, Shard: n.shard, To: 1, Last: hashes[0]}
		var place store.Transfer
		if _, err := n.store.BeginStore(name, []byte("r"), hashes, &place); err != nil {
			n.t.Fatal(err)
		}
		if len(place.Offsets) > 0 {
			got += n.store.CommitStore(name, []byte("r"), hashes, true).Chunks
		}
	}
	return got
}

func names(numbers ...byte) []lmcache.ObjectKey {
	out := make([]lmcache.ObjectKey, len(numbers))
	for i, number := range numbers {
		out[i] = lmcache.ObjectKey{Chunk: kv.Hash{number}, Model: []byte("m"), Rank: 0x01000100}
	}
	return out
}

// find knows one model.
func (n *node) find(name *lmcache.ObjectKey) (k kv.Key, ok bool) {
	n.shard.Key(&k, 0, int(name.Group), name.Chunk)
	return k, string(name.Model) == "m"
}

// has asks for a result and returns which of the keys are held.
func (n *node) has(by string, id int64) (held []bool, ok bool) {
	places, ok := n.Result(by, id)
	for _, p := range places {
		if held = append(held, p != lmcache.NotHeld); p != lmcache.NotHeld && p.Size != chunkBytes {
			n.t.Errorf("%d bytes are told", p.Size)
		}
	}
	return held, ok
}

// What two peers locked stays while others store, each result is told once and to its own
// peer, and what one of them unlocks the other may still read.
func TestLockedStays(t *testing.T) {
	n := newNode(t, 4)
	defer n.close()
	n.fill(1, 2, 3)
	a := n.Lookup("a", names(1, 2, 9, 3), n.find)
	b := n.Lookup("b", names(2), n.find)
	if a != 0 || b != 1 {
		t.Errorf("the ids are %d and %d", a, b)
	}
	if _, ok := n.has("b", a); ok {
		t.Error("a peer is told another's result")
	}
	if held, ok := n.has("a", a); !ok || !slices.Equal(held, []bool{true, true, false, false}) {
		t.Errorf("held are %v, %v: nothing behind the first that is not there", held, ok)
	}
	if _, ok := n.has("a", a); ok {
		t.Error("a result is told twice")
	}
	if got := n.fill(11, 12, 13, 14, 15); got != 5 {
		t.Errorf("beside the two locked ones %d chunks were stored, want 5, two at a time", got)
	}
	again := n.Lookup("c", names(1), n.find)
	if held, _ := n.has("c", again); !slices.Equal(held, []bool{true}) {
		t.Error("a locked object went")
	}
	n.Unlock("c", names(1), n.find)
	n.Unlock("a", names(1), n.find)
	n.Unlock("a", names(2), n.find)
	if got := n.store.Stats(); got.Transfers != 1 {
		t.Errorf("%d lookups hold something, want b's", got.Transfers)
	}
	n.Unlock("b", names(2, 2, 7), n.find)
	if got := n.store.Stats(); got.Transfers != 0 || got.EvictableObjs != got.Resident {
		t.Errorf("left: %+v", got)
	}
	if held, ok := n.has("b", b); !ok || !slices.Equal(held, []bool{true}) {
		t.Errorf("a result that nobody took before the unlock: %v, %v", held, ok)
	}
}

// A model that is not known holds nothing, and neither does a lookup that is too late.
func TestNothingHeld(t *testing.T) {
	n := newNode(t, 2)
	defer n.close()
	n.fill(1)
	other := names(1)
	other[0].Model = []byte("other")
	if held, ok := n.has("a", n.Lookup("a", other, n.find)); !ok || !slices.Equal(held, []bool{false}) {
		t.Errorf("another model: %v, %v", held, ok)
	}
	if held, ok := n.has("a", n.Lookup("a", nil, n.find)); !ok || len(held) != 0 {
		t.Errorf("no keys: %v, %v", held, ok)
	}
	if _, ok := n.has("a", 77); ok {
		t.Error("a lookup that never was has a result")
	}
}

// A peer that never unlocks keeps its objects for the life of a lock.
func TestLocksExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, 1)
		defer n.close()
		n.fill(1)
		late := n.Lookup("a", names(1), n.find)
		time.Sleep(peerLookupLife - 1)
		n.store.Expire()
		if got := n.fill(2); got != 0 {
			t.Error("a locked object was evicted")
		}
		time.Sleep(time.Nanosecond)
		n.store.Expire()
		if got := n.fill(3); got != 1 {
			t.Error("an object stays locked for ever")
		}
		if _, ok := n.has("a", late); ok {
			t.Error("a peer is told where something was")
		}
		n.Unlock("a", names(1), n.find) // too late, of nothing
		if got := n.store.Stats(); got.Transfers != 0 {
			t.Errorf("left: %+v", got)
		}
	})
}

// Of lookups that nobody ends the oldest are forgotten, with their locks.
func TestOldestIsForgotten(t *testing.T) {
	n := newNode(t, 2)
	defer n.close()
	n.fill(1, 2)
	first := n.Lookup("peer 0", names(1), n.find)
	for i := range 1024 {
		n.Lookup(fmt.Sprint("peer ", i+1), names(2), n.find)
	}
	if _, ok := n.has("peer 0", first); ok {
		t.Error("the oldest of 1,025 is remembered")
	}
	if got := n.store.Stats(); got.Transfers != 1024 || got.EvictableObjs != 1 {
		t.Errorf("%d hold something, %d objects may go", got.Transfers, got.EvictableObjs)
	}
}

// A peer that asks often, or for much, loses its own lookups, not the locks of another.
func TestAPeerEndsNoLocksOfAnother(t *testing.T) {
	f := func(lookups int, of []lmcache.ObjectKey) {
		t.Helper()
		n := newNode(t, 2)
		defer n.close()
		n.fill(1)
		reads := n.Lookup("b", names(1), n.find)
		first := n.Lookup("a", of, n.find)
		for range lookups {
			n.Lookup("a", of, n.find)
		}
		if held, ok := n.has("b", reads); !ok || !slices.Equal(held, []bool{true}) {
			t.Errorf("after %d lookups of another peer: %v, %v", lookups, held, ok)
		}
		if got := n.store.Stats(); got.Transfers != 1 {
			t.Errorf("%d lookups hold something, want b's", got.Transfers)
		}
		if _, ok := n.has("a", first); ok {
			t.Error("nothing was forgotten")
		}
	}
	f(1024, nil)
	f(20, make([]lmcache.ObjectKey, lmcache.MaxObjectKeys))
}

// Unlocking many objects at once, known or not, some of them twice, is as unlocking one after
// the other, also between the lookups of two peers and after some were forgotten.
func TestUnlockAtOnce(t *testing.T) {
	at := rand.Uint64()
	r := rand.New(rand.NewPCG(at, 1))
	once, each := newNode(t, 8), newNode(t, 8)
	defer once.close()
	defer each.close()
	both := []*node{once, each}
	for _, n := range both {
		n.fill(0, 1, 2, 3, 4, 5, 6, 7)
	}
	some := func() (numbers []byte) {
		for range r.IntN(12) {
			numbers = append(numbers, byte(r.IntN(10)))
		}
		return numbers
	}
	for step := range 3000 {
		by, numbers := fmt.Sprint(r.IntN(2)), some()
		switch r.IntN(5) {
		case 0, 1:
			told := r.IntN(2) == 0
			for _, n := range both {
				if id := n.Lookup(by, names(numbers...), n.find); told {
					n.Result(by, id)
				}
			}
		default:
			once.Unlock(by, names(numbers...), once.find)
			for _, number := range numbers {
				each.Unlock(by, names(number), each.find)
			}
		}
		a, b := once.store.Stats(), each.store.Stats()
		if a.Transfers != b.Transfers || a.EvictableObjs != b.EvictableObjs || once.Len() != each.Len() {
			t.Fatalf("seed %d, step %d: %d and %d lookups hold something, %d and %d objects may go, %d and %d were not asked for", at, step, a.Transfers, b.Transfers, a.EvictableObjs, b.EvictableObjs, once.Len(), each.Len())
		}
	}
}

// BenchmarkUnlockUnknown unlocks as many objects as a peer may name, none of them locked, beside
// 1,023 lookups of its own.
func BenchmarkUnlockUnknown(b *testing.B) {
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: chunkBytes, Dir: b.TempDir()})
	if err != nil {
		b.Fatal(err)
	}
	n := &node{store: store.New(p, store.Options{WorkerShare: 1, PeerShare: 1}), shard: object.Shard{Namespace: kv.Namespace{1}, World: 1, Groups: object.FullAttention(1, chunkBytes)}}
	n.peerLookups = newPeerLookups(n.store)
	defer n.store.Close()
	var place store.Transfer
	h := []kv.Hash{{1}}
	if _, err := n.store.BeginStore(hold.Transfer{Instance: 1, Shard: n.shard, To: 1, Last: h[0]}, []byte("r"), h, &place); err != nil {
		b.Fatal(err)
	}
	n.store.CommitStore(hold.Transfer{Instance: 1, Shard: n.shard, To: 1, Last: h[0]}, []byte("r"), h, true)
	for range 1023 {
		n.Lookup("a", names(1), n.find)
	}
	unknown := make([]lmcache.ObjectKey, lmcache.MaxObjectKeys)
	for i := range unknown {
		unknown[i] = names(2)[0]
		binary.LittleEndian.PutUint32(unknown[i].Chunk[4:], uint32(i))
	}
	for b.Loop() {
		n.Unlock("a", unknown, n.find)
	}
}

// The loans of one peer leave room for others: one that names all objects locks a quarter of the
// pool, all peers together lock half. With the last connection of a peer its loans end.
func TestLoansShareThePoolAndEndWithThePeer(t *testing.T) {
	const chunks = 40
	n := newNode(t, chunks)
	defer n.close()
	n.share = newPeerLookups(n.store).share
	var all []byte
	for i := range byte(chunks) {
		all = append(all, i+1)
	}
	if got := n.fill(all...); got != chunks {
		t.Fatalf("%d stored", got)
	}
	held := func(by string) (held int) {
		places, ok := n.Result(by, n.Lookup(by, names(all...), n.find))
		if !ok {
			t.Fatal("no result")
		}
		for _, p := range places {
			if p != lmcache.NotHeld {
				held++
			}
		}
		return held
	}
	for _, c := range []struct {
		by   string
		want int
	}{{"a", 10}, {"a", 0}, {"b", 10}, {"c", 0}} {
		n.Join(c.by)
		if got := held(c.by); got != c.want {
			t.Errorf("%s locks %d objects, want %d", c.by, got, c.want)
		}
	}
	fresh := make([]byte, 20)
	for i := range fresh {
		fresh[i] = byte(100 + i)
	}
	if got := n.fill(fresh...); got != len(fresh) {
		t.Errorf("%d of %d new chunks found room", got, len(fresh))
	}
	n.Leave("a") // it has another connection
	if got := held("c"); got != 0 {
		t.Errorf("%d objects were unlocked while the peer had a connection", got)
	}
	n.Leave("a")
	if st := n.store.Stats(); st.Transfers != 1 {
		t.Errorf("%d lookups hold objects after the peer's last connection ended, want those of b", st.Transfers)
	}
	n.Unlock("b", names(all...), n.find)
	if st := n.store.Stats(); st.Transfers != 0 || n.mu.lent != 0 {
		t.Errorf("%d objects and %d bytes are locked at the end", st.Transfers, n.mu.lent)
	}
}

// Lookups of several connections of a peer at the same time lock no more than its share together.
func TestShareOfLookupsAtOnce(t *testing.T) {
	n := newNode(t, 64)
	defer n.close()
	n.share = newPeerLookups(n.store).share
	var all []byte
	for i := range byte(60) {
		all = append(all, i+1)
	}
	n.fill(all...)
	for round := range 300 {
		var at sync.WaitGroup
		n.Join("a")
		for i := range 4 {
			at.Go(func() { n.Lookup("a", names(all[15*i:15*i+15]...), n.find) })
		}
		at.Wait()
		n.mu.Lock()
		lent := n.mu.lent
		n.mu.Unlock()
		n.Leave("a")
		if lent > 16*chunkBytes || lent < 15*chunkBytes {
			t.Fatalf("round %d: %d chunks are locked, a quarter of the pool has 16", round, lent/chunkBytes)
		}
	}
}
