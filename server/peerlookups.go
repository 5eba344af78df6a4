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
	// peerLookupLife is how long objects wait to be unlocked, as LMCache's read locks do.
	peerLookupLife = 300 * time.Second

	// maxPeerLookups bounds the lookups of all peers: about 10 KB each with 100 keys.
	maxPeerLookups = 1024

	// peerLoans and allLoans bound what one peer, and all peers, may have locked, of the pool's bytes.
	peerLoans, allLoans = 0.25, 0.5

	// maxPeerKeys bounds the keys of all lookups that are remembered: 100 MB.
	maxPeerKeys = 1 << 20
)

// keyFinder finds the name of an object that a peer names; false for what this node cannot have.
type keyFinder func(*lmcache.ObjectKey) (kv.Key, bool)

// peerLookups answers LMCache's peer-to-peer operations: a peer names objects, learns where in the pool they are, reads
// them and says so. Until then, or for the life of a read lock, they stay in place.
//
// The operations are p2p_lookup_and_lock, p2p_query_lookup_results and p2p_unlock_objects of lmcache 0.5.6. Its servers
// read one another's pools by a transfer engine of their own; this one runs none, so places are for peers that map the
// pool.
//
// It holds the lookups whose objects are not all unlocked, or whose results were not fetched
// yet. Beyond 1,024 lookups it forgets the oldest one of the peer with the most, beyond a million
// keys that of the peer with the most keys, and unlocks its objects: no peer can end another's
// locks by asking often. Methods are safe for concurrent use.
type peerLookups struct {
	store *store.Store
	share struct{ peer, all float64 } // immutable: peerLoans and allLoans; tests have others

	locking sync.Mutex // held from the look at the shares to the lookup's entry; before the store's mutex and mu
	mu      struct {   // a leaf
		sync.Mutex
		last  int64
		tasks []*peerLookup  // oldest first
		keys  int            // of all of them
		lent  int64          // bytes of all loans
		conns map[string]int // connections of each peer that asks
	}
}

type peerLookup struct {
	id     int64
	by     string
	began  time.Time
	places []lmcache.PeerPlace // nil once they were asked for
	locked map[kv.Key]int      // how often
	loan   *store.Loan         // nil where nothing is locked
	bytes  int64               // of the loan
	keys   int
}

// newPeerLookups returns the lookups of a store.
func newPeerLookups(s *store.Store) *peerLookups {
	t := &peerLookups{store: s}
	t.share.peer, t.share.all = peerLoans, allLoans
	t.mu.conns = make(map[string]int)
	return t
}

// mayLock returns how many bytes a peer may lock now.
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

// Join notes a connection of a peer that asks.
func (t *peerLookups) Join(by string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.conns[by]++
}

// Leave notes that a connection of a peer ended. With its last one all that it locked is unlocked.
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

// endLocked takes a task's loan from it; nil where it has none.
func (t *peerLookups) endLocked(k *peerLookup) (loan *store.Loan) {
	if loan, k.loan = k.loan, nil; loan != nil {
		t.mu.lent -= k.bytes
	}
	return loan
}

// Lookup locks, of each shard and object group, the objects before the first that is not
// there, and returns the id by which by asks for their places. Ids count from 0. Where too
// many transfers are in progress nothing is locked.
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

// lock locks the objects of a lookup, within the shares of its peer and of all, and adds the lookup. It returns the loans of those
// that had to go.
func (t *peerLookups) lock(k *peerLookup, keys []kv.Key, at []int) (forgotten []*store.Loan) {
	t.locking.Lock() // others may not lock what this one may
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

// Len is how many lookups there are whose places were not asked for yet.
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

// add returns the loans of those that had to go.
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

// oldestOfMostLocked returns the oldest task of the peer whose tasks cost most together; of
// equal peers the one with the oldest.
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

// Result returns the places of by's lookup, one for each key, once; ok is false for a lookup
// that is unknown or older than peerLookupLife, or whose result was returned before.
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

// Unlock ends one lock of by on each of the objects, that of its oldest lookup. What a lookup
// locked stays in place until all of it is unlocked. It takes a map access for each name, and
// at most one for each object that by has locked; others wait for one lookup's at most.
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

// lockedBy returns by's tasks that have locks, oldest first.
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

// unlock ends those locks of a task that are wanted, and takes them from want. It returns the
// loan of a task that has no locks any more.
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

// takeCount takes n from a count, which goes with the last one.
func takeCount(counts map[kv.Key]int, key kv.Key, n int) {
	if counts[key] -= n; counts[key] == 0 {
		delete(counts, key)
	}
}
