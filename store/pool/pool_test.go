// SPDX-License-Identifier: Apache-2.0

package pool_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/invariant"
	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/pool"
)

func open(t *testing.T, dir string, bytes int64) *pool.Pool {
	t.Helper()
	p, err := pool.Open(pool.Options{Name: "p", Bytes: bytes, Dir: dir, ChunkTokens: 256})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func key(n byte) *kv.Key { return &kv.Key{Chunk: kv.Hash{n}} }

func TestLifeOfASlot(t *testing.T) {
	p := open(t, t.TempDir(), 4*4096)
	defer p.Close()
	s, err := p.Reserve(key(1), 5000, pool.Writer{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Reserve(key(1), 1, pool.Writer{}); !errors.Is(err, pool.ErrExists) {
		t.Fatalf("second reserve: %v", err)
	}
	if got, st := p.Find(key(1)); got != s || st != pool.Staged || p.Holds(s) != 1 || p.Length(s) != 5000 {
		t.Fatalf("staged: slot %d, state %d, holds %d", got, st, p.Holds(s))
	}
	p.Commit(s)
	if _, st := p.Find(key(1)); st != pool.Resident || p.Holds(s) != 0 {
		t.Fatalf("resident: state %d, holds %d", st, p.Holds(s))
	}
	if u := p.Usage(); u.ResidentBytes != 8192 || u.FreeBytes != 8192 || u.Resident != 1 {
		t.Fatalf("%+v", u)
	}
	p.Hold(s)
	p.Hold(s)
	p.Drop(s)
	if _, st := p.Find(key(1)); st != pool.Free || p.StateOf(s) != pool.Condemned {
		t.Fatalf("condemned: key in state %d, slot in %d", st, p.StateOf(s))
	}
	again, err := p.Reserve(key(1), 4096, pool.Writer{}) // the key is free, the memory is not
	if err != nil || again == s || p.Offset(again) == p.Offset(s) {
		t.Fatalf("slot %d at %d, %v", again, p.Offset(again), err)
	}
	p.Unhold(s)
	if u := p.Usage(); u.CondemnedBytes != 8192 {
		t.Fatalf("%+v", u)
	}
	p.Unhold(s)
	if u := p.Usage(); u.CondemnedBytes != 0 || u.FreeBytes != 3*4096 {
		t.Fatalf("%+v", u)
	}
	if _, err := p.Reserve(key(2), 4*4096, pool.Writer{}); !errors.Is(err, pool.ErrFull) {
		t.Fatal(err)
	}
}

// reserveBacked is Reserve that provides the memory of the index, as a pool's owner does.
func reserveBacked(p *pool.Pool, k *kv.Key, n int64) (pool.Slot, error) {
	for {
		s, err := p.Reserve(k, n, pool.Writer{})
		if !errors.Is(err, pool.ErrIndexMemory) {
			return s, err
		}
		_ = p.BackIndex() // after an error the next Reserve says that the pool is full
	}
}

// A thousand keys of every kind, removed in another order, against a map.
func TestManyKeys(t *testing.T) {
	p := open(t, t.TempDir(), 2000*4096)
	defer p.Close()
	want := map[kv.Key]pool.Slot{}
	for i := range 1500 {
		k := kv.Key{Chunk: kv.Hash{byte(i), byte(i >> 8)}, Rank: kv.Rank(i % 3), Group: uint32(i % 2), Namespace: kv.Namespace{byte(i % 5)}}
		s, err := reserveBacked(p, &k, 1)
		if err != nil {
			t.Fatal(err)
		}
		want[k] = s
		if i%3 == 2 {
			for old, s := range want { // any one
				p.Drop(s)
				p.Unhold(s)
				delete(want, old)
				break
			}
		}
	}
	for k, s := range want {
		if got, st := p.Find(&k); got != s || st != pool.Staged || p.KeyOf(s) != k {
			t.Fatalf("%+v: slot %d in state %d, want %d", k, got, st, s)
		}
	}
	missing := kv.Key{Chunk: kv.Hash{9, 9, 9}}
	if _, st := p.Find(&missing); st != pool.Free {
		t.Fatal("found a key that was never there")
	}
}

func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	p := open(t, dir, 4096)
	if _, err := pool.Open(pool.Options{Name: "p", Bytes: 4096, Dir: dir}); !errors.Is(err, pool.ErrInUse) {
		t.Errorf("a second server: %v", err)
	}
	if err := errors.Join(p.SetNote([]byte("note")), p.Remove(), p.Close()); err != nil {
		t.Fatal(err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("Remove left %v", left)
	}

	f := func(name string, want error, files map[string]string) {
		t.Helper()
		dir := t.TempDir()
		for file, content := range files {
			if err := os.WriteFile(filepath.Join(dir, file), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		p, err := pool.Open(pool.Options{Name: name, Bytes: 4096, Dir: dir})
		if !errors.Is(err, want) {
			t.Errorf("%s with %v: %v, want %v", name, files, err, want)
		}
		if err == nil {
			p.Close()
		}
		for file, content := range files {
			if got, _ := os.ReadFile(filepath.Join(dir, file)); string(got) != content {
				t.Errorf("%s was changed", file)
			}
		}
	}
	f("p", pool.ErrForeign, map[string]string{"p": "somebody's"})
	f("p", pool.ErrForeign, map[string]string{"p": "x", "p.kvasir": "not an index"})
	f("p", pool.ErrForeign, map[string]string{"p.kvasir": strings.Repeat("x", 8192)})
	f("../p", shm.ErrName, nil)
	f("", shm.ErrName, nil)
	if _, err := pool.Open(pool.Options{Name: "p", Bytes: 1 << 60, Dir: t.TempDir()}); !errors.Is(err, pool.ErrNoSpace) {
		t.Errorf("a pool larger than the file system: %v", err)
	}
}

// With Cold what an earlier server left is replaced; who still maps it keeps the
// old memory.
func TestCold(t *testing.T) {
	dir := t.TempDir()
	old := open(t, dir, 4096)
	worker, err := shm.Attach(filepath.Join(dir, "p"))
	if err != nil {
		t.Fatal(err)
	}
	defer worker.Close()
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Open(pool.Options{Name: "p", Bytes: 4096, Dir: dir, ChunkTokens: 128}); !errors.Is(err, pool.ErrChanged) {
		t.Fatalf("another chunk size: %v", err)
	}
	p, err := pool.Open(pool.Options{Name: "p", Bytes: 8192, Dir: dir, ChunkTokens: 256, Cold: true})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if p.Bytes() != 8192 || p.Usage().FreeBytes != 8192 {
		t.Fatalf("%+v", p.Usage())
	}
	copy(worker.Bytes(0, 4), "late")
	s, err := p.Reserve(key(1), 4, pool.Writer{})
	if err != nil {
		t.Fatal(err)
	}
	if got := string(p.View(s)); got != "\x00\x00\x00\x00" {
		t.Fatalf("a worker of the old pool wrote %q into the new one", got)
	}
}

func TestNameLost(t *testing.T) {
	dir := t.TempDir()
	p := open(t, dir, 4096)
	defer p.Close()
	if p.NameLost() {
		t.Fatal("lost at once")
	}
	if err := os.Remove(filepath.Join(dir, "p")); err != nil {
		t.Fatal(err)
	}
	if !p.NameLost() {
		t.Fatal("not noticed")
	}
}

func TestPopulateKeepsContent(t *testing.T) {
	p := open(t, t.TempDir(), 1<<20)
	defer p.Close()
	s, err := p.Reserve(key(1), 5, pool.Writer{})
	if err != nil {
		t.Fatal(err)
	}
	copy(p.View(s), "hello")
	for _, keep := range []bool{true, false} {
		if err := p.Populate(0, 4<<20, keep); err != nil {
			t.Skipf("this kernel does not populate: %v", err)
		}
		if string(p.View(s)) != "hello" {
			t.Fatal("content changed")
		}
	}
}

// In builds that check themselves, freed memory is poisoned, and only freed.
func TestPoison(t *testing.T) {
	p := open(t, t.TempDir(), 4096)
	defer p.Close()
	s, err := p.Reserve(key(1), 4096, pool.Writer{})
	if err != nil {
		t.Fatal(err)
	}
	view := p.View(s)
	copy(view, "worker's")
	p.Drop(s)
	if string(view[:8]) != "worker's" {
		t.Fatal("held memory was poisoned")
	}
	p.Unhold(s)
	if poisoned := view[0] == 0xff && view[4095] == 0xff; poisoned != invariant.Enabled {
		t.Fatalf("poisoned: %v, invariants: %v", poisoned, invariant.Enabled)
	}
}

// Another size is named by what differs, and only that. Sizes that earlier servers
// told are kept over cold starts, without the one that is told now.
func TestChunkSizesOfEarlierServers(t *testing.T) {
	dir := t.TempDir()
	open := func(tokens int, cold bool) (*pool.Pool, error) {
		return pool.Open(pool.Options{Name: "p", Bytes: 8192, Dir: dir, ChunkTokens: tokens, Cold: cold})
	}
	announced := func(tokens int, cold bool, want ...int) {
		t.Helper()
		p, err := open(tokens, cold)
		if err != nil {
			t.Fatal(err)
		}
		if got := p.FormerChunkTokens(); !slices.Equal(got, want) {
			t.Errorf("former sizes %v, want %v", got, want)
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
	announced(256, false)
	announced(256, true)
	if _, err := open(128, false); !errors.Is(err, pool.ErrChanged) || !strings.Contains(err.Error(), "tokens per chunk") || strings.Contains(err.Error(), "alignment") {
		t.Errorf("another chunk size: %v", err)
	}
	announced(128, true, 256)
	announced(128, false, 256)
	announced(64, true, 128, 256)
	announced(256, true, 64, 128)
	for i := range 20 { // more than there is room for
		p, err := open(1000+i, true)
		if err != nil {
			t.Fatal(err)
		}
		if i == 19 {
			if got := p.FormerChunkTokens(); len(got) != 8 || got[0] != 1018 {
				t.Errorf("former sizes %v", got)
			}
			p.ForgetFormer()
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
	announced(1019, false)
}
