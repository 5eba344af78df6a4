// SPDX-License-Identifier: Apache-2.0

package fs_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/fs"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// used returns the bytes that all files of a directory take.
func used(t *testing.T, dir string) (n int64) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.data"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if st, err := os.Stat(f); err == nil {
			n += st.Size()
		}
	}
	return n
}

// The limit counts all files, also earlier ones and those of other programs. An object that would pass it is not
// kept, and a deleted object makes room.
func TestLimit(t *testing.T) {
	const n = 10_000
	dir := folder(t)
	for seed := range 3 {
		b, _ := tiertest.Object(seed, n)
		if err := os.WriteFile(pathOf(dir, seed), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	d := open(t, fs.Options{Path: dir, Limit: 5*n + 100})
	for !counted(t, d) {
		time.Sleep(time.Millisecond)
	}
	kept := 0
	for seed := 3; seed < 10; seed++ {
		b, m := tiertest.Object(seed, n)
		switch err := d.Write(t.Context(), tiertest.Key(seed), m, b); {
		case err == nil:
			kept++
		case !errors.Is(err, tier.ErrNotKept):
			t.Fatal(err)
		}
		if got := used(t, dir); got > 5*n+100 {
			t.Fatalf("%d bytes are used", got)
		}
	}
	if kept != 2 {
		t.Errorf("%d of 7 were kept beside 3 others, want 2", kept)
	}
	// Files that changed while they were counted are counted again soon.
	got := d.Space()
	for end := time.Now().Add(60 * time.Second); (got.Objects != 5 || got.Used != 5*n) && time.Now().Before(end); got = d.Space() {
		time.Sleep(10 * time.Millisecond)
	}
	if got.Objects != 5 || got.Used != 5*n || got.Limit != 5*n+100 || got.Free <= 0 {
		t.Errorf("%+v", got)
	}
	if err := os.Remove(pathOf(dir, 0)); err != nil { // by somebody else: it is counted again in a minute
		t.Fatal(err)
	}
	if err := d.Delete(t.Context(), keysOf(3)); err != nil {
		t.Fatal(err)
	}
	put(t, d, 20, n)
}

// Without eviction a write does not make the tier look at all files: what another program removed counts until the next scan, a minute later.
func TestWritesWithoutEvictionScanNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 10_000
		dir := folder(t)
		for seed := range 2 {
			b, _ := tiertest.Object(seed, n)
			if err := os.WriteFile(pathOf(dir, seed), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		d := open(t, fs.Options{Path: dir, Limit: 3*n + 100})
		if synctest.Wait(); !counted(t, d) {
			t.Fatal("the files are not counted")
		}
		if err := os.Remove(pathOf(dir, 0)); err != nil {
			t.Fatal(err)
		}
		put(t, d, 2, n)
		for range 20 {
			b, m := tiertest.Object(3, n)
			if err := d.Write(t.Context(), tiertest.Key(3), m, b); !errors.Is(err, tier.ErrFull) {
				t.Fatalf("a write beyond the limit: %v", err)
			}
			synctest.Wait()
		}
		if got := d.Space(); got.Objects != 3 || got.Used != 3*n {
			t.Errorf("%d objects of %d bytes: the files were counted again", got.Objects, got.Used)
		}
		time.Sleep(61 * time.Second)
		synctest.Wait()
		if got := d.Space(); got.Objects != 2 || got.Used != 2*n {
			t.Errorf("%d objects of %d bytes after a minute", got.Objects, got.Used)
		}
	})
}

// With eviction the least recently used objects go, and new objects are kept.
func TestEviction(t *testing.T) {
	const n = 10_000
	dir := folder(t)
	changes := tier.NewChanges()
	changes.Watch(1000)
	d := open(t, fs.Options{Path: dir, Limit: 10 * n, EvictAt: 0.8, EvictShare: 0.3, Changes: changes, Number: 1})
	for !counted(t, d) {
		time.Sleep(time.Millisecond)
	}
	for seed := range 8 {
		put(t, d, seed, n)
		old := time.Now().Add(time.Duration(seed-100) * time.Hour)
		if err := os.Chtimes(pathOf(dir, seed), old, old); err != nil {
			t.Fatal(err)
		}
	}
	put(t, d, 8, n) // beyond the watermark: files are deleted before or after it is there
	for end := time.Now().Add(time.Minute); used(t, dir) > 6*n; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d bytes are used", used(t, dir))
		}
	}
	for seed, want := range map[int]bool{0: false, 2: false, 4: true, 8: true} {
		if got := stat(t, d, seed).Len > 0; got != want {
			t.Errorf("object %d is there: %v", seed, got)
		}
	}
	gone := map[kv.Key]bool{}
	for end := time.Now().Add(time.Minute); len(gone) != 9-int(used(t, dir)/n); time.Sleep(time.Millisecond) { // a file goes before that is noted
		list := make([]tier.Change, 1000)
		got, _ := changes.After(0, list)
		for _, c := range list[:got] {
			gone[c.Key] = c.Removed && c.Tier == 1
		}
		if time.Now().After(end) {
			t.Fatalf("%d objects are noted as gone", len(gone))
		}
	}
	for seed := range 9 {
		if there := stat(t, d, seed).Len > 0; gone[tiertest.Key(seed)] == there {
			t.Errorf("object %d is there: %v, and noted as gone: %v", seed, there, gone[tiertest.Key(seed)])
		}
	}
}

