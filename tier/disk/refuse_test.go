// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// snapshot returns a directory's files and what is in them.
func snapshot(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		b, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		all[e.Name()] = string(b)
	}
	return all
}

// refused checks that Open refuses a directory with an error of one line, and leaves it unchanged.
func refused(t *testing.T, dir string, want error) {
	t.Helper()
	before := snapshot(t, dir)
	d, err := Open(small(dir))
	if err == nil {
		closeDisk(t, d)
	}
	if !errors.Is(err, want) || strings.Contains(err.Error(), "\n") || !strings.Contains(err.Error(), dir) {
		t.Errorf("%v, want %v", err, want)
	}
	if after := snapshot(t, dir); !maps.Equal(before, after) {
		t.Errorf("the directory was changed")
	}
}

// A directory with files of somebody else stays as it is.
func TestNotOurs(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "thesis.txt"), []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	refused(t, dir, ErrNotOurs)
	if err := os.WriteFile(filepath.Join(dir, markName), make([]byte, block), 0o600); err != nil {
		t.Fatal(err)
	}
	before := snapshot(t, dir)
	if _, err := Open(small(dir)); !errors.Is(err, ErrNotOurs) {
		t.Errorf("a marker of somebody else: %v", err)
	}
	after := snapshot(t, dir)
	delete(after, lockName)
	if !maps.Equal(before, after) {
		t.Error("the directory was changed")
	}
	file := filepath.Join(dir, "thesis.txt")
	if _, err := Open(small(file)); !errors.Is(err, syscall.ENOTDIR) {
		t.Errorf("a file: %v", err)
	}
}

// A second server on a directory gets ErrInUse, and the first one goes on.
func TestTwoServers(t *testing.T) {
	dir := t.TempDir()
	d := open(t, small(dir))
	put(t, d, 1, 10_000)
	refused(t, dir, ErrInUse)
	need(t, d, 1, 10_000)
	put(t, d, 2, 10_000)
	closeDisk(t, d)
	d = open(t, small(dir))
	need(t, d, 1, 10_000)
	need(t, d, 2, 10_000)
	closeDisk(t, d)
}

// A second server gets ErrInUse also if somebody has deleted the lock file.
func TestTwoServersWithoutTheLocksFile(t *testing.T) {
	dir := t.TempDir()
	d := open(t, small(dir))
	put(t, d, 1, 10_000)
	if err := os.Remove(filepath.Join(dir, lockName)); err != nil {
		t.Fatal(err)
	}
	refused(t, dir, ErrInUse)
	closeDisk(t, d)
	d = open(t, small(dir))
	need(t, d, 1, 10_000)
	closeDisk(t, d)
}

// The kernel releases the lock of a killed server a moment later. The next server waits for that.
func TestDirectoryOfAKilledServer(t *testing.T) {
	for _, name := range []string{".", lockName} {
		dir := t.TempDir()
		closeDisk(t, open(t, small(dir)))
		if err := os.WriteFile(filepath.Join(dir, lockName), []byte("1073741824"), 0o600); err != nil { // no process has such a number
			t.Fatal(err)
		}
		f, err := os.Open(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(300*time.Millisecond, func() { _ = f.Close() })
		for try := 1; ; try++ {
			began := time.Now()
			d, err := Open(small(dir))
			if err == nil {
				<-d.Opened()
				closeDisk(t, d)
				break
			}
			if took := time.Since(began); took < 3*time.Second || try == 5 { // the timer may be later than Open waits
				t.Fatalf("%s, after %v: %v", name, took, err)
			}
		}
		if by, err := os.ReadFile(filepath.Join(dir, lockName)); err != nil || string(by) != strconv.Itoa(os.Getpid()) {
			t.Errorf("%v: %q had the directory last", err, by)
		}
	}
}

// patch changes a file and renews the checksum of the block at off.
func patch(t *testing.T, path string, off int64, change func(b []byte)) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, block)
	if off < 0 {
		info, _ := f.Stat()
		off += info.Size()
	}
	if _, err := f.ReadAt(b, off); err != nil {
		t.Fatal(err)
	}
	change(b)
	if _, err := f.WriteAt(b, off); err != nil {
		t.Fatal(err)
	}
}

