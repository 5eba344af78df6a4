// SPDX-License-Identifier: Apache-2.0

package pool_test

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/store/pool"
)

var poolFiles = []string{"p", "p.kvasir", "p.workers"}

// leavePool makes a pool with one chunk and a note, as a server leaves it.
func leavePool(t *testing.T, dir string) {
	t.Helper()
	p := open(t, dir, 4*4096)
	s, err := p.Reserve(key(1), 4096, pool.Writer{})
	if err != nil {
		t.Fatal(err)
	}
	p.Commit(s)
	if err := errors.Join(p.SetNote([]byte("workers")), p.Close()); err != nil {
		t.Fatal(err)
	}
}

func reopened(dir string, cold bool) (*pool.Pool, error) {
	return pool.Open(pool.Options{Name: "p", Bytes: 4 * 4096, Dir: dir, ChunkTokens: 256, Cold: cold})
}

// Files under the pool's names that others may have made or changed are not used:
// of another user, open to others, with a second name, or a link. A pool is refused,
// a note is not read. What a link leads to stays as it is.
func TestFilesOfOthersAreNotUsed(t *testing.T) {
	f := func(name string, file string, spoil func(path string) error) {
		t.Helper()
		dir := t.TempDir()
		leavePool(t, dir)
		path := filepath.Join(dir, file)
		if err := spoil(path); err != nil {
			t.Fatal(err)
		}
		p, err := reopened(dir, false)
		if file != "p.workers" {
			if err == nil {
				p.Close()
				t.Errorf("%s %s: the pool was taken over", name, file)
			}
			if !errors.Is(err, pool.ErrForeign) && !errors.Is(err, pool.ErrOwner) {
				t.Errorf("%s %s: %v", name, file, err)
			}
			return
		}
		if err != nil {
			t.Fatalf("%s %s: %v", name, file, err)
		}
		defer p.Close()
		if note, err := p.Note(); err == nil || note != nil {
			t.Errorf("%s %s: read %q, %v", name, file, note, err)
		}
	}
	for _, file := range poolFiles {
		f("group-readable", file, func(path string) error { return os.Chmod(path, 0o640) })
		f("world-writable", file, func(path string) error { return os.Chmod(path, 0o602) })
		f("twice named", file, func(path string) error { return os.Link(path, path+"-other") })
		f("linked", file, func(path string) error {
			return errors.Join(os.Rename(path, path+"-real"), os.Symlink(path+"-real", path))
		})
		if os.Geteuid() == 0 {
			f("another user's", file, func(path string) error { return os.Chown(path, 4242, 4242) })
		}
	}
}

