// SPDX-License-Identifier: Apache-2.0

package tier

import (
	"cmp"
	"context"
	"fmt"
	"hash/maphash"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/kv"
)

// Admission says when a Tier of Admitted writes an object: only if both MinHits and MinAge are reached. A zero field means its default.
type Admission struct {
	MinHits  int           // the first MinHits offers of an object are refused; default 0, none
	MinAge   time.Duration // an object is refused until its first offer is this long ago; default 0
	Remember int           // number of offered objects to remember, 32 bytes each; beyond it the oldest are forgotten; default 1 Mi
}

// Validate reports every field that cannot be used, as options.Errors.
func (a Admission) Validate() error {
	var c options.Checks
	options.Within(&c, "MinHits", a.MinHits, 0, 1<<16)
	options.Within(&c, "MinAge", a.MinAge, 0, 365*24*time.Hour)
	options.Within(&c, "Remember", a.Remember, 0, 1<<28)
	return c.Err()
}

// Admitting is a Tier that passes an object on to another Tier only if its Admission admits the object.
type Admitting struct {
	Tier

	o    Admission
	seed maphash.Seed
	mu   struct {
		sync.Mutex
		young, old map[uint64]offers // by a hash of the object's key; when young is full, it becomes old as a whole
	}
}

// offers says how often an object was offered, and when first.
type offers struct {
	first time.Time
	n     int
}

// Admitted returns a Tier that writes to t only the objects that o admits.
func Admitted(t Tier, o Admission) *Admitting {
	o.Remember = cmp.Or(o.Remember, 1<<20)
	a := &Admitting{Tier: t, o: o, seed: maphash.MakeSeed()}
	a.mu.young, a.mu.old = make(map[uint64]offers), make(map[uint64]offers)
	return a
}

// Write implements Tier. It returns ErrNotKept for an object that was not offered often enough, or
// was first offered too short a time ago.
func (a *Admitting) Write(ctx context.Context, k kv.Key, m Meta, src []byte) error {
	if o := a.offered(k); o.n <= a.o.MinHits {
		return fmt.Errorf("%w: it was offered %d times, and more than %d are needed", ErrNotKept, o.n, a.o.MinHits)
	} else if age := time.Since(o.first); age < a.o.MinAge {
		return fmt.Errorf("%w: it was first offered %v ago, and %v are needed", ErrNotKept, age, a.o.MinAge)
	}
	return a.Tier.Write(ctx, k, m, src)
}

// offered counts an offer of an object. It returns the count, this offer included, and the time of the first offer.
func (a *Admitting) offered(k kv.Key) offers {
	h := maphash.Comparable(a.seed, k)
	a.mu.Lock()
	defer a.mu.Unlock()
	o, ok := a.mu.young[h]
	if !ok {
		if o, ok = a.mu.old[h]; !ok {
			o.first = time.Now()
		}
		if len(a.mu.young) >= max(1, a.o.Remember/2) {
			a.mu.old, a.mu.young = a.mu.young, make(map[uint64]offers)
		}
	}
	o.n++
	a.mu.young[h] = o
	return o
}

// List implements Lister.
func (a *Admitting) List(ctx context.Context, f func(kv.Key, Meta) bool) error {
	return list(ctx, a.Tier, f)
}

// Space implements Sized.
func (a *Admitting) Space() Space { return spaceOf(a.Tier) }

// Requests implements Billed.
func (a *Admitting) Requests() (Requests, bool) { return requestsOf(a.Tier) }
