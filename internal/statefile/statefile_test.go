// SPDX-License-Identifier: Apache-2.0

package statefile

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const magic = "test 1"

func mustOpen(t *testing.T, path string) (*File, []byte) {
	t.Helper()
	f, doc, err := Open(path, magic, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() }) // a second Close does no harm
	return f, doc
}

// The next process reads the document that one process wrote, and only one process has the file at a time.
func TestOneAfterAnother(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	f, doc := mustOpen(t, path)
	if doc != nil {
		t.Fatalf("%q", doc)
	}
	for _, d := range []string{"", "{}", "a\nb", strings.Repeat("x", 1<<20-20)} {
		if err := f.Write([]byte(d)); err != nil {
			t.Fatal(err)
		}
		if _, _, err := Open(path, magic, 1<<20); err == nil || !strings.Contains(err.Error(), path+" is in use") {
			t.Fatal(err)
		}
		_ = f.Close()
		f, doc = mustOpen(t, path)
		if string(doc) != d {
			t.Fatalf("%.50q, want %.50q", doc, d)
		}
	}
	if err := f.Write(make([]byte, 1<<20)); err == nil {
		t.Fatal("wrote more than is read back")
	}
	_ = f.Close()
	if _, doc = mustOpen(t, path); len(doc) != 1<<20-20 {
		t.Fatalf("%d bytes after a write that was refused", len(doc))
	}
}

// The kernel releases the lock of a killed process a moment later. The next process waits for that.
func TestLockOfAKilledProcess(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	f, _ := mustOpen(t, path)
	if err := os.WriteFile(path+".lock", []byte("1073741824"), 0o600); err != nil { // no process has such a number
		t.Fatal(err)
	}
	time.AfterFunc(300*time.Millisecond, func() { _ = f.Close() })
	for try := 1; ; try++ {
		began := time.Now()
		next, _, err := Open(path, magic, 1<<20)
		if err == nil {
			_ = next.Close()
			return
		}
		if took := time.Since(began); took < 3*time.Second || try == 5 { // the timer may be later than Open waits
			t.Fatalf("after %v: %v", took, err)
		}
	}
}

// A damaged file is an error that names it, wherever the damage is.
func TestDamage(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	f, _ := mustOpen(t, path)
	if err := f.Write([]byte(`{"a":1}`)); err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	refused := func(b []byte) {
		t.Helper()
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		f, _, err := Open(path, magic, 1<<10)
		if e, ok := errors.AsType[*Error](err); !ok || e.Path != path || !strings.Contains(err.Error(), path) {
			_ = f.Close()
			t.Fatalf("%q: %v", b, err)
		} else if e.Foreign == bytes.HasPrefix(b, []byte(magic+" ")) {
			t.Fatalf("%q: of something else: %v", b, e.Foreign)
		}
	}
	for n := range len(good) - 1 { // without the last byte, a newline, it is whole
		refused(good[:n])
	}
	for i := range len(good) - 1 {
		b := bytes.Clone(good)
		b[i] ^= 0x10
		refused(b)
	}
	refused(append(bytes.Clone(good), make([]byte, 1<<10)...))
}

// A file that an interrupted write left beside the state file does no harm, and a link there is
// not followed.
func TestLeftovers(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	f, _ := mustOpen(t, path)
	for _, rest := range []string{"", magic + " 0000", strings.Repeat("x", 1<<16)} {
		if err := os.WriteFile(path+".tmp", []byte(rest), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := f.Write([]byte("new")); err != nil {
			t.Fatal(err)
		}
	}
	other := filepath.Join(dir, "other")
	if err := errors.Join(os.WriteFile(other, []byte("keep"), 0o600), os.Symlink(other, path+".tmp")); err != nil {
		t.Fatal(err)
	}
	if err := f.Write([]byte("through the link")); err == nil {
		t.Fatal("wrote through a link")
	}
	if b, err := os.ReadFile(other); err != nil || string(b) != "keep" {
		t.Fatalf("%q, %v", b, err)
	}
	_ = f.Close()
	if _, doc := mustOpen(t, path); string(doc) != "new" {
		t.Fatalf("%q", doc)
	}
}

// Two writers at the same time leave one of the two documents, never a mixture.
func TestTwoWriters(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	f, _ := mustOpen(t, path)
	docs := []string{strings.Repeat("a", 1<<16), strings.Repeat("b", 1<<10)}
	var wg sync.WaitGroup
	for _, doc := range docs {
		wg.Go(func() {
			for range 50 {
				if err := f.Write([]byte(doc)); err != nil {
					t.Error(err)
				}
				if got, err := f.read(); err != nil || string(got) != docs[0] && string(got) != docs[1] {
					t.Errorf("%d bytes read, %v", len(got), err)
				}
			}
		})
	}
	wg.Wait()
}

// A path that is no regular file is refused at once: a FIFO has no end.
func TestFIFOIsRefused(t *testing.T) {
	for _, writer := range []bool{false, true} {
		path := filepath.Join(t.TempDir(), "state")
		if err := syscall.Mkfifo(path, 0o600); err != nil {
			t.Fatal(err)
		}
		if writer {
			w, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer w.Close()
		}
		done := make(chan error, 1)
		go func() {
			f, _, err := Open(path, "test1", 1<<20)
			if err == nil {
				_ = f.Close()
			}
			done <- err
		}()
		select {
		case err := <-done:
			if err == nil || !strings.Contains(err.Error(), "not a regular file") {
				t.Errorf("a writer: %v: %v", writer, err)
			}
		case <-time.After(10 * time.Second):
			t.Fatal("Open hangs")
		}
	}
}

// A file of a later version is refused with that reason, and stays as it is. A file that only resembles one is refused as another file.
func TestLaterVersionIsRefusedByName(t *testing.T) {
	f := func(head string, newer bool) {
		t.Helper()
		path := filepath.Join(t.TempDir(), "f")
		text := head + " 00000000\n{}\n"
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, _, err := Open(path, "kvasir-test 1", 1<<20)
		e, ok := errors.AsType[*Error](err)
		if !ok || e.Newer != newer || !e.Foreign || strings.Contains(err.Error(), "a later release") != newer {
			t.Fatalf("%q: %v", head, err)
		}
		if got, _ := os.ReadFile(path); string(got) != text {
			t.Fatalf("%q was changed to %q", text, got)
		}
	}
	f("kvasir-test 2", true)
	f("kvasir-test 10", true)
	f("kvasir-test 0", false)
	f("kvasir-test x", false)
	f("kvasir-other 2", false)
}
