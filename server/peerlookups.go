// SPDX-License-Identifier: Apache-2.0

package server

import (
	"slices"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/store"
)

const (
	// peerLookupLife is how long objects wait to be unlocked, as long as LMCache's read locks.
	peerLookupLife = 300 * time.Second

	// maxPeerLookups bounds the lookups of all peers: about 10 KB each with 100 keys. Beyond it one is forgotten, see peerLookups.
	maxPeerLookups = 1024

	// peerLoans and allLoans bound the bytes that one peer, and all peers, may have locked, as parts of the pool.
	peerLoans, allLoans = 0.25, 0.5

	// maxPeerKeys bounds the keys of all lookups that are remembered: 100 MB. Beyond it a lookup is forgotten, see peerLookups.
	maxPeerKeys = 1 << 20
)

// keyFinder returns the key of an object that a peer names. It reports false for an object that this node cannot have.
type keyFinder func(*lmcache.ObjectKey) (kv.Key, bool)

// peerLookups answers LMCache's peer-to-peer operations: a peer names objects, learns where in the pool they are, reads them and unlocks
// them. Until then, or for the life of a read lock, they stay in place.
//
// The operations are p2p_lookup_and_lock, p2p_query_lookup_results and p2p_unlock_objects of lmcache 0.5.6. LMCache's servers read each
// other's pools with a transfer engine. This server runs none, so its places are for peers that map the pool.
//
// It has the lookups whose objects are not all unlocked, or whose results were not fetched yet. Beyond 1,024 lookups it forgets the oldest
// lookup of the peer with the most lookups, and unlocks its objects; beyond a million keys, that of the peer with the most keys. So no peer
// can end another's locks by asking often. Methods are safe for concurrent use.
type peerLookups struct {
	store *store.Store
	share struct{ peer, all float64 } // immutable: peerLoans and allLoans; tests have others

	locking sync.Mutex // held from the check of the shares until the lookup is added; taken before the store's mutex and mu
	mu      struct {   // a leaf
		sync.Mutex
		last  int64
		tasks []*peerLookup  // oldest first
		keys  int            // number of keys of all tasks
		lent  int64          // bytes of all loans
		conns map[string]int // number of connections of each peer that asks
	}
}

type peerLookup struct {
	id     int64
	by     string
	began  time.Time
	places []lmcache.PeerPlace // nil after the peer has asked for them
	locked map[kv.Key]int      // number of locks by object
	loan   *store.Loan         // nil: nothing is locked
	bytes  int64               // bytes of the loan
	keys   int
}

// newPeerLookups returns an empty peerLookups over a store.
func newPeerLookups(s *store.Store) *peerLookups {
	t := &peerLookups{store: s}
	t.share.peer, t.share.all = peerLoans, allLoans
	t.mu.conns = make(map[string]int)
	return t
}

// mayLock returns how many bytes the peer `by` may lock now.
func (t *peerLookups) mayLock(by string) int64 {
	pool := float64(t.store.Files().Bytes())
	t.mu.Lock()
	defer t.mu.Unlock()
	own := int64(0)
	for _, k := range t.mu.tasks {
		if k.by == by && k.loan != nil {
			own += k.bytes
		}
	}
	return max(0, min(int64(t.share.peer*pool)-own, int64(t.share.all*pool)-t.mu.lent))
}

// Join records a connection of the peer `by`.
func (t *peerLookups) Join(by string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.conns[by]++
}

// Leave records the end of a connection of the peer `by`. With its last connection all locks of the peer end.
func (t *peerLookups) Leave(by string) {
	for _, loan := range t.leave(by) {
		loan.GiveBack()
	}
}

func (t *peerLookups) leave(by string) (loans []*store.Loan) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.conns[by]--; t.mu.conns[by] > 0 {
		return nil
	}
	delete(t.mu.conns, by)
	for i := len(t.mu.tasks) - 1; i >= 0; i-- {
		if k := t.mu.tasks[i]; k.by == by {
			if loan := t.endLocked(k); loan != nil {
				loans = append(loans, loan)
			}
			t.removeLocked(i)
		}
	}
	return loans
}

// endLocked removes and returns a task's loan; nil if it has none.
func (t *peerLookups) endLocked(k *peerLookup) (loan *store.Loan) {
	if loan, k.loan = k.loan, nil; loan != nil {
		t.mu.lent -= k.bytes
	}
	return loan
}

// Lookup locks, in each shard and object group, the objects before the first missing one. It returns an id by which the peer `by` asks for
// their places. Ids count from 0. If too many transfers are in progress it locks nothing.
func (t *peerLookups) Lookup(by string, names []lmcache.ObjectKey, find keyFinder) (id int64) {
	k := peerLookup{by: by, began: time.Now(), keys: len(names), places: make([]lmcache.PeerPlace, len(names)), locked: make(map[kv.Key]int)}
	keys, at := make([]kv.Key, 0, len(names)), make([]int, 0, len(names))
	for i := range names {
		k.places[i] = lmcache.NotHeld
		if key, ok := find(&names[i]); ok {
			keys, at = append(keys, key), append(at, i)
		}
	}
	for _, loan := range t.lock(&k, keys, at) {
		loan.GiveBack()
	}
	return k.id
}