// A note is written through nothing that lies in the folder, and does not leave
// parts of itself behind; two notes, of which the second stays.
func TestNoteFollowsNoLink(t *testing.T) {
	dir := t.TempDir()
	precious := filepath.Join(t.TempDir(), "precious")
	if err := os.WriteFile(precious, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"p.workers", "p.workers.new", "p.workers.new-"} {
		if err := os.Symlink(precious, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Remove(filepath.Join(dir, "p.workers")); err != nil { // else no pool is made
		t.Fatal(err)
	}
	p := open(t, dir, 4096)
	defer p.Close()
	if err := os.Symlink(precious, filepath.Join(dir, "p.workers")); err != nil {
		t.Fatal(err)
	}
	for _, note := range []string{"one", "two"} {
		if err := p.SetNote([]byte(note)); err != nil {
			t.Fatal(err)
		}
		if got, err := p.Note(); err != nil || string(got) != note {
			t.Errorf("note %q, %v", got, err)
		}
	}
	if got, err := os.ReadFile(precious); err != nil || string(got) != "precious" {
		t.Errorf("the link was followed: %q, %v", got, err)
	}
	files, err := os.ReadDir(dir)
	if err != nil || len(files) != 5 { // pool, index, note, two links
		t.Errorf("%v, %v", files, err)
	}
}

// A note that could not be read back is not written: the one before stays.
func TestNoteIsBounded(t *testing.T) {
	dir := t.TempDir()
	p := open(t, dir, 4096)
	defer p.Close()
	whole := bytes.Repeat([]byte("n"), pool.MaxNote)
	if err := p.SetNote(whole); err != nil {
		t.Fatal(err)
	}
	if err := p.SetNote(append(whole, '!')); !errors.Is(err, pool.ErrNote) {
		t.Errorf("one byte more: %v", err)
	}
	if got, err := p.Note(); err != nil || !bytes.Equal(got, whole) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if err := os.WriteFile(filepath.Join(dir, "p.workers"), append(whole, '!'), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := p.Note(); !errors.Is(err, shm.ErrTooLong) {
		t.Errorf("%d bytes of a note that is longer, %v", len(got), err)
	}
}

// A note that is there without its pool says nothing about a new one.
func TestNoteGoesWithItsPool(t *testing.T) {
	f := func(name string, cold bool, lose ...string) {
		t.Helper()
		dir := t.TempDir()
		leavePool(t, dir)
		for _, file := range lose {
			if err := os.Remove(filepath.Join(dir, file)); err != nil {
				t.Fatal(err)
			}
		}
		p, err := reopened(dir, cold)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		defer p.Close()
		if note, err := p.Note(); note != nil || err != nil {
			t.Errorf("%s: note %q, %v", name, note, err)
		}
		if got := p.Restored(); len(got.Resident) != 0 {
			t.Errorf("%s: %+v", name, got)
		}
	}
	f("cold", true)
	f("no pool", false, "p")
	f("neither", false, "p", "p.kvasir")
}

// damages are ways in which an index of ours can be unusable.
var damages = map[string]func(path string) error{
	"not an index": func(path string) error { return os.WriteFile(path, bytes.Repeat([]byte("x"), 8192), 0o600) },
	"short":        func(path string) error { return os.WriteFile(path, []byte("KVASIRIX"), 0o600) },
	"cut":          func(path string) error { return os.Truncate(path, 4096) },
	"mode":         func(path string) error { return os.Chmod(path, 0o644) },
	"record": func(path string) error {
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		b[4096+30] ^= 1
		return os.WriteFile(path, b, 0o600)
	},
}

// What is damaged is refused, and removed by Cold and by Drop, all of it. Dropping
// again says that there is nothing.
func TestDamagedFilesCanBeRemoved(t *testing.T) {
	for name, damage := range damages {
		dir := t.TempDir()
		leavePool(t, dir)
		if err := damage(filepath.Join(dir, "p.kvasir")); err != nil {
			t.Fatal(err)
		}
		if p, err := reopened(dir, false); err == nil {
			p.Close()
			t.Errorf("%s: the pool was taken over", name)
		}
		p, err := reopened(dir, true)
		if err != nil {
			t.Errorf("%s: not even cold: %v", name, err)
			continue
		}
		if u := p.Usage(); u.FreeBytes != 4*4096 {
			t.Errorf("%s: %+v", name, u)
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
		if err := damage(filepath.Join(dir, "p.kvasir")); err != nil && name != "record" {
			t.Fatal(err)
		}
		if _, err := pool.Drop(dir, "p"); err != nil {
			t.Errorf("%s: not even dropped: %v", name, err)
		}
		if files, err := os.ReadDir(dir); err != nil || len(files) != 0 {
			t.Errorf("%s: left %v", name, files)
		}
		if _, err := pool.Drop(dir, "p"); !errors.Is(err, pool.ErrNothing) {
			t.Errorf("%s: dropped again: %v", name, err)
		}
	}
}

// Drop says how much memory comes back, and leaves alone what is served, what
// another program or user has under the name, and what has another name.
func TestDropLeavesOthersAlone(t *testing.T) {
	dir := t.TempDir()
	p := open(t, dir, 4*4096)
	if err := p.Populate(0, 4*4096, false); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Drop(dir, "p"); !errors.Is(err, pool.ErrInUse) {
		t.Errorf("a pool that is served: %v", err)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	for _, other := range []string{"pp", "pp.kvasir", "lmcache_kv_1_0"} {
		if err := os.WriteFile(filepath.Join(dir, other), []byte("other"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if taken, err := pool.Drop(dir, "p"); err != nil || taken < 4*4096 {
		t.Errorf("%d bytes, %v", taken, err)
	}
	f := func(name string, want error, file string, uid int) {
		t.Helper()
		path := filepath.Join(dir, file)
		if err := errors.Join(os.WriteFile(path, []byte("theirs"), 0o600), os.Chown(path, uid, -1)); err != nil {
			t.Fatal(err)
		}
		for _, drop := range []func() error{
			func() error { _, err := pool.Drop(dir, name); return err },
			func() error {
				p, err := pool.Open(pool.Options{Name: name, Bytes: 4096, Dir: dir, Cold: true})
				if err == nil {
					p.Close()
				}
				return err
			},
		} {
			if err := drop(); !errors.Is(err, want) {
				t.Errorf("%s: %v, want %v", file, err, want)
			}
		}
		if b, err := os.ReadFile(path); err != nil || string(b) != "theirs" {
			t.Errorf("%s: %q, %v", file, b, err)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	f("lmcache_l1_pool_1", pool.ErrForeign, "lmcache_l1_pool_1", -1) // LMCache's own, maybe in use
	if os.Geteuid() == 0 {
		f("q", pool.ErrOwner, "q", 4242)
		f("q", pool.ErrOwner, "q.kvasir", 4242)
		f("a_kvasir_b", pool.ErrOwner, "a_kvasir_b", 4242)
	}
	files, err := os.ReadDir(dir)
	if err != nil || len(files) != 3 {
		t.Errorf("%v, %v", files, err)
	}
}

// A server that was killed between naming its index and giving it a size leaves no
// obstacle.
func TestKilledBeforeTheIndexHasASize(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "p.kvasir"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := reopened(dir, false)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if _, err := reopened(dir, false); !errors.Is(err, pool.ErrInUse) {
		t.Errorf("a second server: %v", err)
	}
}

// Another user's pool is named as such, with who has it.
func TestAnotherUsersPoolIsNamed(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to make another user's file")
	}
	dir := t.TempDir()
	leavePool(t, dir)
	if err := os.Chown(filepath.Join(dir, "p.kvasir"), 4242, 4242); err != nil {
		t.Fatal(err)
	}
	if _, err := reopened(dir, false); !errors.Is(err, pool.ErrOwner) || !strings.Contains(err.Error(), "belongs to uid 4242") {
		t.Errorf("%v", err)
	}
}

// The free space must hold the index, too.
func TestFreeSpaceCountsTheIndex(t *testing.T) {
	dir := t.TempDir()
	free, err := shm.Free(dir)
	if err != nil {
		t.Fatal(err)
	}
	_, err = pool.Open(pool.Options{Name: "p", Bytes: (free - 1<<20) / 4096 * 4096, Dir: dir}) // the index takes more than the 1 MiB
	if !errors.Is(err, pool.ErrNoSpace) {
		t.Errorf("a pool that leaves no room for its index: %v", err)
	}
	if files, _ := os.ReadDir(dir); len(files) != 0 {
		t.Errorf("left %v", files)
	}
}

// Parts of a note that a killed server left go with the next start and with the pool, and
// a pool without a note can be removed.
func TestUnfinishedNotesAreRemoved(t *testing.T) {
	dir := t.TempDir()
	leavePool(t, dir)
	part := filepath.Join(dir, "p.workers.new-123")
	leave := func() {
		t.Helper()
		if err := os.WriteFile(part, []byte("half a"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	gone := func(after string) {
		t.Helper()
		if _, err := os.Lstat(part); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("after %s: %v", after, err)
		}
	}
	for _, cold := range []bool{false, true} {
		leave()
		p, err := reopened(dir, cold)
		if err != nil {
			t.Fatal(err)
		}
		gone(fmt.Sprint("a start, cold ", cold))
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
	leave()
	if _, err := pool.Drop(dir, "p"); err != nil {
		t.Fatal(err)
	}
	gone("Drop")
	p := open(t, dir, 4096)
	defer p.Close()
	leave()
	if err := p.Remove(); err != nil {
		t.Errorf("without a note: %v", err)
	}
	gone("Remove")
	if files, err := os.ReadDir(dir); err != nil || len(files) != 0 {
		t.Errorf("left %v, %v", files, err)
	}
}
