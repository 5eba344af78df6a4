// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// lmcacheName names a file as LMCache does, since 0.4.7.
func lmcacheName(i int) string { return fmt.Sprintf("org-SEP-m@0x%08x@0@%032x.data", 0, i) }

// put writes a file as LMCache does.
func put(t *testing.T, dir, name string, size int) {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := errors.Join(os.WriteFile(path+".tmp", make([]byte, size), 0o644), os.Rename(path+".tmp", path)); err != nil {
		t.Fatal(err)
	}
}

// If a directory has no objects when the keeper starts, as on a new file system or a new node, either engine may begin
// in it, and both may share it.
func TestEmptyDirectoryIsForEitherEngine(t *testing.T) {
	for _, w := range watches(t) {
		x := &tier{t: t, root: t.TempDir(), row: make([]byte, 1000)}
		if err := os.Mkdir(filepath.Join(x.root, "lost+found"), 0o700); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{".kvasir-generations", ".kvasir-generations.room", "kvasir-1-2-3.tmp"} {
			if err := os.WriteFile(filepath.Join(x.root, name), []byte("{}"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		k := open(t, Options{Roots: []string{x.root}, Limit: 8000, Watch: w})
		for i := range 10 {
			put(t, x.root, lmcacheName(i), 1000)
		}
		testkit.Eventually(t, "LMCache's files are held at the limit", func() bool {
			left, _ := filepath.Glob(x.root + "/*.data")
			return len(left) == 6 && k.Stats().Total == 6000
		})
		x.configure(base)
		x.store(1, 2, 3, 4)
		testkit.Eventually(t, "all files are held at the limit", func() bool {
			left, _ := filepath.Glob(x.root + "/*.data")
			files, _ := x.there()
			return files+len(left) == 6 && k.Stats().Total == 6000
		})
		if d := k.Stats().Directories; len(d) != 2 || d[0].Layout != "lmcache" || d[1].Layout != "vllm" || d[1].Model != "org/model" {
			t.Errorf("%s: %+v", w, d)
		}
		closed(t, k)
	}
}

// A model that is served by a path has a directory whose name begins with a dot: ./m is ._m.
func TestModelsOfRelativePaths(t *testing.T) {
	x := newTier(t, 1000)
	for _, name := range []string{"._models_m_0123456789ab", ".._m_0123456789ab"} {
		x.configure(name)
		for i := range 10 {
			path := strings.Replace(x.path(i), base, name, 1)
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, x.row, 0o644)); err != nil {
				t.Fatal(err)
			}
		}
	}
	k := open(t, Options{Roots: []string{x.root}, Limit: 8000})
	defer closed(t, k)
	testkit.Eventually(t, "the files are held at the limit", func() bool { files, _ := x.there(); return files == 6 && k.Stats().Total == 6000 })
}

// The names of all releases of LMCache are known, and no others.
func TestNamesOfLMCache(t *testing.T) {
	hash := strings.Repeat("ab", 16)
	for name, want := range map[string]bool{
		"m@0x01000000@0@" + hash + ".data":      true,
		"m@0x01000000@1f@" + hash + "@s.data":   true,
		"m@0x01000000@" + hash + ".data":        true, // up to 0.4.6
		"m@0x01000000@" + hash + "@s.data":      true, // up to 0.4.6
		"m@0x01000000@" + hash + "@s@t.data":    false,
		"m@01000000@" + hash + ".data":          false,
		"m@0x01000000@0.data":                   false,
		"@0x01000000@0@" + hash + ".data":       false,
		"m@0x01000000@0@" + hash + ".data.tmp":  false,
		"m@0x01000000@0@" + hash + "g.data":     false,
		"someone@0x1@home@page.data":            false,
		"m@0x01000000@0@" + hash + "@s@t.data":  false,
		"m@0x01000000@0@" + hash[:14] + ".data": false,
	} {
		if _, ok := lmcacheID(name); ok != want {
			t.Errorf("%s: %v", name, ok)
		}
	}
}

// The keeper counts a file that is copied in by hand, and one that grows, at once.
func TestFilesThatAreWrittenInPlace(t *testing.T) {
	for _, w := range watches(t) {
		if w == WatchLook {
			continue // with WatchLook the keeper does not promise when it sees a file
		}
		x := newTier(t, 1000)
		x.store(1)
		k := open(t, Options{Roots: []string{x.root}, TTL: time.Hour, Watch: w})
		path := filepath.Join(filepath.Dir(x.path(1)), filepath.Base(x.path(1))[:60]+"0000.bin")
		if err := os.WriteFile(path, x.row, 0o644); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, "a second file", func() bool { return k.Stats().Total == 2000 })
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err = f.Write(x.row); errors.Join(err, f.Close()) != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, "it is longer", func() bool { return k.Stats().Total == 3000 })
		closed(t, k)
	}
}

