// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// The keeper refuses a directory of another program with an error that says what is missing in it. It also refuses one that another keeper
// has. Both stay as they are.
func TestForeignDirectoriesAreRefused(t *testing.T) {
	f := func(what, want string, make func(dir string) error) {
		t.Helper()
		dir := t.TempDir()
		if err := make(dir); err != nil {
			t.Fatal(err)
		}
		before := listing(t, dir)
		k, err := Open(Options{Roots: []string{dir}, Limit: 1})
		if err == nil {
			closed(t, k)
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", what, err, want)
		}
		if after := listing(t, dir); after != before {
			t.Errorf("%s: before %s, after %s", what, before, after)
		}
	}
	write := func(text string, parts ...string) func(string) error {
		return func(dir string) error {
			path := filepath.Join(append([]string{dir}, parts...)...)
			return errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644))
		}
	}
	f("a home", "no MODEL_HASH/config.json", write("x", "notes.txt"))
	f("a model", "no MODEL_HASH/config.json", write("{}", "config.json"))
	f("a cache of models", "lacks model_name or blocks_per_file", write(`{"model_type":"llama"}`, "llama", "config.json"))
	f("a rank without its config.json", "config.json: no such file", write("x", base+"_r0", "012", "34_g0", "x.bin"))
	f("a config.json that is no JSON", "invalid character", write("x", base, "config.json"))
	f("a file", "not a directory", func(dir string) error {
		return errors.Join(os.Remove(dir), os.WriteFile(dir, nil, 0o644))
	})
	f("a config.json that is a FIFO", base+"/config.json", func(dir string) error {
		return errors.Join(os.Mkdir(filepath.Join(dir, base), 0o755), mkfifo(filepath.Join(dir, base, "config.json")))
	})
	x := newTier(t, 10)
	x.store(1)
	k := open(t, Options{Roots: []string{x.root}, TTL: time.Hour})
	defer closed(t, k)
	if other, err := Open(Options{Roots: []string{x.root}, Limit: 1}); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("another keeper on this host already keeps %s (process %d)", x.root, os.Getpid())) {
		t.Errorf("%v %v", other, err)
	}
	if files, _ := x.there(); files != 1 {
		t.Errorf("%d files are left", files)
	}
	if _, err := Open(Options{Roots: []string{x.root, x.root + "/" + base + "/.."}, Limit: 1}); err == nil || !strings.Contains(err.Error(), "one directory") {
		t.Error(err)
	}
}

func listing(t *testing.T, dir string) string {
	var out []string
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		out = append(out, path)
		return err
	})
	return strings.Join(out, " ")
}

