// SPDX-License-Identifier: Apache-2.0

package fs_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/fs"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// long is an object that is read in several pieces and ends within a page.
const long = 17<<20 + 1234

// meanwhile runs f again and again until the test's function that it returns is called.
func meanwhile(f func(i int) error) (end func() error) {
	var over atomic.Bool
	var err error
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; !over.Load() && err == nil; i++ {
			err = f(i)
		}
	})
	return func() error {
		over.Store(true)
		wg.Wait()
		return err
	}
}

// While another server replaces a file again and again, with and without a checksum beside it, a read has all of one
// of its versions: bytes, checksum and the other data of the Meta belong together.
func TestReplacedWhileItIsRead(t *testing.T) {
	for _, direct := range []bool{false, true} {
		dir := folder(t)
		d := open(t, fs.Options{Path: dir, Direct: direct})
		ours, m := put(t, d, 1, long)
		theirs := bytes.Repeat([]byte{0x77}, long)
		path, a, b := pathOf(dir, 1), filepath.Join(dir, "a"), filepath.Join(dir, "b")
		if err := errors.Join(os.Link(path, a), os.WriteFile(b, theirs, 0o600)); err != nil {
			t.Fatal(err)
		}
		end := meanwhile(func(i int) error {
			temp := filepath.Join(dir, "c.tmp")
			return errors.Join(os.Link([]string{b, a}[i%2], temp), os.Rename(temp, path))
		})
		seen := map[bool]int{}
		dst := shm.MakeAligned(long, tier.Page)
		for range 24 {
			got, sum, err := d.ReadSummed(t.Context(), tiertest.Key(1), dst)
			want, meta := ours, m
			if got.NoSum {
				want, meta = theirs, tier.Meta{Len: long, NoSum: true}
			}
			if err != nil || got != meta || sum != xxh3.Hash(want) || !bytes.Equal(dst, want) {
				t.Errorf("direct %v: %+v, checksum %x, %v; equal bytes: %v", direct, got, sum, err, bytes.Equal(dst, want))
			}
			seen[got.NoSum]++
		}
		if err := end(); err != nil {
			t.Error(err)
		}
		t.Log("direct", direct, "versions seen", seen)
	}
}

// While somebody writes into a file, a read returns the checksum of exactly the bytes that it returns. So a torn
// object never counts as a whole one.
func TestOverwrittenWhileItIsRead(t *testing.T) {
	for _, direct := range []bool{false, true} {
		dir := folder(t)
		d := open(t, fs.Options{Path: dir, Direct: direct})
		want, m := put(t, d, 1, long)
		f, err := os.OpenFile(pathOf(dir, 1), os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		end := meanwhile(func(i int) error {
			_, err := f.WriteAt(bytes.Repeat([]byte{byte(i)}, 4096), int64(i)*99_991%(long-4096))
			return err
		})
		dst := shm.MakeAligned(long, tier.Page)
		for range 8 {
			got, sum, err := d.ReadSummed(t.Context(), tiertest.Key(1), dst)
			if err != nil || sum != xxh3.Hash(dst) || sum == got.Sum && !bytes.Equal(dst, want) || got != m {
				t.Errorf("direct %v: %+v, checksum %x of %x, %v", direct, got, sum, xxh3.Hash(dst), err)
			}
		}
		if err := errors.Join(end(), f.Close()); err != nil {
			t.Error(err)
		}
	}
}

// afterPieces ends once it was asked so many times: a read asks before each piece.
type afterPieces struct {
	context.Context
	left atomic.Int64
}

func (c *afterPieces) Err() error {
	if c.left.Add(-1) < 0 {
		return context.Canceled
	}
	return nil
}

// A read whose context ends between any two pieces writes nothing to its memory afterwards.
func TestGivenUpBetweenPieces(t *testing.T) {
	for _, direct := range []bool{false, true} {
		d := open(t, fs.Options{Path: folder(t), Direct: direct})
		want, m := put(t, d, 1, long)
		dst, other, poison := shm.MakeAligned(long, tier.Page), shm.MakeAligned(long, tier.Page), bytes.Repeat([]byte{0xee}, long)
		ended, whole := 0, 0
		for n := range int64(400) {
			ctx := &afterPieces{Context: t.Context()}
			ctx.left.Store(n)
			_, _, err := d.ReadSummed(ctx, tiertest.Key(1), dst)
			if err == nil {
				whole++
				break
			}
			if !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
			ended++
			copy(dst, poison)
			if got, err := d.Read(t.Context(), tiertest.Key(1), other); err != nil || got != m || !bytes.Equal(other, want) {
				t.Fatalf("another read: %+v, %v", got, err)
			}
			if !bytes.Equal(dst, poison) {
				t.Fatalf("direct %v: memory was written to after %d pieces", direct, n)
			}
			if !direct && n == 8 { // pieces of the page cache are many
				break
			}
		}
		if direct && (ended < 3 || whole != 1) {
			t.Errorf("%d reads were given up, %d were not", ended, whole)
		}
	}
}
