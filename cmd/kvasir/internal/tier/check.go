// SPDX-License-Identifier: Apache-2.0

package tier

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/internal/safelog"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/adapter"
	"github.com/kvasir-kv/kvasir/tier/seal"
)

// Verdict is the result of a check. Its number is the exit code of kvasir tier check.
type Verdict int

// The verdicts, the best first.
const (
	Good    Verdict = iota // every operation works
	Partial                // objects can be read, but another operation does not work
	Useless                // the tier cannot be used
)

// checkModel is the model of the objects that a check writes. Some layouts name objects by models.
const checkModel = "kvasir-tier-check"

// checkTime is how long each operation on the tier may take during a check.
const checkTime = 30 * time.Second

// checking is one check of a tier.
type checking struct {
	w       io.Writer
	t       tier.Tier
	verdict Verdict
	faults  []string // sentences about what does not work
}

func (c *checking) printf(format string, args ...any) {
	fmt.Fprintf(c.w, format+"\n", args...)
}

// fault writes a sentence about something that does not work. The verdict becomes v if it was better before.
func (c *checking) fault(v Verdict, format string, args ...any) {
	c.verdict = max(c.verdict, v)
	c.faults = append(c.faults, fmt.Sprintf(format, args...))
	c.printf(format, args...)
}

// CheckTier tries every operation that a server needs of a tier. It writes objects of its own, and measures, compares and removes them.
// It writes a sentence about each operation to w. text names the tier. size is the size of an object in bytes, and objects is how many
// objects are measured.
func CheckTier(ctx context.Context, w io.Writer, log *slog.Logger, keys seal.Source, text string, size int64, objects int) Verdict {
	v, _ := TierFaults(ctx, w, log, keys, text, size, objects)
	return v
}

// TierFaults does what CheckTier does, and also returns the sentences about what does not work.
func TierFaults(ctx context.Context, w io.Writer, log *slog.Logger, keys seal.Source, text string, size int64, objects int) (Verdict, []string) {
	c := &checking{w: w}
	if place, err := adapter.PlaceOf(text); err == nil {
		c.printf("Objects go to %s.", printable(safelog.HideLogin(place)))
	}
	names := tier.NewNames()
	err := withTier(text, adapter.Options{Names: names, Log: log, Existing: true, Keys: keys}, func(t tier.Tier) error {
		c.t = t
		c.run(ctx, names, size, objects)
		return nil
	})
	if err != nil {
		c.fault(Useless, "The tier cannot be used: %s.", printable(oneLine(err)))
	}
	return c.verdict, c.faults
}

func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

func (c *checking) run(ctx context.Context, names *tier.Names, size int64, objects int) {
	var ns kv.Namespace
	_, _ = rand.Read(ns[:]) // this never fails
	names.Add(ns, checkModel, nil)
	keys := make([]kv.Key, objects)
	for i := range keys {
		keys[i] = kv.Key{Namespace: ns, Rank: 1 << 24}
		_, _ = rand.Read(keys[i].Chunk[:])
	}
	call := func(f func(ctx context.Context) error) (time.Duration, error) {
		ctx, cancel := context.WithTimeout(ctx, checkTime)
		defer cancel()
		began := time.Now()
		err := f(ctx)
		return time.Since(began), err
	}
	metas := make([]tier.Meta, 1)
	took, err := call(func(ctx context.Context) error { return c.t.Stat(ctx, keys[:1], metas) })
	if err != nil {
		c.fault(Useless, "The tier does not answer: %s.", printable(oneLine(err)))
		return
	}
	c.printf("The tier answers: a lookup of one chunk takes %s.", took.Round(10*time.Microsecond))
	b := make([]byte, size)
	_, _ = rand.Read(b)
	m := tier.Meta{Len: size, Sum: xxh3.Hash(b)}
	var writing, reading time.Duration
	written := 0
	defer func() { c.remove(ctx, keys[:written], call) }()
	for i := range keys {
		took, err := call(func(ctx context.Context) error { return c.t.Write(ctx, keys[i], m, b) })
		if err != nil {
			c.refused(err)
			break
		}
		writing += took
		written++
	}
	if written == 0 {
		return
	}
	c.printf("This user may write: %d objects of %s at %s.", written, kv.FormatBytes(size), speed(int64(written)*size, writing))
	got, unsummed := make([]byte, size), false
	for _, k := range keys[:written] {
		var meta tier.Meta
		clear(got)
		took, err := call(func(ctx context.Context) (err error) { meta, err = c.t.Read(ctx, k, got); return err })
		if err != nil {
			c.fault(Useless, "What was written cannot be read: %s.", printable(oneLine(err)))
			return
		}
		if !bytes.Equal(got, b) || !meta.NoSum && meta.Sum != m.Sum {
			c.fault(Useless, "What is read is not what was written.")
			return
		}
		reading, unsummed = reading+took, unsummed || meta.NoSum
	}
	c.printf("This user may read, and reads what was written, at %s.", speed(int64(written)*size, reading))
	if unsummed {
		c.printf("Objects have no checksum here: a damaged one of the right length is served.")
	} else {
		c.printf("Objects have checksums: a damaged one is a miss.")
	}
}

// refused writes why the tier did not take an object.
func (c *checking) refused(err error) {
	switch {
	case errors.Is(err, tier.ErrReadOnly):
		c.fault(Partial, "This user may not write: %s. A server reads what is there.", printable(oneLine(err)))
	case errors.Is(err, tier.ErrFull), errors.Is(err, tier.ErrBudget):
		c.fault(Partial, "The tier takes nothing now: %s.", printable(oneLine(err)))
	case errors.Is(err, tier.ErrNotKept):
		c.fault(Partial, "The tier did not take an object: %s.", printable(oneLine(err)))
	default:
		c.fault(Partial, "A write failed: %s.", printable(oneLine(err)))
	}
}

// remove deletes the objects that the check wrote, and checks that they are gone.
func (c *checking) remove(ctx context.Context, keys []kv.Key, call func(func(context.Context) error) (time.Duration, error)) {
	if len(keys) == 0 {
		return
	}
	_, err := call(func(ctx context.Context) error { return c.t.Delete(ctx, keys) })
	metas := make([]tier.Meta, len(keys))
	if err == nil {
		_, err = call(func(ctx context.Context) error { return c.t.Stat(ctx, keys, metas) })
	}
	left := 0
	for _, m := range metas {
		if m.Len > 0 {
			left++
		}
	}
	switch {
	case errors.Is(err, tier.ErrNotKept):
		c.fault(Partial, "The tier deletes nothing: %s. %d objects of model %s stay.", printable(oneLine(err)), len(keys), checkModel)
	case err != nil:
		c.fault(Partial, "This user may not delete: %s. %d objects of model %s stay.", printable(oneLine(err)), len(keys), checkModel)
	case left > 0:
		c.fault(Partial, "%d objects of model %s stay: nothing is deleted in this layout, or not by this user.", left, checkModel)
	default:
		c.printf("This user may delete: the objects of the check are gone.")
	}
}

func speed(n int64, in time.Duration) string {
	if in <= 0 {
		return "no measurable time"
	}
	return kv.FormatBytes(int64(float64(n)/in.Seconds())) + "/s, one at a time"
}
