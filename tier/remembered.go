// SPDX-License-Identifier: Apache-2.0

package tier

import (
	"cmp"
	"context"
	"errors"
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/kv"
)

// Absence says for how long a Tier is not asked again for an object that was missing. An object that another
// server writes meanwhile is found after that time at the latest.
type Absence struct {
	For      time.Duration // 0: the tier is always asked
	Remember int           // number of objects to remember; the oldest are dropped; default 64 Ki, about 50 bytes each
}

// Validate reports every field that cannot be used, as options.Errors.
func (a Absence) Validate() error {
	var c options.Checks
	options.Within(&c, "For", a.For, 0, time.Hour)
	options.Within(&c, "Remember", a.Remember, 0, 1<<24)
	return c.Err()
}

// Remembering is a Tier that remembers for a short time which objects another one did not have.
type Remembering struct {
	of     Tier
	o      Absence
	seed   maphash.Seed
	spared atomic.Uint64

	mu struct {
		sync.Mutex
		young, old map[uint64]time.Time // by a hash of the key: until when it counts as missing; when young is full, it becomes old as a whole

		// writes counts the writes that ended, by a part of the key's hash. If the count changes during a Stat, the Stat remembers no
		// missing object with that hash.
		writes [1 << 12]uint32
	}
}

// Remembered returns a Tier that remembers which objects t did not have.
func Remembered(t Tier, o Absence) *Remembering {
	o.Remember = cmp.Or(o.Remember, 1<<16)
	r := &Remembering{of: t, o: o, seed: maphash.MakeSeed()}
	r.mu.young, r.mu.old = make(map[uint64]time.Time), make(map[uint64]time.Time)
	return r
}

// Spared returns for how many objects the tier was not asked, because they were missing a moment before.
func (r *Remembering) Spared() uint64 { return r.spared.Load() }

// Resting reports whether the tier rests after failures.
func (r *Remembering) Resting() bool { return rests(r.of) }

// observe sets f to be called with the end of each call of the tier itself. It reports whether there is a Bounding below, which makes these
// calls of f.
func (r *Remembering) observe(f func(write bool, err error)) bool { return observe(r.of, f) }

// Stat implements Tier. An object that was missing a moment ago counts as missing.
func (r *Remembering) Stat(ctx context.Context, keys []kv.Key, metas []Meta) error {
	clear(metas[:len(keys)])
	hashes := make([]uint64, len(keys))
	for i := range keys {
		hashes[i] = maphash.Comparable(r.seed, keys[i])
	}
	now := time.Now()
	at, seen := r.unknown(hashes, now)
	r.spared.Add(uint64(len(keys) - len(at)))
	if len(at) == 0 {
		return ctx.Err()
	}
	asked, found := make([]kv.Key, len(at)), make([]Meta, len(at))
	for j, i := range at {
		asked[j] = keys[i]
	}
	switch err := r.ask(ctx, asked, found); {
	case errors.Is(err, errUnknown):
		return nil
	case err != nil:
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for j, i := range at {
		if metas[i] = found[j]; found[j].Len == 0 && *r.writesLocked(hashes[i]) == seen[j] {
			r.noteLocked(hashes[i], now.Add(r.o.For))
		}
	}
	return nil
}

// errUnknown means that the contents are unknown; it counts as a miss, and is not remembered.
var errUnknown = errors.New("tier: not known whether the object is there")

func (r *Remembering) ask(ctx context.Context, keys []kv.Key, metas []Meta) error {
	b, ok := r.of.(*Bounding)
	if !ok {
		return r.of.Stat(ctx, keys, metas)
	}
	err := b.stat(ctx, keys, metas)
	if errors.Is(err, ErrResting) {
		return errUnknown
	}
	return err
}

func (r *Remembering) writesLocked(hash uint64) *uint32 {
	return &r.mu.writes[hash%uint64(len(r.mu.writes))]
}

// unknown returns the indices of the objects that are not remembered as missing, so the tier must be asked. seen[i] is the count of ended
// writes for the object at[i].
func (r *Remembering) unknown(hashes []uint64, now time.Time) (at []int, seen []uint32) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, h := range hashes {
		until, ok := r.mu.young[h]
		if !ok {
			until, ok = r.mu.old[h]
		}
		if !ok || !now.Before(until) {
			at, seen = append(at, i), append(seen, *r.writesLocked(h))
		}
	}
	return at, seen
}

func (r *Remembering) noteLocked(hash uint64, until time.Time) {
	if len(r.mu.young) >= max(1, r.o.Remember/2) {
		r.mu.old, r.mu.young = r.mu.young, make(map[uint64]time.Time)
	}
	r.mu.young[hash] = until
}

// written forgets that an object was missing.
func (r *Remembering) written(k kv.Key) {
	h := maphash.Comparable(r.seed, k)
	r.mu.Lock()
	defer r.mu.Unlock()
	*r.writesLocked(h)++
	delete(r.mu.young, h)
	delete(r.mu.old, h)
}

// Read implements Tier.
func (r *Remembering) Read(ctx context.Context, k kv.Key, dst []byte) (Meta, error) {
	return r.of.Read(ctx, k, dst)
}

// ReadSummed implements Summing.
func (r *Remembering) ReadSummed(ctx context.Context, k kv.Key, dst []byte) (Meta, uint64, error) {
	return ReadSummed(ctx, r.of, k, dst)
}

// Write implements Tier. It forgets that the object was missing.
func (r *Remembering) Write(ctx context.Context, k kv.Key, m Meta, src []byte) error {
	defer r.written(k)
	return r.of.Write(ctx, k, m, src)
}

// Delete implements Tier.
func (r *Remembering) Delete(ctx context.Context, keys []kv.Key) error { return r.of.Delete(ctx, keys) }

// List implements Lister.
func (r *Remembering) List(ctx context.Context, f func(kv.Key, Meta) bool) error {
	return list(ctx, r.of, f)
}

// Space implements Sized.
func (r *Remembering) Space() Space { return spaceOf(r.of) }

// Requests implements Billed.
func (r *Remembering) Requests() (Requests, bool) { return requestsOf(r.of) }

// Close implements Tier.
func (r *Remembering) Close() error { return r.of.Close() }
