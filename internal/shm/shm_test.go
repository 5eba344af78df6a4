// SPDX-License-Identifier: Apache-2.0

package shm_test

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
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

// Unlink does not remove a name that leads to another program's file now.
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

// The range of Populate need not begin at a page. Its first page is provided, too, and
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

// Provided does not search bytes that its caller says have memory, unless the file has fewer in all.
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

// If no segment can be made, the error gives the reason and advice: there is no folder, it is read-only, or it is another user's. A segment
// that is there does not count as damaged.
func TestFolderThatCannotBeUsed(t *testing.T) {
	if _, err := shm.Create(filepath.Join(t.TempDir(), "gone", "seg"), 4096); !errors.Is(err, shm.ErrFolder) || !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "mount a tmpfs there") {
		t.Errorf("no folder: %v", err)
	}
	if os.Getenv("TEST_FOLDER") == "" {
		if os.Getuid() != 0 {
			t.Skip("the rest needs root")
		}
		// In a mount namespace, as another user: a folder that is read-only, and one that may not be searched.
		c := exec.Command("unshare", "--mount", "sh", "-euc", `mount -t tmpfs tmpfs "$1"; mkdir "$1/closed" "$1/read"; chmod 1777 "$1/read"; cp "$0" "$1/test"
			mount -t tmpfs tmpfs "$1/read"; chmod 1777 "$1/read"; head -c 4096 /dev/zero >"$1/read/seg"; chown 65534 "$1/read/seg"; mount -o remount,ro "$1/read"
			chmod 700 "$1/closed"; cd /; TEST_FOLDER=$1 exec setpriv --reuid 65534 --regid 65534 --clear-groups "$1/test" -test.run '^TestFolderThatCannotBeUsed$' -test.v`, os.Args[0], "/mnt")
		out, err := c.CombinedOutput()
		if err != nil && strings.Contains(string(out), "unshare") {
			t.Skip(string(out))
		}
		if err != nil || !strings.Contains(string(out), "--- PASS") {
			t.Errorf("%v: %s", err, out)
		}
		return
	}
	dir := os.Getenv("TEST_FOLDER")
	f := func(name string, make bool, want string) {
		t.Helper()
		path := filepath.Join(dir, name)
		_, err := shm.AttachIf(path, shm.Ours)
		if make {
			_, err = shm.Create(path, 4096)
		}
		if !errors.Is(err, shm.ErrFolder) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
	}
	f("closed/seg", true, "uid 65534 may not make files in "+dir+"/closed, whose mode is drwx------")
	f("closed/seg", false, "InaccessiblePaths=")
	f("read/new", true, "is read-only for this process")
	f("read/seg", false, "ReadOnlyPaths=")
}
