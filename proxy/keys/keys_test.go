// SPDX-License-Identifier: Apache-2.0

package keys_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy/keys"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func line(name, secret, more string) string {
	return fmt.Sprintf("%s %x %s\n", name, sha256.Sum256([]byte(secret)), more)
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// Each secret finds one key, with a salt of its own. An unknown secret finds none.
func TestFind(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys")
	write(t, path, "# who may\n\n"+line("ada", "s1", "")+line("bob", "s2", "rate=2 concurrent=3")+line("eve", "s3", "salt=off"))
	s, err := keys.Open(path)
	if err != nil || s.Len() != 3 {
		t.Fatal(err)
	}
	a, b, e := s.Find("s1"), s.Find("s2"), s.Find("s3")
	if a.Name != "ada" || b.Name != "bob" || len(a.Salt) != 32 || a.Salt == b.Salt || e.Salt != "" {
		t.Errorf("%+v %+v %+v", a, b, e)
	}
	for _, no := range []string{"", "s", "s4", fmt.Sprintf("%x", sha256.Sum256([]byte("s1")))} {
		if s.Find(no) != nil {
			t.Errorf("%q is a key", no)
		}
	}
}

func TestBadFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys")
	f := func(text, want string) {
		t.Helper()
		write(t, path, text)
		if _, err := keys.Open(path); !errors.Is(err, keys.ErrFile) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", text, err)
		}
	}
	f("ada", "line 1: want NAME SHA256")
	f("\nada secret", "line 2: the second word is not the 64 digits")
	f(line("a", "1", "")+line("b", "1", ""), "line 2")
	f(line("a", "1", "")+line("a", "2", ""), "listed twice")
	f(line("a", "1", "rate=0"), "rate=0")
	f(line("a", "1", "rate=NaN"), "rate=NaN")
	f(line("a", "1", "concurrent=-1"), "concurrent=-1")
	f(line("a", "1", "fast"), `"fast"`)
	f(line(strings.Repeat("a", 65), "1", ""), "at most 64 bytes")
	f("", "it is empty")
	f("# nothing\n", "it has no entry")
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	f(line("a", "1", ""), "every user of this machine may read")
	if _, err := keys.Open(path + "x"); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// A rate holds over time, a burst of one second's requests may come at once, and two keys have each
// their own.
func TestLimits(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys")
	write(t, path, line("a", "1", "rate=4")+line("b", "2", "rate=4")+line("c", "3", "concurrent=2"))
	s, err := keys.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Unix(1000, 0)
	a, b, c := s.Find("1"), s.Find("2"), s.Find("3")
	for range 4 {
		if _, ok := a.Begin(now); !ok {
			t.Fatal("the burst is refused")
		}
	}
	if wait, ok := a.Begin(now); ok || wait != 250*time.Millisecond {
		t.Error(wait, ok)
	}
	if _, ok := b.Begin(now); !ok {
		t.Error("another key is refused")
	}
	n := 0
	for i := range 1000 {
		if _, ok := a.Begin(now.Add(time.Duration(i) * 10 * time.Millisecond)); ok {
			n++
		}
	}
	if n < 38 || n > 41 {
		t.Errorf("%d requests in 10 s at 4 per second", n)
	}
	if _, ok := a.Begin(now.Add(-time.Hour)); ok {
		t.Error("a clock that steps back gives requests")
	}
	for _, want := range []bool{true, true, false} {
		if _, ok := c.Begin(now); ok != want {
			t.Error("concurrent")
		}
	}
	c.End()
	if _, ok := c.Begin(now); !ok {
		t.Error("a place is not given back")
	}
}

// A file that changes is read again: keys come and go, those that stay keep what they have used, and
// a broken file changes nothing.
func TestWatch(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys")
	synctest.Test(t, func(t *testing.T) {
		write(t, path, line("a", "1", "concurrent=1")+line("b", "2", ""))
		s, err := keys.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		go s.Watch(ctx, time.Second, slog.New(slog.DiscardHandler))
		if _, ok := s.Find("1").Begin(time.Now()); !ok {
			t.Fatal("a")
		}
		write(t, path, line("a", "1", "concurrent=1")+line("c", "33", "rate=1"))
		time.Sleep(8 * time.Second)
		synctest.Wait()
		if s.Find("2") != nil || s.Find("33") == nil {
			t.Error("the file is not read again")
		}
		if _, ok := s.Find("1").Begin(time.Now()); ok {
			t.Error("what a has in progress is forgotten")
		}
		write(t, path, "broken")
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if s.Find("33") == nil {
			t.Error("a broken file takes keys away")
		}
		stop()
	})
}