// An object that is read again and again counts as used, also if the file system notes only the first read of a day (relatime, which is
// usual) or none.
func TestReadsCountAsUseWithoutAccessTimes(t *testing.T) {
	const n = 10_000
	dir := folder(t)
	d := open(t, fs.Options{Path: dir, Limit: 10 * n, EvictAt: 0.8, EvictShare: 0.3})
	for !counted(t, d) {
		time.Sleep(time.Millisecond)
	}
	read := func() { // the oldest two
		time.Sleep(1100 * time.Millisecond) // times are compared by seconds
		for seed := range 2 {
			if _, err := d.Read(t.Context(), tiertest.Key(seed), make([]byte, n)); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(1100 * time.Millisecond)
	}
	put(t, d, 0, n)
	put(t, d, 1, n)
	read()
	for seed := 2; seed < 8; seed++ {
		put(t, d, seed, n)
	}
	read()
	put(t, d, 8, n)
	for end := time.Now().Add(time.Minute); used(t, dir) > 6*n; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d bytes are used", used(t, dir))
		}
	}
	for _, seed := range []int{0, 1} {
		if stat(t, d, seed).Len == 0 {
			t.Errorf("object %d was read last and went first", seed)
		}
	}
}

// A directory that cannot be written serves what it has, and keeps nothing.
func TestReadOnly(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("root may write everywhere")
	}
	dir := folder(t)
	d := open(t, fs.Options{Path: dir})
	b, m := put(t, d, 1, 100)
	if err := os.Chmod(dir, 0o500); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Chmod(dir, 0o700) })
	r := open(t, fs.Options{Path: dir})
	dst := make([]byte, 100)
	if got, err := r.Read(t.Context(), tiertest.Key(1), dst); err != nil || got != m || !bytes.Equal(dst, b) {
		t.Errorf("%+v, %v", got, err)
	}
	if err := r.Write(t.Context(), tiertest.Key(2), m, b); !errors.Is(err, tier.ErrNotKept) {
		t.Error(err)
	}
}

// Temporary files of servers that ended go; those of servers that may live, and of LMCache,
// stay.
func TestTemporaryFiles(t *testing.T) {
	dir := folder(t)
	old := time.Now().Add(-2 * time.Hour)
	for name, at := range map[string]time.Time{"kvasir-1-2-3.tmp": old, "kvasir-9-9-9.tmp": time.Now(), "m@0x00000001@0@00.tmp": old} {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.WriteFile(path, []byte("x"), 0o600), os.Chtimes(path, at, at)); err != nil {
			t.Fatal(err)
		}
	}
	open(t, fs.Options{Path: dir})
	gone := filepath.Join(dir, "kvasir-1-2-3.tmp")
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		if _, err := os.Stat(gone); errors.Is(err, os.ErrNotExist) {
			break
		}
		if time.Now().After(end) {
			t.Fatal("an old temporary file stays")
		}
	}
	if files, err := os.ReadDir(dir); err != nil || len(files) != 2 {
		t.Errorf("%d files are left, want 2", len(files))
	}
}

// Two servers write and read the same objects in one directory, one of them padded. A read returns a whole
// object or a miss.
func TestTwoServersOnOneDirectory(t *testing.T) {
	dir := folder(t)
	const n = 50_001
	var wg sync.WaitGroup
	for i := range 2 {
		d := open(t, fs.Options{Path: dir, Pad: i == 1})
		wg.Go(func() {
			for j := range 30 {
				k := tiertest.Key(j % 3)
				b, m := tiertest.Object(j%3, n)
				if err := d.Write(t.Context(), k, m, b); err != nil {
					t.Error(err)
				}
				dst := make([]byte, n)
				switch got, err := d.Read(t.Context(), k, dst); {
				case errors.Is(err, tier.ErrMissing):
				case err != nil || got != m || !bytes.Equal(dst, b):
					t.Errorf("%+v, %v", got, err)
				}
				if j%7 == 0 {
					if err := d.Delete(t.Context(), keysOf(j%3)); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
	if files, err := filepath.Glob(filepath.Join(dir, "*.tmp")); err != nil || len(files) > 0 {
		t.Errorf("%v are left", files)
	}
}
