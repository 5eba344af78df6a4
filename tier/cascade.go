// SPDX-License-Identifier: Apache-2.0

package tier

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
)

// CascadeOptions configure a Cascade. A zero field means its default.
type CascadeOptions struct {
	// FillBytes bounds the bytes of fills that wait or run; default 64 MiB. A fill writes an object that a read found in a lower tier to
	// the tiers above, in the background. A fill beyond the limit is left out; Skipped counts it.
	FillBytes int64
	NoFill    bool
	FillTime  time.Duration // time limit of one fill; default 30 s
}

// Cascading is a Tier made of several: it reads an object from the first tier that has it, and
// writes to all.
type Cascading struct {
	tiers []Tier // in the order in which they are asked
	o     CascadeOptions

	life  context.Context // ends with Close
	end   context.CancelFunc
	fills sync.WaitGroup
	mu    struct {
		sync.Mutex
		closed   bool
		filling  map[kv.Key]*fill
		deleting map[kv.Key]int // number of running Deletes of a key; meanwhile it is not filled
		bytes    int64
		skipped  uint64
	}
}

// fill is an object that is being written to upper tiers.
type fill struct {
	key    kv.Key
	bytes  int64
	wanted bool          // false once the object was deleted; guarded by Cascading.mu
	done   chan struct{} // closed when it has ended
}

// Cascade makes one Tier of several.
func Cascade(o CascadeOptions, tiers ...Tier) *Cascading {
	o.FillBytes, o.FillTime = cmp.Or(o.FillBytes, 64<<20), cmp.Or(o.FillTime, 30*time.Second)
	c := &Cascading{tiers: tiers, o: o}
	c.life, c.end = context.WithCancel(context.Background())
	c.mu.filling, c.mu.deleting = make(map[kv.Key]*fill), make(map[kv.Key]int)
	return c
}

// Stat implements Tier. It asks each tier only for the objects that the upper tiers lack. A tier
// that fails counts as empty. If all fail, Stat returns their errors.
func (c *Cascading) Stat(ctx context.Context, keys []kv.Key, metas []Meta) error {
	clear(metas[:len(keys)])
	var errs []error
	rest, at := keys, []int(nil)
	for i, t := range c.tiers {
		found := make([]Meta, len(rest))
		if err := t.Stat(ctx, rest, found); err != nil {
			errs = append(errs, err)
			continue
		}
		var missing []kv.Key
		var missingAt []int
		for j := range rest {
			to := j
			if at != nil {
				to = at[j]
			}
			if metas[to] = found[j]; found[j].Len == 0 {
				missing, missingAt = append(missing, rest[j]), append(missingAt, to)
			}
		}
		if rest, at = missing, missingAt; len(rest) == 0 || i == len(c.tiers)-1 {
			break
		}
	}
	if len(errs) == len(c.tiers) {
		return errors.Join(errs...)
	}
	return ctx.Err()
}

// Read implements Tier. The error is the first one that is not ErrMissing, else ErrMissing.
func (c *Cascading) Read(ctx context.Context, k kv.Key, dst []byte) (m Meta, err error) {
	err = c.read(ctx, k, dst, func(t Tier) (Meta, error) {
		m, err = t.Read(ctx, k, dst)
		return m, err
	})
	return m, err
}

// ReadSummed implements Summing, as Read does.
func (c *Cascading) ReadSummed(ctx context.Context, k kv.Key, dst []byte) (m Meta, sum uint64, err error) {
	err = c.read(ctx, k, dst, func(t Tier) (Meta, error) {
		m, sum, err = ReadSummed(ctx, t, k, dst)
		return m, err
	})
	return m, sum, err
}

func (c *Cascading) read(ctx context.Context, k kv.Key, dst []byte, f func(Tier) (Meta, error)) error {
	var worst error
	for i, t := range c.tiers {
		m, err := f(t)
		if err == nil {
			if i > 0 && !m.NoSum { // with NoSum the upper tiers would compute a checksum of unverified bytes
				c.fill(k, m, dst, c.tiers[:i])
			}
			return nil
		}
		if worst == nil || errors.Is(worst, ErrMissing) {
			worst = err
		}
		if ctx.Err() != nil {
			break
		}
	}
	return worst
}