// A file that is being written locks no client out: neither while it is empty, nor while it ends within a line, nor while it
// lacks lines. Its keys count when the file has not changed for a while, and each problem is logged once.
func TestFilesThatAreBeingWritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys")
	synctest.Test(t, func(t *testing.T) {
		whole := line("a", "1", "") + line("b", "2", "")
		write(t, path, whole)
		s, err := keys.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		var logged bytes.Buffer
		ctx, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { s.Watch(ctx, time.Second, slog.New(slog.NewTextHandler(&logged, nil))) })
		step := func(text string, wait time.Duration, want ...string) {
			t.Helper()
			write(t, path, text)
			time.Sleep(wait)
			synctest.Wait()
			var got []string
			for _, secret := range []string{"1", "2", "33"} {
				if s.Find(secret) != nil {
					got = append(got, secret)
				}
			}
			if !slices.Equal(got, want) {
				t.Errorf("after %q for %v: keys %v, %v are wanted", text, wait, got, want)
			}
		}
		step("", 30*time.Second, "1", "2")
		step("# only a comment\n", 30*time.Second, "1", "2")
		step(line("a", "1", ""), 4*time.Second, "1", "2") // cut between lines
		step(strings.TrimSuffix(line("c", "33", "")+whole, "\n"), 30*time.Second, "1", "2")
		step(whole+line("c", "33", ""), 3*time.Second, "1", "2", "33")
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		time.Sleep(30 * time.Second)
		step(line("c", "33", ""), 9*time.Second, "33")
		stop()
		wg.Wait()
		if n := strings.Count(logged.String(), "level=ERROR"); n != 4 {
			t.Errorf("%d errors are logged, 4 states are wrong:\n%s", n, logged.String())
		}
		if n := strings.Count(logged.String(), "level=WARN"); n != 1 {
			t.Errorf("%d warnings:\n%s", n, logged.String())
		}
	})
}

// No file makes Open panic.
func FuzzOpen(f *testing.F) {
	f.Add(line("a", "1", "rate=2 concurrent=3 salt=off"))
	path := filepath.Join(f.TempDir(), "keys")
	f.Fuzz(func(t *testing.T, text string) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Skip("the file cannot be written: ", err)
		}
		if s, err := keys.Open(path); err == nil && s.Len() > strings.Count(text, "\n")+1 {
			t.Fatalf("%d keys", s.Len())
		}
	})
}

// Keys behind a link that is changed to another file are read, also where both files have one time and size, as in images whose files all
// have the same.
func TestLinksThatAreChanged(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	day := time.Unix(1, 0)
	for name, secret := range map[string]string{"old": "1", "new": "2"} {
		write(t, at(name), line("a", secret, "")+line("z", "9", ""))
		if err := os.Chtimes(at(name), day, day); err != nil {
			t.Fatal(err)
		}
	}
	link := func(to string) {
		t.Helper()
		if err := errors.Join(os.Symlink(to, at("next")), os.Rename(at("next"), at("keys"))); err != nil {
			t.Fatal(err)
		}
	}
	link("old")
	synctest.Test(t, func(t *testing.T) {
		s, err := keys.Open(at("keys"))
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		go s.Watch(ctx, time.Second, slog.New(slog.DiscardHandler))
		link("new")
		time.Sleep(8 * time.Second)
		synctest.Wait()
		if s.Find("1") != nil || s.Find("2") == nil || s.Find("9") == nil {
			t.Error("the keys are those of the former file")
		}
		link("old")
		time.Sleep(8 * time.Second)
		synctest.Wait()
		if s.Find("1") == nil || s.Find("2") != nil {
			t.Error("the keys are not those of the former file again")
		}
		stop()
	})
}

// A file that is looked at again and again is a regular one: a FIFO without a writer would hang the start.
func TestFIFOIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := keys.Open(path); !errors.Is(err, keys.ErrFile) || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("%v", err)
	}
}