func asVersion2(b []byte) { asVersion(b, 2) }

func asVersion(b []byte, version uint32) {
	le.PutUint32(b[8:], version)
	le.PutUint32(b[crcAt:], crc(b[:crcAt]))
}

// A directory of a newer version is refused and stays as it is.
func TestNewerDirectory(t *testing.T) {
	dir := t.TempDir()
	d := open(t, small(dir))
	put(t, d, 1, 10_000)
	closeDisk(t, d)
	patch(t, filepath.Join(dir, markName), 0, func(b []byte) { asVersion(b, sealedVersion+1) })
	if err := os.Truncate(filepath.Join(dir, lockName), 0); err != nil {
		t.Fatal(err)
	}
	before := snapshot(t, dir)
	_, err := Open(small(dir))
	if !errors.Is(err, ErrNewer) || !strings.Contains(err.Error(), "version 3") {
		t.Errorf("%v", err)
	}
	after := snapshot(t, dir)
	after[lockName] = ""
	if !maps.Equal(before, after) {
		t.Error("the directory was changed")
	}
}

// A segment of a newer version is never served and never removed, whether its end is as
// in this version or not.
func TestNewerSegment(t *testing.T) {
	dir := t.TempDir()
	d := open(t, small(dir))
	for i := range 3 {
		put(t, d, i, 10_000)
		if err := d.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	closeDisk(t, d)
	_ = os.Remove(filepath.Join(dir, checkName))
	names, _ := filepath.Glob(filepath.Join(dir, "*"+suffix))
	patch(t, names[0], -block, asVersion2)
	patch(t, names[1], 0, asVersion2)
	patch(t, names[1], -block, func(b []byte) { clear(b) })
	o := small(dir)
	o.Dirs[0].Bytes = 4 << 20
	d = open(t, o)
	for i := range 2 {
		if err := get(t, d, i, 10_000, 0); !errors.Is(err, tier.ErrMissing) {
			t.Errorf("object %d of a newer segment: %v", i, err)
		}
	}
	need(t, d, 2, 10_000)
	for i := range 100 { // evicts whatever may be evicted
		put(t, d, 100+i, 100_000)
	}
	closeDisk(t, d)
	for _, name := range names[:2] {
		if _, err := os.Stat(name); err != nil {
			t.Error(err)
		}
	}
}

// A file system that can only be read is refused.
func TestReadOnly(t *testing.T) {
	m := newMemFiles(1, 1<<30)
	m.fail = func(deed, _ string) error {
		if deed == "create" || deed == "write" || deed == "remove" {
			return syscall.EROFS
		}
		return nil
	}
	if _, err := openWith(small("mem"), func(string) (files, error) { return m, nil }, time.Now); !errors.Is(err, syscall.EROFS) {
		t.Errorf("%v", err)
	}
}

// On a real file system that is full, the disk serves its objects and keeps no new ones; it keeps new ones again once there
// is room.
func TestFullFileSystem(t *testing.T) {
	testkit.SmallFS(t, 16<<20, func(t *testing.T, dir string) {
		o := small(dir)
		d := open(t, o)
		put(t, d, 1, 100_000)
		other := filepath.Join(dir, "other")
		testkit.FillFS(t, dir, other, 0)
		full := false
		for i := 2; i < 100 && !full; i++ {
			b, meta := object(i, 100_000, 0)
			err := d.Write(t.Context(), tiertest.Key(i), meta, b)
			if full = errors.Is(err, tier.ErrNotKept); err != nil && !full {
				t.Fatal(err)
			}
		}
		if !full {
			t.Error("everything is kept on a full disk")
		}
		if err := os.Remove(other); err != nil {
			t.Fatal(err)
		}
		closeDisk(t, d)
		d = open(t, o)
		put(t, d, 200, 100_000)
		need(t, d, 200, 100_000)
		closeDisk(t, d)
	})
}

// A server that starts on a file system that is full to its last byte serves its objects, and frees room. A new directory
// cannot be made there: Open returns ENOSPC.
func TestOpenOnAFullFileSystem(t *testing.T) {
	testkit.SmallFS(t, 16<<20, func(t *testing.T, dir string) {
		const objects = 80
		path := filepath.Join(dir, "kv")
		o := small(path)
		d := open(t, o)
		for i := range objects {
			put(t, d, i, 100_000)
		}
		closeDisk(t, d)
		testkit.FillFS(t, dir, filepath.Join(dir, "other"), 0)
		if d, err := Open(small(filepath.Join(dir, "new"))); !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("a new one: %v", err)
			if err == nil {
				closeDisk(t, d)
			}
		}
		d, err := Open(o)
		if err != nil {
			t.Fatal(err)
		}
		<-d.Opened()
		d.volumes[0].guard() // at the latest: one segment goes
		there := 0
		for i := range objects {
			switch err := get(t, d, i, 100_000, 0); {
			case err == nil:
				there++
			case !errors.Is(err, tier.ErrMissing):
				t.Errorf("object %d: %v", i, err)
			}
		}
		if there < objects-20 {
			t.Errorf("%d of %d objects are there", there, objects)
		}
		put(t, d, 1000, 100_000)
		closeDisk(t, d)
	})
}