// The keeper unlinks only files of KV. Directories, config.json, other files and young temporary files stay, and so do files behind a
// symbolic link.
func TestOnlyFilesOfKVGo(t *testing.T) {
	x := newTier(t, 1000)
	x.store(1, 2, 3)
	elsewhere := newTier(t, 1000)
	elsewhere.store(5)
	leaf := filepath.Dir(x.path(1))
	old := time.Now().Add(-2 * time.Hour)
	young, dead := x.path(1)+"_17.tmp", x.path(1)+"_18.tmp"
	keep := []string{young, leaf + "/notes.txt", leaf + "/" + strings.Repeat("0", 64) + ".bin", x.root + "/" + base + "_r0/readme", x.root + "/stray.bin"}
	for _, path := range append(keep, dead) {
		if err := os.WriteFile(path, []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
		if path != young {
			if err := os.Chtimes(path, old, old); err != nil {
				t.Fatal(err)
			}
		}
	}
	other := strings.Split(strings.TrimPrefix(elsewhere.path(5), elsewhere.root+"/"), "/")
	top := filepath.Join(x.root, base+"_r0", other[1])
	_ = os.RemoveAll(top)
	if err := os.Symlink(filepath.Join(elsewhere.root, other[0], other[1]), top); err != nil {
		t.Fatal(err)
	}
	k := open(t, Options{Roots: []string{x.root}, Limit: 1, Log: slog.New(slog.NewTextHandler(t.Output(), nil))})
	defer closed(t, k)
	testkit.Eventually(t, "the files are gone", func() bool { return k.Stats().Total == 0 })
	for _, path := range append(keep, filepath.Join(x.root, base, "config.json"), elsewhere.path(5), leaf) {
		if _, err := os.Lstat(path); err != nil {
			t.Error(err)
		}
	}
	for _, path := range []string{dead, x.path(1), x.path(2), x.path(3)} {
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

// The keeper unlinks files that were not used for the time to live, and keeps a file that was read meanwhile.
func TestTimeToLive(t *testing.T) {
	for _, w := range watches(t) {
		x := newTier(t, 1000)
		x.store(1, 2)
		old := time.Now().Add(-2 * time.Hour)
		for _, i := range []int{1, 2} {
			if err := os.Chtimes(x.path(i), old, old); err != nil {
				t.Fatal(err)
			}
		}
		k := open(t, Options{Roots: []string{x.root}, TTL: 3 * time.Hour, Watch: w, countOwnReads: true})
		x.load(1) // the kernel notes it as well: the last access is before the last write, or more than a day ago
		if w != WatchLook {
			testkit.Eventually(t, "one read", func() bool { return k.Stats().Directories[0].Reads > 0 })
		}
		closed(t, k)
		if files, _ := x.there(); files != 2 {
			t.Errorf("%s: %d files before their time", w, files)
		}
		later := func() time.Time { return time.Now().Add(2 * time.Hour) }
		k = open(t, Options{Roots: []string{x.root}, TTL: 3 * time.Hour, Watch: w, now: later})
		testkit.Eventually(t, "one expires", func() bool { d := k.Stats().Directories[0]; return d.Expired == 1 && d.Files == 1 })
		if there := x.load(1, 2); fmt.Sprint(there) != "[1]" {
			t.Errorf("%s: %v are there", w, there)
		}
		closed(t, k)
	}
}

// After a restart the keeper knows the earlier order from its notes, although access times say nothing.
func TestOrderOutlivesTheKeeper(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	x, state := newTier(t, 1000), filepath.Join(t.TempDir(), "not", "there") // the keeper makes it
	w := watches(t)[0]
	clock := &clock{at: time.Now()}
	k := open(t, Options{Roots: []string{x.root}, TTL: time.Hour, Watch: w, StateDir: state, countOwnReads: true, now: clock.now})
	for i := range 4 {
		x.store(i)
		testkit.Eventually(t, "it is known", func() bool { d := k.Stats().Directories; return len(d) > 0 && d[0].Files == int64(i+1) })
		clock.nextJob()
	}
	x.load(0)
	testkit.Eventually(t, "it was read", func() bool { return k.Stats().Directories[0].Reads == 1 })
	closed(t, k)
	same := time.Now().Add(-time.Hour)
	for i := range 4 {
		if err := os.Chtimes(x.path(i), same, same); err != nil {
			t.Fatal(err)
		}
	}
	k = open(t, Options{Roots: []string{x.root}, TTL: 24 * time.Hour, Watch: w, StateDir: state, now: clock.now})
	defer closed(t, k)
	k.mu.Lock()
	defer k.mu.Unlock()
	for n, want := k.books.coldest(), []int{1, 2, 3, 0}; n != 0; n = k.books.file(n).next {
		if !strings.HasSuffix(x.path(want[0]), k.path(n)) {
			t.Errorf("%s goes, want %s", k.path(n), x.path(want[0]))
		}
		want = want[1:]
	}
	if k.notes.dirs != nil {
		t.Error("the notes of the former keeper stay in memory")
	}
}

// Verify names files whose bytes changed, and leaves the order of a running keeper as it is.
func TestVerify(t *testing.T) {
	x, state := newTier(t, 5000), t.TempDir()
	x.store(1, 2, 3, 4, 5)
	k := open(t, Options{Roots: []string{x.root}, TTL: time.Hour, Watch: watches(t)[0]})
	defer closed(t, k)
	verify := func(want ...string) {
		t.Helper()
		report, err := Verify(t.Context(), VerifyOptions{Roots: []string{x.root}, StateDir: state})
		if err != nil {
			t.Fatal(err)
		}
		if len(report.Faults) != len(want) {
			t.Fatalf("%+v, want %v", report, want)
		}
		for i, f := range report.Faults {
			if !strings.Contains(f.Path+": "+f.Reason, want[i]) {
				t.Errorf("%+v, want %s", f, want[i])
			}
		}
	}
	verify()
	verify()
	flip := func(i int) {
		b := bytes.Clone(x.row)
		b[100]++
		if err := os.WriteFile(x.path(i), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	flip(1)
	verify(filepath.Base(x.path(1)) + ": its bytes changed in place")
	verify(filepath.Base(x.path(1)) + ": its bytes changed in place")
	if err := os.Remove(x.path(1)); err != nil {
		t.Fatal(err)
	}
	x.store(1)
	verify()
	hold, err := os.Open(x.path(2)) // so that its inode is not given out again
	if err != nil {
		t.Fatal(err)
	}
	defer hold.Close()
	if err := os.Remove(x.path(2)); err != nil {
		t.Fatal(err)
	}
	flip(2)
	verify("another file with other bytes took its place")
	verify()
	if err := os.Truncate(x.path(3), 100); err != nil {
		t.Fatal(err)
	}
	verify("changed in place", "it has 100 bytes, as 1 files; 4 others have 5000")
	testkit.Eventually(t, "the keeper hears of the changes", func() bool { return k.Stats().Directories[0].Writes+k.Stats().Directories[0].Removed > 0 })
	if n := k.Stats().Directories[0].Reads; n != 0 {
		t.Errorf("%d reads are counted", n)
	}
}

// The keeper holds LMCache's directories at their limit, too.
func TestLMCacheDirectories(t *testing.T) {
	dir := t.TempDir()
	for i := range 10 {
		name := fmt.Sprintf("org-SEP-m@0x%08x@0@%032x.data", 0, i)
		if err := os.WriteFile(filepath.Join(dir, name), make([]byte, 1000), 0o644); err != nil {
			t.Fatal(err)
		}
		at := time.Now().Add(time.Duration(i-100) * time.Minute)
		if err := os.Chtimes(filepath.Join(dir, name), at, at); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "other.data"), make([]byte, 1000), 0o644); err != nil {
		t.Fatal(err)
	}
	k := open(t, Options{Roots: []string{dir}, Limit: 8000})
	defer closed(t, k)
	testkit.Eventually(t, "six files", func() bool { return k.Stats().Total == 6000 })
	left, _ := filepath.Glob(dir + "/*.data")
	if len(left) != 7 || strings.Contains(strings.Join(left, " "), "0000000003.data") || k.Stats().Directories[0].Layout != "lmcache" {
		t.Errorf("%v %+v", left, k.Stats())
	}
}

// lines are a log.
type lines struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Files that cannot be unlinked cause one warning and count in a figure. The keeper evicts them once it can.
func TestFilesThatCannotBeUnlinked(t *testing.T) {
	x := newTier(t, 1000)
	x.store(1, 2)
	var log lines
	k := open(t, Options{Roots: []string{x.root}, Limit: 1, Log: slog.New(slog.NewTextHandler(&log, nil))})
	defer closed(t, k)
	testkit.Eventually(t, "they are gone", func() bool { return k.Stats().Total == 0 })
	k.mu.Lock()
	v := victim{id: id{bytes: 32}, dir: 0, name: base + "_r0/000/00_g0/" + strings.Repeat("0", 64) + ".bin", size: 7, usedAt: 1}
	k.pending += v.size
	k.mu.Unlock()
	k.unlinked(v, fs.ErrPermission)
	for range 3 {
		k.logUnlinkState(fs.ErrPermission)
	}
	if s := k.Stats(); !s.CannotUnlink || s.Total != 7 || strings.Count(log.String(), "cannot be unlinked") != 1 {
		t.Errorf("%+v\n%s", s, log.String())
	}
	testkit.Eventually(t, "it is tried again", func() bool { s := k.Stats(); return s.Total == 0 && !s.CannotUnlink })
}

// Notes of any bytes are read without harm.
func FuzzNotes(f *testing.F) {
	f.Add([]byte{1, 0, 'a', 1, 0, 0, 0})
	f.Add(append([]byte{0, 0, 1, 0, 0, 0}, make([]byte, recordBytes)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, records := range parseNotes(b) {
			if len(records)%recordBytes != 0 {
				t.Errorf("%d bytes of records", len(records))
			}
		}
	})
}

// A name that was read is written as the same name.
func FuzzNames(f *testing.F) {
	f.Add("0123456789abcdef.bin", "012/34_g7")
	f.Add("m@0x00000000@0@0123456789abcdef.data", "")
	f.Fuzz(func(t *testing.T, name, leaf string) {
		if k, ok := vllmID(name); ok {
			if k.name() != name {
				t.Errorf("%q is %q", name, k.name())
			}
			if k, ok := k.inLeaf(leaf); ok && k.leaf() != leaf {
				t.Errorf("%q is %q", leaf, k.leaf())
			}
		}
		_, _ = lmcacheID(name)
		_, _ = rankDirectory(name)
		_ = isTemporary(name)
	})
}
