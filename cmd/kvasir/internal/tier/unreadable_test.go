// SPDX-License-Identifier: Apache-2.0

package tier_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	tiertool "github.com/kvasir-kv/kvasir/cmd/kvasir/internal/tier"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// store is a tier whose reads may fail or take their time.
type store struct {
	*tier.Memory
	reads  int
	before func(n int) error // of read n, from 1
}

func (s *store) Read(ctx context.Context, k kv.Key, dst []byte) (tier.Meta, error) {
	s.reads++
	if s.before != nil {
		if err := s.before(s.reads); err != nil {
			return tier.Meta{}, err
		}
	}
	return s.Memory.Read(ctx, k, dst)
}

// filled returns a store with n objects.
func filled(t *testing.T, n int) *store {
	t.Helper()
	s := &store{Memory: tier.NewMemory(1 << 20)}
	for i := range n {
		b, m := tiertest.Object(i, 1000)
		if err := s.Write(t.Context(), tiertest.Key(i), m, b); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

func count(t *testing.T, l tier.Lister) (n int) {
	t.Helper()
	if err := l.List(t.Context(), func(kv.Key, tier.Meta) bool { n++; return true }); err != nil {
		t.Fatal(err)
	}
	return n
}

var errBusy = errors.New("the place is busy")

// fails has each third read fail.
func fails(n int) error {
	if n%3 == 0 {
		return errBusy
	}
	return nil
}

// An object that cannot be read now does not count as damaged: it stays, and the command fails.
func TestVerifyKeepsUnreadableObjects(t *testing.T) {
	s := filled(t, 6)
	s.before = fails
	var out strings.Builder
	err := tiertool.Verify(t.Context(), &out, s, true)
	if n := count(t, s); n != 6 {
		t.Errorf("%d of 6 objects are left, none of which is damaged: %s", n, &out)
	}
	if err == nil || errors.Is(err, tiertool.ErrDamaged) || !strings.Contains(out.String(), "4 objects are as they were written, 0 have no checksum, 0 are damaged") || !strings.Contains(out.String(), errBusy.Error()) {
		t.Errorf("%v: %s", err, &out)
	}
}

// A copy fails when objects could not be read or the target did not take them. It does not call those objects damaged.
func TestCopyWithoutAllFails(t *testing.T) {
	s, to := filled(t, 6), tier.NewMemory(1<<20)
	s.before = fails
	var out strings.Builder
	if err := tiertool.Copy(t.Context(), tiertool.CopyText(&out), s, to, tier.NewNames()); err == nil || count(t, to) != 4 || !strings.Contains(out.String(), "0 damaged") {
		t.Errorf("%d of 6 were copied: %v: %s", count(t, to), err, &out)
	}
	s.before = nil
	out.Reset()
	nowhere := tier.Route(func(kv.Key) int { return -1 })
	if err := tiertool.Copy(t.Context(), tiertool.CopyText(&out), s, nowhere, tier.NewNames()); err == nil {
		t.Errorf("nothing was taken: %s", &out)
	}
}

// An interrupted copy can be continued: objects that the target has already are not read again.
func TestCopyResumes(t *testing.T) {
	s, to := filled(t, 6), tier.NewMemory(1<<20)
	ctx, cancel := context.WithCancel(t.Context())
	s.before = func(n int) error {
		if n == 4 {
			cancel()
		}
		return ctx.Err()
	}
	var out strings.Builder
	if err := tiertool.Copy(ctx, tiertool.CopyText(&out), s, to, tier.NewNames()); !errors.Is(err, context.Canceled) || count(t, to) != 3 {
		t.Fatalf("%d, %v", count(t, to), err)
	}
	s.before, s.reads = nil, 0
	out.Reset()
	if err := tiertool.Copy(t.Context(), tiertool.CopyText(&out), s, to, tier.NewNames()); err != nil || count(t, to) != 6 || s.reads != 3 || !strings.Contains(out.String(), "copied 3 objects") {
		t.Errorf("%d are there after %d reads, %v: %s", count(t, to), s.reads, err, &out)
	}
}

// A copy that takes long says how far it is.
func TestLongCopyPrintsProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := filled(t, 6)
		s.before = func(int) error { time.Sleep(6 * time.Second); return nil }
		var out strings.Builder
		if err := tiertool.Copy(t.Context(), tiertool.CopyText(&out), s, tier.NewMemory(1<<20), tier.NewNames()); err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(out.String(), "\n"); n < 3 || n > 5 {
			t.Errorf("%d lines in 36 s: %s", n, &out)
		}
	})
}