// fill writes an object to upper tiers, in the background. It does nothing if a fill of the
// object is running.
func (c *Cascading) fill(k kv.Key, m Meta, data []byte, upper []Tier) {
	f := c.beginFill(k, int64(len(data)))
	if f == nil {
		return
	}
	begun := false
	defer func() {
		if !begun { // bytes.Clone panicked: a peer took the memory of data away
			c.endFill(f)
		}
	}()
	data = bytes.Clone(data)
	begun = true
	go func() {
		defer c.endFill(f)
		ctx, cancel := context.WithTimeout(c.life, c.o.FillTime)
		defer cancel()
		for _, t := range upper {
			if c.isWanted(f) {
				_ = t.Write(ctx, k, m, data) // the tier counts it
			}
		}
	}()
}

// beginFill registers a fill of n bytes. It returns nil if fills are off, the tier is closed, the object is being filled or deleted, or
// FillBytes is used up.
func (c *Cascading) beginFill(k kv.Key, n int64) *fill {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.o.NoFill || c.mu.closed || c.mu.filling[k] != nil || c.mu.deleting[k] > 0 {
		return nil
	}
	if c.mu.bytes+n > c.o.FillBytes {
		c.mu.skipped++
		return nil
	}
	f := &fill{key: k, bytes: n, wanted: true, done: make(chan struct{})}
	c.mu.filling[k] = f
	c.mu.bytes += n
	c.fills.Add(1)
	return f
}

func (c *Cascading) endFill(f *fill) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.mu.filling, f.key)
	c.mu.bytes -= f.bytes
	close(f.done)
	c.fills.Done()
}

func (c *Cascading) isWanted(f *fill) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return f.wanted
}

// Skipped is how many objects were not written to upper tiers because FillBytes was used up.
func (c *Cascading) Skipped() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.skipped
}

// Write implements Tier. It writes to all tiers and succeeds if one of them keeps the object.
func (c *Cascading) Write(ctx context.Context, k kv.Key, m Meta, src []byte) error {
	var errs []error
	for _, t := range c.tiers {
		if err := t.Write(ctx, k, m, src); err != nil {
			errs = append(errs, err)
		}
	}
	if len(errs) < len(c.tiers) {
		return nil
	}
	return errors.Join(errs...)
}

// Delete implements Tier. It waits for fills of the same objects, which would otherwise write
// deleted objects again.
func (c *Cascading) Delete(ctx context.Context, keys []kv.Key) error {
	fills := c.beginDelete(keys)
	defer c.endDelete(keys)
	for _, f := range fills {
		select {
		case <-f.done:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	var errs []error
	for _, t := range c.tiers {
		errs = append(errs, t.Delete(ctx, keys))
	}
	return errors.Join(errs...)
}

func (c *Cascading) beginDelete(keys []kv.Key) (fills []*fill) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, k := range keys {
		c.mu.deleting[k]++
		if f := c.mu.filling[k]; f != nil {
			f.wanted = false
			fills = append(fills, f)
		}
	}
	return fills
}

func (c *Cascading) endDelete(keys []kv.Key) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, k := range keys {
		if c.mu.deleting[k]--; c.mu.deleting[k] == 0 {
			delete(c.mu.deleting, k)
		}
	}
}

// List implements Lister. It lists each object once, with the Meta of the first tier that has the object. It leaves out tiers that cannot
// list, and returns an error if no tier can.
func (c *Cascading) List(ctx context.Context, f func(kv.Key, Meta) bool) error {
	seen, more, able := make(map[kv.Key]struct{}), true, false
	for _, t := range c.tiers {
		l, ok := t.(Lister)
		if !ok || !more {
			continue
		}
		err := l.List(ctx, func(k kv.Key, m Meta) bool {
			if _, ok := seen[k]; ok {
				return true
			}
			seen[k] = struct{}{}
			more = f(k, m)
			return more
		})
		if errors.Is(err, ErrNoList) {
			continue
		}
		if able = true; err != nil {
			return err
		}
	}
	if !able {
		return ErrNoList
	}
	return nil
}

// Close implements Tier. Fills end first.
func (c *Cascading) Close() error {
	c.stop()
	c.fills.Wait()
	return closeAll(c.tiers)
}

func (c *Cascading) stop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.closed = true
	c.end()
}

func closeAll(tiers []Tier) error {
	var errs []error
	for _, t := range tiers {
		errs = append(errs, t.Close())
	}
	return errors.Join(errs...)
}
