// SPDX-License-Identifier: Apache-2.0

package generation_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/generation"
)

func open(t *testing.T, names *tier.Names, files ...string) *generation.Book {
	t.Helper()
	b, err := generation.Open(files, names, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Clears at the same time, of one server and of two that share a directory, are all
// kept: after a restart no model has objects from before its clear.
func TestClearsAtTheSameTimeAreAllKept(t *testing.T) {
	file := filepath.Join(t.TempDir(), generation.FileName)
	names := tier.NewNames()
	place := tier.NewMemory(1 << 20)
	a, other := open(t, names, file), open(t, names, file)
	var keys []kv.Key
	for i := range 8 {
		keys = append(keys, kv.Key{Namespace: kv.Namespace{byte(i + 1)}})
		names.Add(keys[i].Namespace, fmt.Sprint("m", i), nil)
		if err := a.Tier(place).Write(t.Context(), keys[i], tier.Meta{Len: 1}, []byte{1}); err != nil {
			t.Fatal(err)
		}
	}
	var commits []func()
	var mu sync.Mutex
	clear := func(b *generation.Book, i int) {
		commit, err := b.Prepare([]string{fmt.Sprint("m", i)})
		if err != nil {
			t.Error(err)
		}
		mu.Lock()
		defer mu.Unlock()
		commits = append(commits, commit)
	}
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() { clear(a, i) })
	}
	wg.Wait()
	for i := range 4 {
		clear(other, 4+i)
	}
	for _, commit := range commits {
		commit()
	}
	again := open(t, names, file)
	metas := make([]tier.Meta, len(keys))
	if err := again.Tier(place).Stat(t.Context(), keys, metas); err != nil {
		t.Fatal(err)
	}
	for i, m := range metas {
		if m.Len != 0 {
			t.Errorf("model %d: %+v is there after its clear", i, m)
		}
	}
}

// If the file is damaged, the Book begins a new generation of all models.
func TestDamagedFileCountsAsAClear(t *testing.T) {
	for _, text := range []string{"", "{", `{"version":0}`, "null", "\x00\x00"} {
		file := filepath.Join(t.TempDir(), generation.FileName)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		names := tier.NewNames()
		k := kv.Key{Namespace: kv.Namespace{1}}
		names.Add(k.Namespace, "m", nil)
		place := tier.NewMemory(1 << 20)
		if err := place.Write(t.Context(), k, tier.Meta{Len: 1}, []byte{1}); err != nil {
			t.Fatal(err)
		}
		b := open(t, names, file)
		metas := make([]tier.Meta, 1)
		if err := b.Tier(place).Stat(t.Context(), []kv.Key{k}, metas); err != nil || metas[0].Len != 0 || !b.Damaged() {
			t.Errorf("%q: %+v, %v, damaged %v", text, metas[0], err, b.Damaged())
		}
	}
}

