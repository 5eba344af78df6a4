// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// An operator removes the directory of a cache, and a running engine makes it again, without config.json: the limit holds in
// the new directory. It holds also if the directory was renamed and another one has its path.
func TestDirectoryThatIsReplaced(t *testing.T) {
	for _, w := range watches(t) {
		x := newTier(t, 1000)
		root := filepath.Join(x.root, "kv")
		if err := os.MkdirAll(filepath.Join(root, base), 0o755); err != nil {
			t.Fatal(err)
		}
		x.root = root
		x.configure(base)
		x.store(1, 2)
		var log lines
		k := open(t, Options{Roots: []string{root}, Limit: 8000, Watch: w, pathsEvery: 5 * time.Millisecond, Log: slog.New(slog.NewTextHandler(&log, nil))})
		for i, empty := range []func() error{
			func() error { return os.RemoveAll(root) },
			func() error { return os.Rename(root, filepath.Join(filepath.Dir(root), "aside")) },
		} {
			if err := empty(); err != nil {
				t.Fatal(err)
			}
			for n := range 20 {
				x.store(100*i + n)
			}
			// Until the look at the new directory is over, the files of the old one count, too, and the keeper may unlink more than the
			// limit needs. The engine writes on.
			more := 20
			testkit.Eventually(t, "the limit holds in the new directory, and the room is used", func() bool {
				files, bytes := x.there()
				if files < 6 {
					x.store(100*i + more)
					more++
				}
				return files == 6 && k.Stats().Total == bytes
			})
			if s, err := Ask(t.Context(), root); err != nil || s.Total != 6000 || s.Directories[0].Model != "org/model" {
				t.Errorf("%s: %+v, %v", w, s, err)
			}
			x.configure(base) // an engine does this at its next start
			if other, err := Open(Options{Roots: []string{root}, Limit: 1}); err == nil || !strings.Contains(err.Error(), "another keeper") {
				t.Errorf("%s: %v, %v", w, other, err)
			}
		}
		aside := &tier{t: t, root: filepath.Join(filepath.Dir(root), "aside")}
		if n := strings.Count(log.String(), "a directory was replaced"); n != 2 {
			t.Errorf("%s: %d directories were replaced, want 2:\n%s", w, n, log.String())
		}
		if files, _ := aside.there(); files < 5 || files > 6 { // a file that a look saw while it was unlinked counts twice for a moment
			t.Errorf("%s: of a directory that was renamed %d files are left", w, files)
		}
		closed(t, k)
	}
}

// The keeper soon counts a directory of a rank that is moved out or in, although no event names its files.
func TestDirectoryOfARankThatIsMoved(t *testing.T) {
	for _, w := range watches(t) {
		x := newTier(t, 1000)
		x.store(1, 2, 3)
		k := open(t, Options{Roots: []string{x.root}, TTL: time.Hour, Watch: w, pathsEvery: 5 * time.Millisecond})
		rank, aside := filepath.Join(x.root, base+"_r0"), filepath.Join(t.TempDir(), "aside")
		if err := os.Rename(rank, aside); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, "the files are gone", func() bool { return k.Stats().Total == 0 })
		if err := os.Rename(aside, rank); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, "the files are there again", func() bool { return k.Stats().Total == 3000 })
		closed(t, k)
	}
}

// A directory inside a rank's is removed with its files before the keeper reads the events. These name only a directory that does not exist
// any more, or one that is still open and has no path. The keeper stops counting the files soon, not only after the next look.
func TestDirectoryInsideARankThatIsRemoved(t *testing.T) {
	f := func(w Watch, held bool) {
		x := newTier(t, 1000)
		x.store(1, 2, 3)
		k := open(t, Options{Roots: []string{x.root}, TTL: time.Hour, Watch: w, pathsEvery: 5 * time.Millisecond})
		testkit.Eventually(t, "the first look is over", func() bool { k.mu.Lock(); defer k.mu.Unlock(); return k.arranged })
		leaves := []string{filepath.Dir(x.path(1)), filepath.Dir(x.path(2))}
		for _, leaf := range leaves {
			dir, err := os.Open(leaf)
			if err != nil {
				t.Fatal(err)
			}
			if !held {
				dir.Close()
			}
			defer dir.Close()
		}
		func() {
			k.mu.Lock() // the keeper reads one event, and waits
			defer k.mu.Unlock()
			x.store(4)
			time.Sleep(50 * time.Millisecond)
			for _, leaf := range leaves {
				if err := os.RemoveAll(filepath.Dir(leaf)); err != nil {
					t.Error(err)
				}
			}
		}()
		testkit.Eventually(t, fmt.Sprintf("%s, held open: %v: two files of four are gone", w, held), func() bool { return k.Stats().Total == 2000 })
		closed(t, k)
	}
	for _, w := range watches(t) {
		f(w, false)
		f(w, true)
	}
}

// If a directory of another program gets the path of a directory of the keeper, the keeper leaves it alone.
func TestForeignDirectoryAtThePathOfARoot(t *testing.T) {
	x := newTier(t, 1000)
	root := filepath.Join(x.root, "kv")
	if err := os.Rename(filepath.Join(x.root, base), filepath.Join(x.root, "was")); err != nil {
		t.Fatal(err)
	}
	x.root = root
	if err := os.MkdirAll(root, 0o755); err != nil {
		t.Fatal(err)
	}
	x.configure(base)
	x.store(1)
	var log lines
	k := open(t, Options{Roots: []string{root}, Limit: 1, pathsEvery: time.Millisecond, Log: slog.New(slog.NewTextHandler(&log, nil))})
	defer closed(t, k)
	testkit.Eventually(t, "the limit holds", func() bool { return k.Stats().Total == 0 })
	home := filepath.Join(filepath.Dir(root), "home")
	stranger := filepath.Join(home, strings.TrimPrefix(x.path(1), root))
	stranger = strings.Replace(stranger, base, "another_0123456789ab", 1)
	if err := errors.Join(os.MkdirAll(filepath.Dir(stranger), 0o755), os.WriteFile(stranger, x.row, 0o644), os.RemoveAll(root), os.Symlink(home, root)); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "it is said", func() bool { return strings.Contains(log.String(), "that the keeper cannot use") })
	if _, err := os.Lstat(stranger); err != nil {
		t.Error(err)
	}
	if n := strings.Count(log.String(), "that the keeper cannot use"); n != 1 {
		t.Errorf("it is said %d times", n)
	}
}
