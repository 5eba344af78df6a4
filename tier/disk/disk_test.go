// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

func TestMain(m *testing.M) {
	if soakChild() {
		return
	}
	testkit.Main(m)
}

// small are options for directories of a few segments of 1 MiB.
func small(dirs ...string) Options {
	o := Options{SegmentBytes: 1 << 20, MinFree: 1, FirstTouch: true}
	for _, d := range dirs {
		o.Dirs = append(o.Dirs, Dir{d, 64 << 20})
	}
	return o
}

func open(t testing.TB, o Options) *Disk {
	t.Helper()
	d, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	<-d.Opened()
	return d
}

func closeDisk(t testing.TB, d *Disk) {
	t.Helper()
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

// object returns the bytes of a test object, in memory that begins so many bytes after a
// multiple of a block.
func object(seed, n, shift int) ([]byte, tier.Meta) {
	want, meta := tiertest.Object(seed, n)
	b := shm.MakeAligned(n+shift, block)[shift:]
	copy(b, want)
	return b, meta
}

func put(t testing.TB, d tier.Tier, seed, n int) {
	t.Helper()
	b, meta := object(seed, n, 0)
	if err := d.Write(t.Context(), tiertest.Key(seed), meta, b); err != nil {
		t.Fatalf("write %d: %v", seed, err)
	}
}

// get reads an object into memory that begins so many bytes after a multiple of a block.
func get(t testing.TB, d tier.Tier, seed, n, shift int) error {
	t.Helper()
	want, meta := tiertest.Object(seed, n)
	dst, _ := object(9999, n, shift)
	got, err := d.Read(t.Context(), tiertest.Key(seed), dst)
	if err == nil && (got != meta || !bytes.Equal(dst, want)) {
		t.Errorf("object %d: other bytes than were written", seed)
	}
	return err
}

func need(t testing.TB, d tier.Tier, seed, n int) {
	t.Helper()
	if err := get(t, d, seed, n, 0); err != nil {
		t.Errorf("object %d: %v", seed, err)
	}
}

func TestConformance(t *testing.T) {
	for name, dirs := range map[string]int{"one disk": 1, "three disks": 3} {
		t.Run(name, func(t *testing.T) {
			tiertest.Run(t, func(t *testing.T) tier.Tier {
				var paths []string
				for range dirs {
					paths = append(paths, t.TempDir())
				}
				o := small(paths...)
				o.SegmentBytes = 4 << 20
				d, err := Open(o)
				if err != nil {
					t.Fatal(err)
				}
				return d
			})
		})
	}
}

// Objects of every length around blocks and pieces come back, from and to memory that
// suits direct I/O and memory that does not, in this life and the next.
func TestLengthsAndAlignments(t *testing.T) {
	dir := t.TempDir()
	o := small(dir)
	o.SegmentBytes, o.Dirs[0].Bytes = 16<<20, 256<<20
	lengths := []int{1, 127, 128, 3967, 3968, 3969, 4095, 4096, 4097, 8063, 8064, 8065, 8192, 100_000, 1 << 20, 1<<20 + 1, bouncePiece + block, directPiece, directPiece + 4000}
	d := open(t, o)
	for i, n := range lengths {
		for shift := range 2 {
			b, meta := object(2*i+shift, n, 8*shift)
			if err := d.Write(t.Context(), tiertest.Key(2*i+shift), meta, b); err != nil {
				t.Fatalf("%d bytes: %v", n, err)
			}
		}
	}
	for life := range 2 {
		for i, n := range lengths {
			for shift := range 2 {
				for to := range 2 {
					if err := get(t, d, 2*i+shift, n, 8*to); err != nil {
						t.Errorf("life %d: %d bytes: %v", life, n, err)
					}
				}
			}
		}
		closeDisk(t, d)
		d = open(t, o)
	}
	closeDisk(t, d)
}

// Objects written in one life are there in the next two, and deleted ones are gone, with and
// without the checkpoint.
func TestReopen(t *testing.T) {
	dir := t.TempDir()
	d := open(t, small(dir))
	for i := range 100 {
		put(t, d, i, 50_000)
	}
	if err := d.Delete(t.Context(), []kv.Key{tiertest.Key(3), tiertest.Key(50)}); err != nil {
		t.Fatal(err)
	}
	for life := range 3 {
		closeDisk(t, d)
		if life == 1 {
			if err := os.Remove(filepath.Join(dir, checkName)); err != nil {
				t.Fatal(err)
			}
		}
		d = open(t, small(dir))
		for i := range 100 {
			err := get(t, d, i, 50_000, 0)
			if i == 3 || i == 50 {
				if !errors.Is(err, tier.ErrMissing) {
					t.Errorf("life %d: deleted object %d: %v", life, i, err)
				}
			} else if err != nil {
				t.Errorf("life %d: object %d: %v", life, i, err)
			}
		}
		put(t, d, 1000+life, 70_000)
	}
	closeDisk(t, d)
}