// lock locks the objects `keys` of a lookup, within the shares of its peer and of all peers, and adds the lookup. `at` has the index of each
// key in the peer's request. It returns the loans of lookups that were forgotten for it, which the caller must give back.
func (t *peerLookups) lock(k *peerLookup, keys []kv.Key, at []int) (forgotten []*store.Loan) {
	t.locking.Lock() // no other lookup may lock the bytes that this one may
	defer t.locking.Unlock()
	places, loan, err := t.store.Lend(k.by, keys, peerLookupLife, t.mayLock(k.by))
	if err == nil {
		k.loan = loan
		for i, p := range places {
			if p.Bytes > 0 {
				k.places[at[i]] = lmcache.PeerPlace{Offset: p.Offset, Size: p.Bytes}
				k.locked[keys[i]]++
				k.bytes += p.Bytes
			}
		}
	}
	return t.add(k)
}

// Len returns how many lookups there are whose places were not asked for yet.
func (t *peerLookups) Len() (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, k := range t.mu.tasks {
		if k.places != nil {
			n++
		}
	}
	return n
}

// add adds a lookup. It returns the loans of lookups that were forgotten for it, which the caller must give back.
func (t *peerLookups) add(k *peerLookup) (forgotten []*store.Loan) {
	t.mu.Lock()
	defer t.mu.Unlock()
	k.id = t.mu.last
	t.mu.last++
	t.mu.tasks = append(t.mu.tasks, k)
	t.mu.keys += k.keys
	if k.loan != nil {
		t.mu.lent += k.bytes
	}
	for len(t.mu.tasks) > 1 {
		i := 0
		switch {
		case time.Since(t.mu.tasks[0].began) >= peerLookupLife:
		case len(t.mu.tasks) > maxPeerLookups:
			i = t.oldestOfMostLocked(func(*peerLookup) int { return 1 })
		case t.mu.keys > maxPeerKeys:
			i = t.oldestOfMostLocked(func(k *peerLookup) int { return k.keys })
		default:
			return forgotten
		}
		if loan := t.endLocked(t.mu.tasks[i]); loan != nil {
			forgotten = append(forgotten, loan)
		}
		t.removeLocked(i)
	}
	return forgotten
}

// oldestOfMostLocked returns the index of the oldest task of the peer whose tasks have the highest cost together; of equal peers, the one
// with the oldest task.
func (t *peerLookups) oldestOfMostLocked(cost func(*peerLookup) int) (at int) {
	sums, most := make(map[string]int), 0
	for _, k := range t.mu.tasks {
		sums[k.by] += cost(k)
		most = max(most, sums[k.by])
	}
	return slices.IndexFunc(t.mu.tasks, func(k *peerLookup) bool { return sums[k.by] == most })
}

func (t *peerLookups) removeLocked(i int) {
	t.mu.keys -= t.mu.tasks[i].keys
	t.mu.tasks = slices.Delete(t.mu.tasks, i, i+1)
}

// Result returns the places of a lookup of the peer `by`, one for each key. ok is false for an unknown lookup, for one older than
// peerLookupLife, and if the result was returned before.
func (t *peerLookups) Result(by string, id int64) (places []lmcache.PeerPlace, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	i := slices.IndexFunc(t.mu.tasks, func(k *peerLookup) bool { return k.id == id && k.by == by })
	if i < 0 || t.mu.tasks[i].places == nil {
		return nil, false
	}
	k := t.mu.tasks[i]
	places, k.places = k.places, nil
	late := time.Since(k.began) >= peerLookupLife // nothing is locked any more
	if k.loan == nil || late {
		_ = t.endLocked(k) // its time is over
		t.removeLocked(i)
	}
	return places, !late
}

// Unlock ends one lock of the peer `by` on each of the objects, that of the peer's oldest lookup. All objects of a lookup stay in place
// until all of its locks have ended. It takes one map access for each name, and at most one for each object that the peer has locked; other
// calls wait for the objects of one lookup at most.
func (t *peerLookups) Unlock(by string, names []lmcache.ObjectKey, find keyFinder) {
	want := make(map[kv.Key]int)
	for i := range names {
		if key, ok := find(&names[i]); ok {
			want[key]++
		}
	}
	if len(want) == 0 {
		return
	}
	for _, k := range t.lockedBy(by) {
		if loan := t.unlock(k, want); loan != nil {
			loan.GiveBack()
		}
		if len(want) == 0 {
			return
		}
	}
}

// lockedBy returns the tasks of the peer `by` that have locks, oldest first.
func (t *peerLookups) lockedBy(by string) (tasks []*peerLookup) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, k := range t.mu.tasks {
		if k.by == by && k.loan != nil {
			tasks = append(tasks, k)
		}
	}
	return tasks
}

// unlock ends locks of the task k: of each object as many as `want` has, if it has so many. It subtracts them from `want`. If the task has
// no more locks, unlock returns its loan, which the caller gives back.
func (t *peerLookups) unlock(k *peerLookup, want map[kv.Key]int) (ended *store.Loan) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if k.loan == nil {
		return nil // forgotten meanwhile
	}
	few, many := want, k.locked
	if len(few) > len(many) {
		few, many = many, few
	}
	for key := range few {
		if n := min(few[key], many[key]); n > 0 {
			takeCount(few, key, n)
			takeCount(many, key, n)
		}
	}
	if len(k.locked) > 0 {
		return nil
	}
	ended = t.endLocked(k)
	if k.places == nil {
		t.removeLocked(slices.Index(t.mu.tasks, k))
	}
	return ended
}

// takeCount subtracts n from the count of key, and removes a count that becomes 0.
func takeCount(counts map[kv.Key]int, key kv.Key, n int) {
	if counts[key] -= n; counts[key] == 0 {
		delete(counts, key)
	}
}
