// SPDX-License-Identifier: Apache-2.0

package tier

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/histogram"
	"github.com/kvasir-kv/kvasir/kv"
)

// Stats are the figures of one tier.
type Stats struct {
	Hits         uint64 `counter:"kvasir_tier_hits_total" help:"Objects that lookups asked the tier for and that were there."`
	Misses       uint64 `counter:"kvasir_tier_misses_total" help:"Objects that lookups asked the tier for and that were not there."`
	Spared       uint64 `counter:"kvasir_tier_absent_total" help:"Of the misses, those that were not asked for, because they were not there a moment before (absent_seconds)."`
	Reads        uint64 `counter:"kvasir_tier_reads_total" help:"Objects read from the tier."`
	ReadBytes    uint64 `counter:"kvasir_tier_read_bytes_total" help:"Bytes of these objects."`
	Unsummed     uint64 `counter:"kvasir_tier_reads_without_checksum_total" help:"Of the objects read, those that others put there without a checksum: only their length was compared."`
	Lost         uint64 `counter:"kvasir_tier_lost_total" help:"Objects that were there and were gone when they were to be read."`
	Corrupt      uint64 `counter:"kvasir_tier_corrupt_total" help:"Objects of another length or checksum than they should have. They are misses."`
	Late         uint64 `counter:"kvasir_tier_late_total" help:"Calls that ended because their time was over."`
	Failures     uint64 `counter:"kvasir_tier_failures_total" help:"Calls that failed otherwise."`
	Writes       uint64 `counter:"kvasir_tier_writes_total" help:"Objects written to the tier, or found there when they were to be written."`
	WrittenBytes uint64 `counter:"kvasir_tier_write_bytes_total" help:"Bytes of these objects."`
	Dropped      uint64 `counter:"kvasir_tier_dropped_total" help:"Objects that the tier did not take: no room, budget used up, seen for the first time, or it rests after failures (then they wait and are offered again)."`

	ReadTime  time.Duration  `counter:"kvasir_tier_read_busy_seconds_total" help:"Time of all reads, those at once added up. Bytes divided by it is the speed of one read."`
	WriteTime time.Duration  `counter:"kvasir_tier_write_busy_seconds_total" help:"Time of all writes, added up."`
	States    map[string]int `gauge:"kvasir_tier_state" label:"state" help:"1 for the state of the tier: ok, unreachable, full, over_budget, read_only, nameless (it has no name for the objects of a model)."`
	InFlight  int64          `gauge:"kvasir_tier_calls" help:"Calls of the tier that go on."`

	ReadRate, WriteRate histogram.Counts // of each object, GB/s; see package tally

	Took map[string]histogram.Counts `histogram:"kvasir_tier_seconds" label:"call" help:"Time of each call that succeeded."`

	Objects int64 `gauge:"kvasir_tier_objects" help:"Objects that the tier keeps, as far as it knows."`
	Used    int64 `gauge:"kvasir_tier_used_bytes" help:"Bytes that they take there."`
	Limit   int64 `gauge:"kvasir_tier_limit_bytes" help:"Bytes that they may take; 0 for no limit."`
	Free    int64 `gauge:"kvasir_tier_free_bytes" help:"Bytes free in the tier's file system; -1 where that is not known."`
	Written int64 `counter:"kvasir_tier_device_written_bytes_total" help:"Bytes written to the device since the start, padding and books included: its wear."`
}

// Counting is a Tier that counts the calls of another one. Its errors are *Error.
type Counting struct {
	observed bool // conditions sees the calls of the tier itself, below its wrappers
	of       Tier
	name     string
	n        struct {
		hits, misses, reads, readBytes, unsummed, lost, corrupt, late, failures, writes, writeBytes, dropped atomic.Uint64
		readTime, writeTime, inFlight                                                                        atomic.Int64
	}
	took map[string]*histogram.Histogram // immutable
	rate struct{ read, write *histogram.Histogram }

	conditions conditions
}

// Counted returns t with its calls counted. name is the operator's name for the tier.
func Counted(t Tier, name string) *Counting {
	c := &Counting{of: t, name: name, took: map[string]*histogram.Histogram{
		"stat": histogram.Times(), "read": histogram.Times(), "write": histogram.Times(),
	}}
	c.rate.read, c.rate.write = histogram.Rates(), histogram.Rates()
	c.conditions.name = name
	c.observed = observe(t, func(write bool, err error) { c.conditions.recordCall(write, false, err) })
	return c
}

// Name returns the operator's name for the tier.
func (c *Counting) Name() string { return c.name }

