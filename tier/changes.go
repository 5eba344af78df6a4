// SPDX-License-Identifier: Apache-2.0

package tier

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"

	"github.com/kvasir-kv/kvasir/internal/container"
	"github.com/kvasir-kv/kvasir/kv"
)

// Change says that an object is in a tier or, with Removed, that it is not.
type Change struct {
	Key     kv.Key
	Tier    uint8 // its number, from 1
	Removed bool
	All     bool   // with Removed: no earlier change of the tier holds any more; Key is not set
	Model   string // with All: only the model's objects; empty for all objects
}

// Changes is a log of the last changes in the contents of tiers. Each change has a number. Nothing is recorded before Watch. Its methods
// are safe for concurrent use. Under its mutex only the function of Translate takes another mutex. A change may be recorded more than once.
type Changes struct {
	watched atomic.Bool
	news    chan struct{}
	mu      struct {
		sync.Mutex
		container.Ring[Change]
		back  func(kv.Key) (kv.Key, bool)
		after uint64 // changes before this number no longer hold
	}
}

// Translate sets f, which turns a key that a tier uses into the key of the object. Changes of keys for which f reports false are not
// recorded.
func (c *Changes) Translate(f func(kv.Key) (kv.Key, bool)) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.back = f
}

// Forget makes all recorded changes invalid: After reports to each reader that changes are lost.
func (c *Changes) Forget() {
	if c == nil || !c.watched.Load() {
		return
	}
	c.mu.Lock()
	c.mu.Add(Change{Removed: true})
	c.mu.after = c.mu.Last()
	c.mu.Unlock()
	select {
	case c.news <- struct{}{}:
	default:
	}
}

// ForgetTier records that no earlier change of a tier holds any more, for the objects of one model or, if model is empty, for all objects.
func (c *Changes) ForgetTier(tier uint8, model string) {
	if c == nil || !c.watched.Load() {
		return
	}
	c.mu.Lock()
	c.mu.Add(Change{Tier: tier, Removed: true, All: true, Model: model})
	c.mu.Unlock()
	select {
	case c.news <- struct{}{}:
	default:
	}
}

// MaxTiers bounds the tiers of one Changes, because a Change has the number of its tier in one byte. Package adapter refuses to open more.
const MaxTiers = 255

// NewChanges returns Changes that record nothing yet.
func NewChanges() *Changes { return &Changes{news: make(chan struct{}, 1)} }

// Watch starts the recording. At least the last `size` changes are kept. A second call has no effect.
func (c *Changes) Watch(size int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.Keep(size)
	c.watched.Store(true)
}

// News receives one value after one or more changes. Only one reader may use it.
func (c *Changes) News() <-chan struct{} { return c.news }

// Note records that the object k is in a tier (`there` is true) or is not. On nil Changes it does nothing.
func (c *Changes) Note(tier uint8, k kv.Key, there bool) {
	if c == nil || !c.watched.Load() {
		return
	}
	if !c.add(tier, k, there) {
		return
	}
	select {
	case c.news <- struct{}{}:
	default:
	}
}

func (c *Changes) add(tier uint8, k kv.Key, there bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.back != nil {
		var ok bool
		if k, ok = c.mu.back(k); !ok {
			return false
		}
	}
	c.mu.Add(Change{Key: k, Tier: tier, Removed: !there})
	return true
}

// Last returns the number of the newest change, 0 for none.
func (c *Changes) Last() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.Last()
}

// After copies into dst the changes whose numbers are above `number`, oldest first: see container.Ring. lost says that some of them are no
// longer recorded.
func (c *Changes) After(number uint64, dst []Change) (n int, lost bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if number < c.mu.after {
		return 0, true
	}
	return c.mu.Ring.After(number, dst)
}

// Recording wraps a Tier and records in Changes what its calls reveal of the contents. If other programs write to
// the tier, or the tier evicts by itself, the record of an object is wrong until the next call for that object.
type Recording struct {
	Tier
	changes *Changes
	number  uint8

	mu struct {
		sync.Mutex
		calls map[kv.Key]*calls
	}
}

// calls counts the running calls for one object. Calls that run at the same time may report their results in any order.
type calls struct {
	n             int
	wrote, forgot bool // a Write, a Delete began since n was last 0
}

// Recorded returns t, with its calls recorded in c as those of tier number. Without c it returns t itself.
func Recorded(t Tier, c *Changes, number uint8) Tier {
	if c == nil {
		return t
	}
	n := &Recording{Tier: t, changes: c, number: number}
	n.mu.calls = make(map[kv.Key]*calls)
	return n
}

// kind is what a call does with an object.
type kind uint8

const (
	looks kind = iota
	writes
	forgets
)

// begin counts a call of the kind `what` for the objects of keys as running, until end.
func (n *Recording) begin(keys []kv.Key, what kind) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, k := range keys {
		c := n.mu.calls[k]
		if c == nil {
			c = new(calls)
			n.mu.calls[k] = c
		}
		c.n++
		c.wrote, c.forgot = c.wrote || what == writes, c.forgot || what == forgets
	}
}