// A clear counts, also after a restart, if the clock was set back since the previous
// clear, whichever models the two are of.
func TestClearCountsAfterTheClockWasSetBack(t *testing.T) {
	ahead := time.Now().Add(time.Hour).UnixNano()
	all := fmt.Sprintf(`{"version":1,"all":{"number":1,"time":%d}}`, ahead)
	model := fmt.Sprintf(`{"version":1,"all":{},"models":{"m":{"number":1,"time":%d}}}`, ahead)
	for _, kept := range []string{all, model} {
		for _, models := range [][]string{nil, {"m"}} {
			dir := t.TempDir()
			files := []string{filepath.Join(dir, "a"), filepath.Join(dir, "b")}
			for _, file := range files {
				if err := os.WriteFile(file, []byte(kept), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			names := tier.NewNames()
			k := kv.Key{Namespace: kv.Namespace{1}}
			names.Add(k.Namespace, "m", nil)
			place := tier.NewMemory(1 << 20)
			b := open(t, names, files...)
			if err := b.Tier(place).Write(t.Context(), k, tier.Meta{Len: 1}, []byte{1}); err != nil {
				t.Fatal(err)
			}
			commit, err := b.Prepare(models)
			if err != nil {
				t.Fatal(err)
			}
			commit()
			again := open(t, names, files...)
			for when, b := range map[string]*generation.Book{"cleared": b, "restarted": again} {
				metas := make([]tier.Meta, 1)
				if err := b.Tier(place).Stat(t.Context(), []kv.Key{k}, metas); err != nil || metas[0].Len != 0 {
					t.Errorf("%s after %s, a clear of %q: %+v, %v", when, kept, models, metas[0], err)
				}
			}
			if err := b.Tier(place).Write(t.Context(), k, tier.Meta{Len: 2}, []byte{1, 2}); err != nil {
				t.Fatal(err)
			}
			metas := make([]tier.Meta, 1)
			if err := again.Tier(place).Stat(t.Context(), []kv.Key{k}, metas); err != nil || metas[0].Len != 2 {
				t.Errorf("stored after the clear of %q over %s, after a restart: %+v, %v", models, kept, metas[0], err)
			}
		}
	}
}

// After Repair each file alone has all generations, also one that was missing, one that
// a former tier had and one that was damaged. The next server finds the objects that this
// one stores.
func TestEachFileHasAllGenerations(t *testing.T) {
	for name, spoil := range map[string]func(path string) error{
		"missing": os.Remove,
		"damaged": func(path string) error { return os.WriteFile(path, []byte("{"), 0o600) },
		"older":   func(path string) error { return os.WriteFile(path, []byte(`{"version":1,"all":{}}`), 0o600) },
	} {
		dir := t.TempDir()
		first, second := filepath.Join(dir, "a", "g"), filepath.Join(dir, "b", "g")
		names, k := tier.NewNames(), kv.Key{Namespace: kv.Namespace{1}}
		names.Add(k.Namespace, "m", nil)
		place := tier.NewMemory(1 << 20)
		size := func(b *generation.Book) int64 {
			t.Helper()
			metas := make([]tier.Meta, 1)
			if err := b.Tier(place).Stat(t.Context(), []kv.Key{k}, metas); err != nil {
				t.Fatal(err)
			}
			return metas[0].Len
		}
		b := open(t, names, first, second)
		if err := b.Tier(place).Write(t.Context(), k, tier.Meta{Len: 1}, []byte{1}); err != nil {
			t.Fatal(err)
		}
		for _, models := range [][]string{nil, {"m"}} {
			commit, err := b.Prepare(models)
			if err != nil {
				t.Fatal(err)
			}
			commit()
		}
		if err := spoil(second); err != nil {
			t.Fatal(err)
		}
		b = open(t, names, first, second)
		if err := b.Repair(); err != nil {
			t.Fatal(err)
		}
		if err := b.Tier(place).Write(t.Context(), k, tier.Meta{Len: 2}, []byte{1, 2}); err != nil {
			t.Fatal(err)
		}
		for _, file := range []string{first, second} {
			if got := size(open(t, names, file)); got != 2 {
				t.Errorf("%s: a server with %s alone finds an object of length %d, want 2", name, file, got)
			}
		}
	}
}

// A clear of all that is committed after a later clear of a model does not undo that:
// the server and the one after it find the same objects.
func TestClearsAreCommittedInTheirOrder(t *testing.T) {
	file := filepath.Join(t.TempDir(), generation.FileName)
	names, k := tier.NewNames(), kv.Key{Namespace: kv.Namespace{1}}
	names.Add(k.Namespace, "m", nil)
	place := tier.NewMemory(1 << 20)
	b := open(t, names, file)
	all, err := b.Prepare(nil)
	if err != nil {
		t.Fatal(err)
	}
	model, err := b.Prepare([]string{"m"})
	if err != nil {
		t.Fatal(err)
	}
	model()
	all()
	if err := b.Tier(place).Write(t.Context(), k, tier.Meta{Len: 1}, []byte{1}); err != nil {
		t.Fatal(err)
	}
	metas := make([]tier.Meta, 1)
	if err := open(t, names, file).Tier(place).Stat(t.Context(), []kv.Key{k}, metas); err != nil || metas[0].Len != 1 {
		t.Errorf("stored after both: %+v, %v after a restart", metas[0], err)
	}
}

// The objects of the last clear count as stale, however many clears there were before.
func TestObjectsOfTheLastClearAreStale(t *testing.T) {
	names := tier.NewNames()
	for i := range 30_000 {
		names.Add(kv.Namespace{1, byte(i), byte(i >> 8)}, "m", nil)
	}
	k := kv.Key{Namespace: kv.Namespace{1}}
	place := tier.NewMemory(1 << 20)
	b := open(t, names, filepath.Join(t.TempDir(), generation.FileName))
	for i := range 4 {
		if err := b.Tier(place).Write(t.Context(), k, tier.Meta{Len: 1}, []byte{1}); err != nil {
			t.Fatal(err)
		}
		commit, err := b.Prepare(nil)
		if err != nil {
			t.Fatal(err)
		}
		commit()
		removed, err := tier.RemoveIf(t.Context(), place, b.Stale, func(context.Context, int) error { return nil })
		if err != nil || removed != 1 {
			t.Errorf("clear %d: %d objects left the tier, want 1; %v", i, removed, err)
		}
	}
}

// A new generation counts at once, however many namespaces are known, because lookups wait while a clear changes it.
func TestGenerationCountsAtOnce(t *testing.T) {
	names := tier.NewNames()
	b := open(t, names, filepath.Join(t.TempDir(), generation.FileName))
	keys := make([]kv.Key, 10_000)
	for i := range keys {
		keys[i].Namespace = kv.Namespace{1, byte(i), byte(i >> 8)}
		names.Add(keys[i].Namespace, "m", nil)
	}
	for range 2 {
		if err := b.Tier(tier.NewMemory(1)).Stat(t.Context(), keys, make([]tier.Meta, len(keys))); err != nil {
			t.Fatal(err)
		}
		commit, err := b.Prepare(nil)
		if err != nil {
			t.Fatal(err)
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		commit()
		runtime.ReadMemStats(&after)
		if n := after.Mallocs - before.Mallocs; n > 1000 {
			t.Errorf("%d allocations for %d namespaces", n, len(keys))
		}
	}
}

// The objects of each of many clears in a row are stale, although no removal looked in between.
func TestObjectsOfManyClearsAreStale(t *testing.T) {
	const clears = 40
	names := tier.NewNames()
	b := open(t, names, filepath.Join(t.TempDir(), generation.FileName))
	key := func(i int) kv.Key { return kv.Key{Namespace: kv.Namespace{1, byte(i)}} }
	for i := range clears {
		names.Add(key(i).Namespace, fmt.Sprint("m", i), nil)
	}
	for i := range clears {
		commit, err := b.Prepare([]string{fmt.Sprint("m", i)})
		if err != nil {
			t.Fatal(err)
		}
		commit()
	}
	for i := range clears {
		if !b.Stale(tier.Content{Key: key(i)}) {
			t.Errorf("objects of clear %d stay in the tier", i)
		}
	}
}

// Two servers of one directory clear while it cannot be written, and both write the file once it can be. One may have read the file
// before the other wrote it, and so overwrite the other's clear. That server finds this at its next look, and writes its clear again.
func TestFileThatIsWrittenAgainKeepsTheClearsOfBoth(t *testing.T) {
	file := filepath.Join(t.TempDir(), generation.FileName)
	names := tier.NewNames()
	theirs := filepath.Join(t.TempDir(), generation.FileName)
	commit, err := open(t, names, theirs).Prepare(nil) // an earlier clear
	if err != nil {
		t.Fatal(err)
	}
	commit()
	other, err := os.ReadFile(theirs)
	if err != nil {
		t.Fatal(err)
	}
	b := open(t, names, file)
	b.Watch(time.Hour)
	if err := os.MkdirAll(filepath.Join(file, "in the way"), 0o700); err != nil {
		t.Fatal(err)
	}
	if commit, err = b.Prepare(nil); err == nil {
		t.Fatal("a clear was kept in a file that cannot be written")
	}
	commit()
	if err := os.RemoveAll(file); err != nil {
		t.Fatal(err)
	}
	b.Sync(t.Context())
	kept, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, other, 0o600); err != nil {
		t.Fatal(err)
	}
	b.Sync(t.Context())
	if got, err := os.ReadFile(file); err != nil || string(got) != string(kept) {
		t.Errorf("the file has %s, %v, want %s", got, err, kept)
	}
}

// A file that could not be written is written once it can be. Otherwise each later life would find it damaged and begin another
// generation, and objects stored in between would be stale. The Book is of one server, or shares its directory.
func TestFileIsWrittenOnceItCanBe(t *testing.T) {
	for _, shared := range []bool{false, true} {
		for _, what := range []string{"repair", "clear"} {
			file := filepath.Join(t.TempDir(), generation.FileName)
			inTheWay := filepath.Join(file, "in the way") // no file can replace a directory that is not empty
			if err := os.MkdirAll(inTheWay, 0o700); err != nil {
				t.Fatal(err)
			}
			names, place, k := tier.NewNames(), tier.NewMemory(1<<20), kv.Key{Namespace: kv.Namespace{1}}
			names.Add(k.Namespace, "m", nil)
			b := open(t, names, file)
			if !b.Damaged() {
				t.Fatal("the file is not damaged")
			}
			if shared {
				b.Watch(20 * time.Millisecond)
			}
			if what == "clear" {
				commit, err := b.Prepare(nil)
				if err == nil {
					t.Error("a clear was kept in a file that cannot be written")
				}
				commit()
			}
			if err := b.Repair(); err == nil {
				t.Error("a file that cannot be written was repaired")
			}
			if err := b.Tier(place).Write(t.Context(), k, tier.Meta{Len: 1}, []byte{1}); err != nil {
				t.Fatal(err)
			}
			ctx, end := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			wg.Go(func() { b.Run(ctx) })
			if err := os.RemoveAll(file); err != nil {
				t.Fatal(err)
			}
			testkit.Eventually(t, "the file is written", func() bool { _, err := os.Stat(file); return err == nil })
			end()
			wg.Wait()
			again, metas := open(t, names, file), make([]tier.Meta, 1)
			if err := again.Tier(place).Stat(t.Context(), []kv.Key{k}, metas); err != nil || metas[0].Len != 1 || again.Damaged() {
				t.Errorf("shared %v, %s: the next life finds %+v, %v, damaged %v", shared, what, metas[0], err, again.Damaged())
			}
		}
	}
}