// Stats returns the figures.
func (c *Counting) Stats() Stats {
	s := Stats{
		Hits: c.n.hits.Load(), Misses: c.n.misses.Load(), Reads: c.n.reads.Load(), ReadBytes: c.n.readBytes.Load(), Unsummed: c.n.unsummed.Load(),
		Lost: c.n.lost.Load(), Corrupt: c.n.corrupt.Load(), Late: c.n.late.Load(), Failures: c.n.failures.Load(), Writes: c.n.writes.Load(),
		WrittenBytes: c.n.writeBytes.Load(), Dropped: c.n.dropped.Load(), ReadTime: time.Duration(c.n.readTime.Load()),
		WriteTime: time.Duration(c.n.writeTime.Load()), InFlight: c.n.inFlight.Load(), Took: make(map[string]histogram.Counts), Free: -1, States: c.conditions.gauge(),
	}
	if r, ok := c.of.(*Remembering); ok {
		s.Spared = r.Spared()
	}
	s.ReadRate, s.WriteRate = c.rate.read.Counts(), c.rate.write.Counts()
	for call, h := range c.took {
		s.Took[call] = h.Counts()
	}
	if sized, ok := c.of.(Sized); ok {
		sp := sized.Space()
		s.Objects, s.Used, s.Limit, s.Free, s.Written = sp.Objects, sp.Used, sp.Limit, sp.Free, sp.Written
	}
	return s
}

// begin counts a running call. The caller must call end when the call ends.
func (c *Counting) begin(call string, busy *atomic.Int64) (end func(error)) {
	began := time.Now()
	c.n.inFlight.Add(1)
	return func(err error) {
		c.n.inFlight.Add(-1)
		if !c.observed {
			c.conditions.recordCall(call == "write", rests(c.of), err)
		}
		took := time.Since(began)
		if busy != nil {
			busy.Add(int64(took))
		}
		if err == nil {
			c.took[call].Took(took)
			return
		}
		c.failed(err)
	}
}

// named adds the name of the tier to an error.
func (c *Counting) named(err error) error {
	if err == nil {
		return nil
	}
	return &Error{c.name, err}
}

// failed counts an error by its kind: as corrupt, lost, dropped, late or a failure. It does not count a call that its caller gave up.
func (c *Counting) failed(err error) {
	_, corrupt := errors.AsType[*CorruptError](err)
	switch {
	case corrupt:
		c.n.corrupt.Add(1)
	case errors.Is(err, ErrMissing):
		c.n.lost.Add(1)
	case errors.Is(err, ErrNotKept), errors.Is(err, ErrResting):
		c.n.dropped.Add(1)
	case errors.Is(err, context.DeadlineExceeded):
		c.n.late.Add(1)
	case errors.Is(err, context.Canceled): // the caller gave up
	default:
		c.n.failures.Add(1)
	}
}

// Stat implements Tier.
func (c *Counting) Stat(ctx context.Context, keys []kv.Key, metas []Meta) error {
	end := c.begin("stat", nil)
	err := c.of.Stat(ctx, keys, metas)
	end(err)
	if err != nil {
		return c.named(err)
	}
	hits := uint64(0)
	for i := range keys {
		if metas[i].Len > 0 {
			hits++
		}
	}
	c.n.hits.Add(hits)
	c.n.misses.Add(uint64(len(keys)) - hits)
	return nil
}

// Read implements Tier.
func (c *Counting) Read(ctx context.Context, k kv.Key, dst []byte) (m Meta, err error) {
	err = c.read(len(dst), func() (Meta, error) {
		m, err = c.of.Read(ctx, k, dst)
		return m, err
	})
	return m, err
}

// ReadSummed implements Summing.
func (c *Counting) ReadSummed(ctx context.Context, k kv.Key, dst []byte) (m Meta, sum uint64, err error) {
	err = c.read(len(dst), func() (Meta, error) {
		m, sum, err = ReadSummed(ctx, c.of, k, dst)
		return m, err
	})
	return m, sum, err
}

// read counts a read of `bytes` bytes.
func (c *Counting) read(bytes int, f func() (Meta, error)) error {
	end, began := c.begin("read", &c.n.readTime), time.Now()
	m, err := f()
	end(err)
	if err == nil {
		c.rate.read.Moved(int64(bytes), time.Since(began))
		c.n.reads.Add(1)
		c.n.readBytes.Add(uint64(bytes))
		if m.NoSum {
			c.n.unsummed.Add(1)
		}
	}
	return c.named(err)
}

// Write implements Tier.
func (c *Counting) Write(ctx context.Context, k kv.Key, m Meta, src []byte) error {
	end, began := c.begin("write", &c.n.writeTime), time.Now()
	err := c.of.Write(ctx, k, m, src)
	end(err)
	if err == nil {
		c.rate.write.Moved(int64(len(src)), time.Since(began))
		c.n.writes.Add(1)
		c.n.writeBytes.Add(uint64(len(src)))
	}
	return c.named(err)
}

// Delete implements Tier.
func (c *Counting) Delete(ctx context.Context, keys []kv.Key) error { return c.of.Delete(ctx, keys) }

// List implements Lister.
func (c *Counting) List(ctx context.Context, f func(kv.Key, Meta) bool) error {
	return list(ctx, c.of, f)
}

// Space implements Sized.
func (c *Counting) Space() Space { return spaceOf(c.of) }

// Close implements Tier.
func (c *Counting) Close() error { return c.of.Close() }

// ErrNoList means that a tier cannot list its objects.
var ErrNoList = errors.New("tier: it cannot list its objects")

func list(ctx context.Context, t Tier, f func(kv.Key, Meta) bool) error {
	if l, ok := t.(Lister); ok {
		return l.List(ctx, f)
	}
	return ErrNoList
}

func spaceOf(t Tier) Space {
	if s, ok := t.(Sized); ok {
		return s.Space()
	}
	return Space{Free: -1}
}