// result says what a call reveals of an object.
type result uint8

const (
	resultUnknown result = iota
	there
	absent
)

// end ends what begin counted, and records what the call reveals: of(i) is its result for keys[i]. The result of a lookup or read says
// nothing if a Write or Delete of the object ran at the same time. A Write counts as a removal if a Delete ran at the same time.
func (n *Recording) end(keys []kv.Key, what kind, of func(i int) result) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for i, k := range keys {
		c := n.mu.calls[k]
		if c.n--; c.n == 0 {
			delete(n.mu.calls, k)
		}
		got := of(i)
		switch {
		case what == looks && (c.wrote || c.forgot):
			got = resultUnknown
		case what == writes && c.forgot:
			got = absent
		}
		if got != resultUnknown { // under the mutex, so that changes are recorded in the order in which calls end
			n.changes.Note(n.number, k, got == there)
		}
	}
}

// unwatched reports whether there is no watcher; then calls are not recorded. A watcher that begins during a call does not see
// the result of that call.
func (n *Recording) unwatched() bool { return !n.changes.watched.Load() }

// Stat implements Tier.
func (n *Recording) Stat(ctx context.Context, keys []kv.Key, metas []Meta) error {
	if n.unwatched() {
		return n.Tier.Stat(ctx, keys, metas)
	}
	n.begin(keys, looks)
	err := errUnsaid
	defer func() {
		n.end(keys, looks, func(i int) result {
			switch {
			case err != nil:
				return resultUnknown
			case metas[i].Len > 0:
				return there
			}
			return absent
		})
	}()
	err = n.Tier.Stat(ctx, keys, metas)
	return err
}

// errUnsaid is the result of a call until the call returns. It stays the result of a call that panics.
var errUnsaid = errors.New("tier: the call panicked")

// read calls f, a read of the object k, and records what the result says about the object.
func (n *Recording) read(k kv.Key, f func() error) error {
	if n.unwatched() {
		return f()
	}
	keys := []kv.Key{k}
	n.begin(keys, looks)
	err := errUnsaid
	defer func() {
		n.end(keys, looks, func(int) result {
			_, corrupt := errors.AsType[*CorruptError](err)
			switch {
			case err == nil:
				return there
			case corrupt, errors.Is(err, ErrMissing):
				return absent
			}
			return resultUnknown
		})
	}()
	err = f()
	return err
}

// Read implements Tier.
func (n *Recording) Read(ctx context.Context, k kv.Key, dst []byte) (m Meta, err error) {
	err = n.read(k, func() (err error) {
		m, err = n.Tier.Read(ctx, k, dst)
		return err
	})
	return m, err
}

// ReadSummed implements Summing.
func (n *Recording) ReadSummed(ctx context.Context, k kv.Key, dst []byte) (m Meta, sum uint64, err error) {
	err = n.read(k, func() (err error) {
		m, sum, err = ReadSummed(ctx, n.Tier, k, dst)
		return err
	})
	return m, sum, err
}

// Write implements Tier.
func (n *Recording) Write(ctx context.Context, k kv.Key, m Meta, src []byte) error {
	if n.unwatched() {
		return n.Tier.Write(ctx, k, m, src)
	}
	keys := []kv.Key{k}
	n.begin(keys, writes)
	err := errUnsaid
	defer func() {
		n.end(keys, writes, func(int) result {
			switch {
			case err == nil:
				return there
			case errors.Is(err, ErrNotKept), errors.Is(err, ErrResting):
				return resultUnknown
			}
			return absent // a failed write may have removed the old object
		})
	}()
	err = n.Tier.Write(ctx, k, m, src)
	return err
}

// Delete implements Tier.
func (n *Recording) Delete(ctx context.Context, keys []kv.Key) error {
	if n.unwatched() {
		return n.Tier.Delete(ctx, keys)
	}
	n.begin(keys, forgets)
	var err error
	defer func() {
		n.end(keys, forgets, func(int) result {
			if errors.Is(err, ErrNotKept) { // this tier deletes nothing
				return resultUnknown
			}
			return absent
		})
	}()
	err = n.Tier.Delete(ctx, keys)
	return err
}

// Hottest implements Ranking.
func (n *Recording) Hottest(ctx context.Context, most int, f func(kv.Key, Meta) bool) error {
	return Hottest(ctx, n.Tier, most, f)
}

// List implements Lister.
func (n *Recording) List(ctx context.Context, f func(kv.Key, Meta) bool) error {
	return list(ctx, n.Tier, f)
}

// Space implements Sized.
func (n *Recording) Space() Space { return spaceOf(n.Tier) }

// Requests implements Billed.
func (n *Recording) Requests() (Requests, bool) { return requestsOf(n.Tier) }