// If the file system refuses a new segment while the disk is still being opened, every segment that is there can still be
// evicted later.
func TestRefusedWhileOpening(t *testing.T) {
	const limit, old, n = 2 << 20, 60, 9000
	m, c := newMemFiles(1, 1<<30), newClock()
	o := Options{SegmentBytes: minSegment, MinFree: 1, FirstTouch: true}
	d := openMem(t, o, limit, c, m)
	for i := range old {
		put(t, d, i, n)
	}
	closeDisk(t, d)
	m = m.kill()
	m.dead = false
	blocked, release := make(chan struct{}), make(chan struct{})
	var once, free sync.Once
	refuse := true
	m.fail = func(deed, name string) error {
		switch {
		case deed == "create" && strings.HasSuffix(name, suffix) && refuse:
			return syscall.EDQUOT
		case deed == "read" && name == segmentName(2, idOf(m, 2)):
			m.mu.Unlock()
			once.Do(func() { close(blocked) })
			<-release
			m.mu.Lock()
		}
		return nil
	}
	delete(m.names, checkName)
	o.Dirs = []Dir{{"mem", limit}}
	d, err := openWith(o, func(string) (files, error) { return m, nil }, c.now)
	if err != nil {
		t.Fatal(err)
	}
	defer closeDisk(t, d)
	defer free.Do(func() { close(release) })
	select {
	case <-blocked:
	case <-time.After(time.Minute):
		t.Fatal("the second segment is not read")
	}
	for range 3 {
		b, meta := object(1000, n, 0)
		if err := d.Write(t.Context(), tiertest.Key(1000), meta, b); !errors.Is(err, tier.ErrNotKept) || !errors.Is(err, syscall.EDQUOT) {
			t.Errorf("write: %v", err)
		}
		c.pass(refusePause)
	}
	m.mu.Lock()
	refuse = false
	m.mu.Unlock()
	free.Do(func() { close(release) })
	<-d.Opened()
	for i := range 10 * old {
		put(t, d, 2000+i, n)
	}
	for i := range old {
		if err := get(t, d, i, n, 0); !errors.Is(err, tier.ErrMissing) {
			t.Errorf("object %d stays for ever: %v", i, err)
		}
	}
}

// idOf returns the id of a segment by its number.
func idOf(m *memFiles, seq uint32) uint64 {
	for name := range m.names {
		if s, id, ok := parseSegment(name); ok && s == seq {
			return id
		}
	}
	return 0
}

