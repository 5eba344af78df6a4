// SPDX-License-Identifier: Apache-2.0

package shm_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/shm"
)

func TestCreateAttach(t *testing.T) {
	path := filepath.Join(t.TempDir(), "seg")
	a, err := shm.Create(path, 8192)
	if err != nil {
		t.Fatal(err)
	}
	if st, _ := os.Stat(path); st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v", st.Mode())
	}
	if _, err := shm.Create(path, 8192); !errors.Is(err, fs.ErrExist) {
		t.Errorf("second create: %v", err)
	}
	b, err := shm.Attach(path)
	if err != nil {
		t.Fatal(err)
	}
	copy(a.Bytes(4000, 200), "across a page")
	if got := string(b.Bytes(4000, 13)); got != "across a page" {
		t.Errorf("the other mapping sees %q", got)
	}
	a.Word(16).Store(0x0102030405060708)
	if b.Bytes(16, 1)[0] != 8 || b.Inode() != a.Inode() {
		t.Error("not the same memory")
	}
	if err := a.Lock(); err != nil {
		t.Fatal(err)
	}
	if err := b.Lock(); !errors.Is(err, shm.ErrLocked) {
		t.Errorf("second lock: %v", err)
	}
	if err := a.Unlink(); err != nil || a.Exists() {
		t.Errorf("unlink: %v", err)
	}
	if err := errors.Join(a.Unlink(), a.Close()); err != nil {
		t.Fatal(err)
	}
	if got := string(b.Bytes(4000, 13)); got != "across a page" {
		t.Errorf("after unlink and the other's close: %q", got)
	}
	if err := b.Close(); err != nil || shm.Mapped() != 0 {
		t.Errorf("%v, %d mapped", err, shm.Mapped())
	}
}

// A name that was taken over by somebody else's file is not removed.
func TestUnlinkOnlyItsOwn(t *testing.T) {
	path := filepath.Join(t.TempDir(), "seg")
	a, err := shm.Create(path, 4096)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if err := errors.Join(os.Remove(path), os.WriteFile(path, []byte("other"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := a.Unlink(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Fatal("a foreign file was removed")
	}
}

func TestAttachRefuses(t *testing.T) {
	dir := t.TempDir()
	empty := filepath.Join(dir, "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink("/dev/zero", link); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{empty, link, dir, filepath.Join(dir, "absent")} {
		if s, err := shm.Attach(path); err == nil {
			s.Close()
			t.Errorf("%s was mapped", path)
		}
	}
}

func TestPath(t *testing.T) {
	f := func(name, want string) {
		t.Helper()
		got, err := shm.Path("/d", name)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("Path(%q) = %q, %v, want %q", name, got, err, want)
		}
	}
	f("a", "/d/a")
	f("/a", "/d/a")
	f("", "")
	f("/", "")
	f("..", "")
	f("../a", "")
	f("a/b", "")
	f("a\x00", "")
}

func TestBoundsPanic(t *testing.T) {
	s, err := shm.Create(filepath.Join(t.TempDir(), "seg"), 4096)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	f := func(off, n int64) {
		t.Helper()
		defer func() {
			if recover() == nil {
				t.Errorf("Bytes(%d, %d) did not panic", off, n)
			}
		}()
		s.Bytes(off, n)
	}
	f(-1, 1)
	f(0, 4097)
	f(4096, 1)
	f(1, 1<<63-1)
	f(1<<63-1, 1)
}

// What is provided need not begin at a page: its first page is provided, too, and
// keeps its content.
func TestPopulateAnywhere(t *testing.T) {
	s, err := shm.Create(filepath.Join(t.TempDir(), "seg"), 16*4096)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	copy(s.Bytes(0, 7), "content")
	for _, keep := range []bool{true, false} {
		if err := s.Populate(100, 3*4096, keep); err != nil {
			t.Fatal(err)
		}
		if err := s.Populate(16*4096-1, 1, keep); err != nil {
			t.Fatal(err)
		}
	}
	if string(s.Bytes(0, 7)) != "content" {
		t.Errorf("%q", s.Bytes(0, 7))
	}
	if got := s.Provided(0); got < 4*4096 {
		t.Errorf("%d bytes have memory, want 4 pages at least", got)
	}
}

// What is said to have memory is not searched, unless the file has less in all.
func TestProvidedSkipsRecordedMemory(t *testing.T) {
	s, err := shm.Create(filepath.Join(t.TempDir(), "s"), 64*4096)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.Populate(0, 8*4096, false); err != nil {
		t.Skip("memory cannot be provided here: ", err)
	}
	if got := s.Provided(0); got != 8*4096 {
		t.Skipf("this file system does not tell holes: %d", got)
	}
	f := func(known, want int64) {
		t.Helper()
		if got := s.Provided(known); got != want {
			t.Errorf("with %d known: %d, want %d", known, got, want)
		}
	}
	f(4*4096, 8*4096)
	f(8*4096, 8*4096)
	f(9*4096, 8*4096) // cannot be
	f(64*4096, 8*4096)
	f(1<<60, 8*4096)
	f(-1, 8*4096)
}