// A clock that steps back does not reverse the order of one thread's files.
func TestClockStepsBack(t *testing.T) {
	b := newBooks(1)
	b.dirs = append(b.dirs, &directory{root: &rootDir{}})
	at := time.Now()
	add := func(i byte) uint32 {
		n := b.add(0, id{hash: [32]byte{i}, bytes: 32}, "", 1, at.UnixMicro())
		b.recordUse(n, 7, at.UnixMicro())
		return n
	}
	first := add(1)
	at = at.Add(-time.Hour)
	second := add(2)
	at = at.Add(time.Second)
	third := add(3)
	var order []uint32
	for n := b.coldest(); n != 0; n = b.file(n).next {
		order = append(order, n)
	}
	if want := []uint32{first, second, third}; fmt.Sprint(order) != fmt.Sprint(want) {
		t.Errorf("%v goes in this order, want %v", order, want)
	}
}

// A file whose times lie in the future, as those of a clock that was wrong, ages from the moment when the keeper sees it.
func TestTimesInTheFuture(t *testing.T) {
	x := newTier(t, 1000)
	x.store(1)
	future := time.Now().Add(10 * 365 * 24 * time.Hour)
	if err := os.Chtimes(x.path(1), future, future); err != nil {
		t.Fatal(err)
	}
	clock := &clock{at: time.Now()}
	k := open(t, Options{Roots: []string{x.root}, TTL: time.Hour, Watch: WatchLook, now: clock.now})
	defer closed(t, k)
	clock.mu.Lock()
	clock.at = clock.at.Add(2 * time.Hour)
	clock.mu.Unlock()
	testkit.Eventually(t, "it expires", func() bool { return k.Stats().Directories[0].Expired == 1 })
	if n := k.Stats().Directories[0].Reads; n != 0 {
		t.Errorf("%d reads are counted", n)
	}
}

// If a file is unlinked after a look saw it and before the look enters it, it does not stay in the books.
func TestFileUnlinkedDuringALook(t *testing.T) {
	x := newTier(t, 1000)
	x.store(1, 2)
	k := open(t, Options{Roots: []string{x.root}, TTL: time.Hour, Watch: watches(t)[0]})
	defer closed(t, k)
	r, rank := k.roots[0], base+"_r0"
	leaf, _ := filepath.Rel(filepath.Join(x.root, rank), filepath.Dir(x.path(3)))
	e := found{name: filepath.Base(x.path(3)), size: 1000, usedAt: time.Now().UnixMicro()}
	e.id, _ = idIn(rank, leaf, e.name)
	came := k.enterFiles(r, rank, []found{e}, k.looks)
	if len(came) != 1 || k.Stats().Total != 3000 {
		t.Fatalf("%+v, %+v", came, k.Stats())
	}
	dir, err := os.Open(filepath.Dir(x.path(1)))
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	k.recheck(r, rank, int(dir.Fd()), came[0])
	if s := k.Stats(); s.Total != 2000 || s.Directories[0].Writes != 0 || s.Directories[0].Removed != 0 {
		t.Errorf("%+v", s)
	}
}

// If the keeper cannot read events any more, it logs that and uses looks instead.
func TestEventsThatEnd(t *testing.T) {
	dir, err := os.Open(t.TempDir()) // reading it is an error
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	var log lines
	k := &Keeper{log: slog.New(slog.NewTextHandler(&log, nil)), again: make(chan struct{}, 1), fan: &fanotify{f: dir, buffer: make([]byte, 4096)}, books: newBooks(1)}
	k.readEvents()
	if s := k.watching(); s != WatchLook || k.watchedShare() != 0 || k.pause() > time.Minute || !strings.Contains(log.String(), "events of the kernel cannot be read") {
		t.Errorf("%s, share %v, a look each %v\n%s", s, k.watchedShare(), k.pause(), log.String())
	}
	select {
	case <-k.again:
	default:
		t.Error("no look begins")
	}
}

// failing is a listener whose first call fails as with too many open files.
type failing struct {
	net.Listener
	failed atomic.Bool
}

func (l *failing) Accept() (net.Conn, error) {
	if l.failed.CompareAndSwap(false, true) {
		return nil, unix.EMFILE
	}
	return l.Listener.Accept()
}