// On a disk that others have filled to its last byte objects can be deleted for good, and segments are evicted until MinFree is
// free again. Both need to write the journal first.
func TestFullDiskGivesRoomBack(t *testing.T) {
	const objects, minFree = 700, 2 << 20
	m := newMemFiles(1, 64<<20)
	o := Options{SegmentBytes: 512 << 10, MinFree: minFree, FirstTouch: true}
	d := openMem(t, o, 16<<20, newClock(), m)
	var keys []kv.Key
	for i := range objects {
		put(t, d, i, 4000)
		keys = append(keys, tiertest.Key(i))
	}
	if err := d.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	m.mu.Lock()
	_, m.free = m.usedLocked()
	m.mu.Unlock()
	if err := d.Delete(t.Context(), keys[:600]); err != nil {
		t.Errorf("delete: %v", err)
	}
	d.volumes[0].guard()
	if _, free, _ := m.space(); free < minFree {
		t.Errorf("%d bytes are free, not %d", free, minFree)
	}
	m = m.kill()
	_ = d.Close() // its files are gone
	d = openMem(t, o, 16<<20, newClock(), m)
	metas := make([]tier.Meta, 600)
	if err := d.Stat(t.Context(), keys[:600], metas); err != nil {
		t.Fatal(err)
	}
	for i := range metas {
		if metas[i].Len > 0 {
			t.Fatalf("object %d is there again", i)
		}
	}
	closeDisk(t, d)
}

func TestValidate(t *testing.T) {
	if err := small("/a", "/b").Validate(); err != nil {
		t.Error(err)
	}
	f := func(field string, change func(o *Options)) {
		t.Helper()
		o := small("/a")
		change(&o)
		n := 0
		options.Each(o.Validate(), func(e *options.Error) {
			if n++; e.Field != field {
				t.Errorf("%v, want one about %s", e, field)
			}
		})
		if n != 1 {
			t.Errorf("%s: %d errors", field, n)
		}
	}
	f("Dirs", func(o *Options) { o.Dirs = nil })
	f("Dirs", func(o *Options) { o.Dirs = append(o.Dirs, Dir{"/x/../a", 64 << 20}) })
	f("Dirs", func(o *Options) { o.Dirs[0].Path = "" })
	f("Dirs", func(o *Options) { o.Dirs[0].Bytes = 4<<20 - 1 })
	f("SegmentBytes", func(o *Options) { o.SegmentBytes = 1<<20 + 1 })
	f("SegmentBytes", func(o *Options) { o.SegmentBytes = -1 << 20 })
	f("MinFree", func(o *Options) { o.MinFree = -1 })
	f("WriteBudget", func(o *Options) { o.WriteBudget = -1 })
	f("ScrubRate", func(o *Options) { o.ScrubRate = -1 })
}

// The caller's memory can go in the middle of a call. That is an error, and costs nobody
// else.
func TestMemoryThatIsGone(t *testing.T) {
	d := open(t, small(t.TempDir()))
	defer closeDisk(t, d)
	const n = 64 << 10
	for i, length := range []int{n, n - 100, 100} { // whole blocks, a rest, a rest alone
		b, meta := object(i, length, 0)
		put(t, d, i, length)
		path := filepath.Join(t.TempDir(), "view")
		s, err := shm.Create(path, n)
		if err != nil {
			t.Fatal(err)
		}
		view := s.Bytes(0, int64(length))
		copy(view, b)
		if err := os.Truncate(path, 0); err != nil {
			t.Fatal(err)
		}
		var read, write error
		fault := shm.Guard(func() { _, read = d.Read(t.Context(), tiertest.Key(i), view) })
		if read == nil && fault == nil {
			t.Errorf("%d bytes: read into nothing", length)
		}
		fault = shm.Guard(func() { write = d.Write(t.Context(), tiertest.Key(100+i), meta, view) })
		if write == nil && fault == nil {
			t.Errorf("%d bytes: written from nothing", length)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		need(t, d, i, length)
		put(t, d, 200+i, length)
		need(t, d, 200+i, length)
		if err := get(t, d, 100+i, length, 0); !errors.Is(err, tier.ErrMissing) {
			t.Errorf("%v", err)
		}
	}
	if err := d.Flush(t.Context()); err != nil {
		t.Error(err)
	}
}
