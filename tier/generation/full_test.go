// SPDX-License-Identifier: Apache-2.0

package generation_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/generation"
)

const fullDirectory = "KVASIR_TEST_FULL"

// A directory that is full of objects keeps a clear, and further ones in later lives.
func TestClearInAFullDirectoryIsKept(t *testing.T) {
	dir := os.Getenv(fullDirectory)
	if dir == "" {
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		c := exec.Command("unshare", "--mount", "sh", "-euc", `mount -t tmpfs -o size=256k tmpfs "$1"; exec "$0" -test.run "^$2\$" -test.v`, self, t.TempDir(), t.Name())
		c.Env = append(os.Environ(), fullDirectory+"="+c.Args[6])
		out, err := c.CombinedOutput()
		switch text := string(out); {
		case errors.Is(err, exec.ErrNotFound) || err != nil && (strings.Contains(text, "not permitted") || strings.Contains(text, "denied")):
			t.Skipf("a small file system needs root: %v %s", err, text)
		case err != nil || !strings.Contains(text, "--- PASS"):
			t.Fatalf("%v\n%s", err, text)
		}
		return
	}
	file := filepath.Join(dir, generation.FileName)
	names := tier.NewNames()
	b := open(t, names, file)
	if err := b.Repair(); err != nil {
		t.Fatal(err)
	}
	fill(t, dir)
	want := ""
	for i := range 4 {
		commit, err := b.Prepare([]string{"m", "n"}[:1+i%2])
		if err != nil {
			t.Fatalf("clear %d: %v", i, err)
		}
		commit()
		text, err := os.ReadFile(file)
		if err != nil || string(text) == want {
			t.Fatalf("clear %d: %s, %v", i, text, err)
		}
		want = string(text)
		fill(t, dir) // the room that the clear freed
		if i%2 == 0 {
			continue // the next clear is of the same life
		}
		if b = open(t, names, file); b.Damaged() {
			t.Fatal("damaged")
		}
		if err := b.Repair(); err != nil {
			t.Fatal(err)
		}
	}
}

// fill writes until the file system is full.
func fill(t *testing.T, dir string) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(dir, "objects"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for {
		if _, err := f.Write(make([]byte, 4096)); errors.Is(err, syscall.ENOSPC) {
			return
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

// The Book leaves other files at the path of its reserve alone. A clear in a directory with room is kept nevertheless.
func TestRoomOfOthersIsLeftAlone(t *testing.T) {
	for _, what := range []string{"link", "hard link", "directory"} {
		dir := t.TempDir()
		other, room := filepath.Join(t.TempDir(), "other"), filepath.Join(dir, generation.FileName+".room")
		if err := os.WriteFile(other, []byte("mine"), 0o600); err != nil {
			t.Fatal(err)
		}
		err := map[string]func() error{
			"link": func() error { return os.Symlink(other, room) }, "hard link": func() error { return os.Link(other, room) }, "directory": func() error { return os.Mkdir(room, 0o700) },
		}[what]()
		if err != nil {
			t.Logf("%s: not here: %v", what, err)
			continue
		}
		b := open(t, tier.NewNames(), filepath.Join(dir, generation.FileName))
		if err := b.Repair(); err != nil {
			t.Error(err)
		}
		if _, err := b.Prepare(nil); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if text, err := os.ReadFile(other); err != nil || string(text) != "mine" {
			t.Errorf("%s: %q, %v", what, text, err)
		}
	}
}