// A keeper answers again once it can open descriptors.
func TestTooManyOpenFiles(t *testing.T) {
	inner, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	c := &control{figures: func() Stats { return Stats{} }}
	c.mu.helpers = map[net.Conn]int{}
	c.done.Go(func() { c.serve(&failing{Listener: inner}) })
	conn, err := net.Dial("unix", inner.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
	if n, err := conn.Read(make([]byte, 1)); n != 1 {
		t.Errorf("no answer: %v", err)
	}
	if err := errors.Join(conn.Close(), inner.Close()); err != nil {
		t.Error(err)
	}
	c.done.Wait()
}

// The state directory may not be one of the directories to which the keeper never writes.
func TestStateDirectoryInside(t *testing.T) {
	x := newTier(t, 1000)
	x.store(1)
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(x.root, link); err != nil {
		t.Fatal(err)
	}
	before := listing(t, x.root)
	for _, state := range []string{x.root, filepath.Join(x.root, "state", "of"), filepath.Join(link, "state")} {
		k, err := Open(Options{Roots: []string{x.root}, TTL: time.Hour, StateDir: state})
		if err == nil {
			closed(t, k)
		}
		_, verified := Verify(t.Context(), VerifyOptions{Roots: []string{x.root}, StateDir: state})
		for _, err := range []error{err, verified} {
			if err == nil || !strings.Contains(err.Error(), "never writes") {
				t.Errorf("%s: %v", state, err)
			}
		}
	}
	if after := listing(t, x.root); after != before {
		t.Errorf("before %s, after %s", before, after)
	}
}

// A disk that hangs while the keeper writes its notes prevents no eviction.
func TestNotesThatHang(t *testing.T) {
	x, state := newTier(t, 1000), t.TempDir()
	x.store(1)
	r, err := openRoot(x.root)
	if err != nil {
		t.Fatal(err)
	}
	tmp := filepath.Join(state, stateName("uses", r)+".tmp")
	if err := errors.Join(r.dir.Close(), mkfifo(tmp)); err != nil { // whoever writes there waits for a reader
		t.Fatal(err)
	}
	k := open(t, Options{Roots: []string{x.root}, Limit: 8000, StateDir: state, notesEvery: time.Millisecond, Watch: watches(t)[0]})
	for i := range 100 {
		x.store(i)
	}
	testkit.Eventually(t, "the files are held at the limit", func() bool { files, _ := x.there(); return files <= 6 })
	var reader sync.WaitGroup
	ended := make(chan struct{})
	reader.Go(func() {
		for {
			if f, err := os.OpenFile(tmp, os.O_RDONLY|unix.O_NONBLOCK, 0); err == nil {
				_, _ = f.Read(make([]byte, 1<<20))
				_ = f.Close()
			}
			select {
			case <-ended:
				return
			case <-time.After(time.Millisecond):
			}
		}
	})
	_ = k.Close() // its last notes may have failed
	close(ended)
	reader.Wait()
}

// Verify makes its state directory, leaves out a file that is being written, and remembers the sum of one that cannot be read.
func TestVerifyOfFilesThatChange(t *testing.T) {
	x, state := newTier(t, 5000), filepath.Join(t.TempDir(), "not", "there")
	x.store(1, 2)
	verify := func() Report {
		t.Helper()
		report, err := Verify(t.Context(), VerifyOptions{Roots: []string{x.root}, StateDir: state})
		if err != nil {
			t.Fatal(err)
		}
		return report
	}
	if r := verify(); r.New != 2 || len(r.Faults) != 0 {
		t.Fatalf("%+v", r)
	}
	aside := filepath.Join(t.TempDir(), "aside")
	if err := errors.Join(os.Rename(x.path(1), aside), os.Symlink(aside, x.path(1))); err != nil {
		t.Fatal(err)
	}
	if r := verify(); len(r.Faults) != 1 || !strings.Contains(r.Faults[0].Reason, "cannot be read") {
		t.Errorf("%+v", r)
	}
	b, err := os.ReadFile(aside)
	if err != nil {
		t.Fatal(err)
	}
	b[7]++
	if err := errors.Join(os.WriteFile(aside, b, 0o644), os.Remove(x.path(1)), os.Rename(aside, x.path(1))); err != nil {
		t.Fatal(err)
	}
	if r := verify(); len(r.Faults) != 1 || !strings.Contains(r.Faults[0].Reason, "changed in place") || r.New != 0 {
		t.Errorf("after it could not be read: %+v", r)
	}

	if err := errors.Join(os.Remove(x.path(1)), os.Truncate(x.path(2), 256<<20)); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var writer sync.WaitGroup
	writer.Go(func() {
		for n := int64(0); ; n++ {
			select {
			case <-stop:
				return
			default:
				at := time.Unix(n, 0)
				_ = os.Chtimes(x.path(2), at, at)
			}
		}
	})
	if r := verify(); r.Files != 0 || len(r.Faults) != 0 {
		t.Errorf("while it is written: %+v", r)
	}
	close(stop)
	writer.Wait()
	if r := verify(); len(r.Faults) != 1 || !strings.Contains(r.Faults[0].Reason, "changed in place") {
		t.Errorf("after it was written: %+v", r)
	}
}

// Verify ends with its context in the middle of a file, however long that is.
func TestVerifyEndsInTheMiddle(t *testing.T) {
	x := newTier(t, 5000)
	x.store(1)
	if err := os.Truncate(x.path(1), 1<<40); err != nil {
		t.Skipf("no file of a TiB: %v", err)
	}
	ctx, stop := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer stop()
	ended := make(chan error, 1)
	go func() {
		_, err := Verify(ctx, VerifyOptions{Roots: []string{x.root}, StateDir: t.TempDir()})
		ended <- err
	}()
	select {
	case err := <-ended:
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("it goes on")
	}
}
