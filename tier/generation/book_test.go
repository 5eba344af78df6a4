package generation_test

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

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
// kept: no model has its objects of before after a restart.
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
		commit, err := b.Prepare([]string{fmt.Sprint("m", i)}, true)
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
	if err := a.Clean(); err != nil {
		t.Fatal(err)
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
	if again.Dirty() {
		t.Error("the pool counts as not cleared")
	}
}

// A damaged file begins a new generation of all.
func TestDamagedFileCountsAsAClear(t *testing.T) {
	for _, text := range []string{"", "{", `{"version":2}`, "null", "\x00\x00"} {
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
		if err := b.Tier(place).Stat(t.Context(), []kv.Key{k}, metas); err != nil || metas[0].Len != 0 || !b.Dirty() {
			t.Errorf("%q: %+v, %v, dirty %v", text, metas[0], err, b.Dirty())
		}
	}
}

// A clear counts, also over a restart, where the clock was set back since the one
// before it, whichever models the two are of.
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
			commit, err := b.Prepare(models, false)
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
