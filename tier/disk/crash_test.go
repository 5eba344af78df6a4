// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// life plays random calls, kills and power cuts against one directory and a model of it.
type life struct {
	t     *testing.T
	rand  *rand.Rand
	d     *Disk
	files *memFiles
	cap   int64
	small bool // less room than objects: any may have been evicted

	now   map[int]int   // the version of each object; 0 is none
	after map[int][]int // the versions that a power cut may leave
}

const lifeObjects = 40

// version returns the bytes of an object's version.
func versionOf(obj, version int) ([]byte, tier.Meta) {
	n := 1 + (obj*2654435761+version*40503)%20_000
	return tiertest.Object(obj*31+version*7, n)
}

func newLife(t *testing.T, seed uint64, limit int64) *life {
	l := &life{
		t: t, rand: rand.New(rand.NewPCG(seed, 1)), cap: limit, small: limit < 2<<20,
		files: newMemFiles(seed, 64<<20), now: map[int]int{}, after: map[int][]int{},
	}
	l.open()
	return l
}

func (l *life) open() {
	o := Options{Dirs: []Dir{{"mem", l.cap}}, SegmentBytes: minSegment, MinFree: 1, FirstTouch: true, ScrubRate: 1 << 30}
	if testing.Verbose() {
		o.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	d, err := openWith(o, func(string) (files, error) { return l.files, nil }, time.Now)
	if err != nil {
		l.t.Fatal(err)
	}
	l.d = d
	<-d.Opened()
}

// restart ends the process and begins the next one over what next leaves.
func (l *life) restart(next func() *memFiles) {
	files := next()
	_ = l.d.Close() // everything fails; its goroutines end
	l.files = files
	l.open()
}

func (l *life) step() {
	obj := l.rand.IntN(lifeObjects)
	switch n := l.rand.IntN(100); {
	case n < 45:
		l.write(obj)
	case n < 80:
		l.read(obj)
	case n < 86:
		l.delete(obj)
	case n < 92:
		l.flush()
	case n < 94: // ends as it should
		if err := l.d.Close(); err != nil {
			l.t.Errorf("close: %v", err)
		}
		l.settle()
		l.files = l.files.kill()
		l.open()
		l.check()
	case n < 97:
		l.restart(l.files.kill)
		l.check()
	default:
		l.restart(l.files.cut)
		for obj, versions := range l.after {
			got := l.versionNow(obj)
			if !slices.Contains(versions, got) && !(l.small && got == 0) {
				l.t.Errorf("object %d after a power cut: version %d, want one of %v", obj, got, versions)
			}
			l.now[obj] = got
		}
		l.settle() // whichever version it is, it is on the disk
	}
}

// settle notes that a power cut loses no present version.
func (l *life) settle() {
	for obj := range l.after {
		l.after[obj] = []int{l.now[obj]}
	}
}

// versionNow reads an object, and returns which version it is.
func (l *life) versionNow(obj int) int {
	k := tiertest.Key(obj)
	var metas [1]tier.Meta
	if err := l.d.Stat(l.t.Context(), []kv.Key{k}, metas[:]); err != nil || metas[0].Len == 0 {
		return 0
	}
	dst, _ := object(1, int(metas[0].Len), 0)
	m, err := l.d.Read(l.t.Context(), k, dst)
	if errors.Is(err, tier.ErrMissing) {
		return 0
	}
	if err != nil {
		l.t.Errorf("object %d: %v", obj, err)
		return 0
	}
	for version := 1; version < 1000; version++ {
		if want, meta := versionOf(obj, version); meta == m {
			if !bytes.Equal(dst, want) {
				l.t.Errorf("object %d: wrong bytes of version %d", obj, version)
			}
			return version
		}
	}
	l.t.Errorf("object %d: bytes of nobody", obj)
	return 0
}

func (l *life) read(obj int) {
	if got := l.versionNow(obj); got != l.now[obj] && !(l.small && got == 0) {
		l.t.Errorf("object %d: version %d, want %d", obj, got, l.now[obj])
	}
}

func (l *life) check() {
	for obj := range lifeObjects {
		l.read(obj)
	}
}

func (l *life) write(obj int) {
	version := max(1, l.now[obj])
	if l.rand.IntN(4) == 0 {
		version++
	}
	b, meta := versionOf(obj, version)
	if err := l.d.Write(l.t.Context(), tiertest.Key(obj), meta, b); errors.Is(err, tier.ErrNotKept) {
		if !l.small {
			l.t.Errorf("write: %v", err)
		}
		return
	} else if err != nil {
		l.t.Fatalf("write: %v", err)
	}
	if version != l.now[obj] {
		l.now[obj] = version
		l.after[obj] = append(l.after[obj], 0, version)
	}
}

func (l *life) delete(obj int) {
	if err := l.d.Delete(l.t.Context(), []kv.Key{tiertest.Key(obj)}); err != nil {
		l.t.Fatalf("delete: %v", err)
	}
	l.now[obj], l.after[obj] = 0, []int{0}
}

func (l *life) flush() {
	if err := l.d.Flush(l.t.Context()); err != nil {
		l.t.Fatalf("flush: %v", err)
	}
	l.settle()
}

// Whenever the process is killed or the power fails: the disk serves sealed objects, never deleted
// ones, and never bytes that were not written, and keeps its limit. SOAK is the number of
// lives.
func TestCrashes(t *testing.T) {
	const steps = 400
	seeds := 2
	if n, err := strconv.Atoi(os.Getenv("SOAK")); err == nil {
		seeds = n
	}
	for seed := range uint64(seeds) {
		for _, limit := range []int64{8 << 20, 6 * minSegment} {
			t.Run(fmt.Sprintf("seed %d, %d KiB", seed, limit>>10), func(t *testing.T) {
				l := newLife(t, seed, limit)
				for range steps {
					if l.step(); t.Failed() {
						break
					}
				}
				if err := l.d.Close(); err != nil {
					t.Error(err)
				}
				if l.files.worst > limit {
					t.Errorf("%d bytes of segments, above the limit of %d", l.files.worst, limit)
				}
			})
		}
	}
}

// A version that was replaced does not come back when its successor is deleted: neither
// in the next life, nor when the process was killed before the journal knew of it.
func TestReplacedVersionStaysGone(t *testing.T) {
	for _, killedBetween := range []bool{false, true} {
		l := newLife(t, 1, 8<<20)
		put := func(version int) {
			b, meta := versionOf(1, version)
			if err := l.d.Write(t.Context(), tiertest.Key(1), meta, b); err != nil {
				t.Fatal(err)
			}
		}
		put(1)
		l.flush()
		put(2)
		if killedBetween {
			l.restart(l.files.kill)
		}
		if got := l.versionNow(1); got != 2 {
			t.Errorf("version %d, want 2", got)
		}
		l.delete(1)
		for _, next := range []func() *memFiles{l.files.kill, nil} {
			if next == nil {
				next = l.files.cut
			}
			if l.restart(next); l.versionNow(1) != 0 {
				t.Errorf("killed between: %v: version %d is back", killedBetween, l.versionNow(1))
			}
		}
		closeDisk(t, l.d)
	}
}

// Records that a checkpoint leaves out are in the journal before. Otherwise a replaced version would come back once its
// successor is evicted and the checkpoint is lost.
func TestCheckpointOmissionsAreInTheJournal(t *testing.T) {
	l := newLife(t, 1, 8<<20)
	for version := 1; version <= 2; version++ {
		b, meta := versionOf(1, version)
		if err := l.d.Write(t.Context(), tiertest.Key(1), meta, b); err != nil {
			t.Fatal(err)
		}
		if version == 1 {
			l.flush()
		}
	}
	if err := l.d.volumes[0].checkpoint(); err != nil {
		t.Fatal(err)
	}
	l.restart(l.files.kill)
	if got := l.versionNow(1); got != 2 {
		t.Fatalf("version %d, want 2", got)
	}
	v := l.d.volumes[0]
	v.mu.Lock()
	s := v.mu.segs[whereIsLocked(v, 1).seg]
	s.leaving = true
	v.mu.Unlock()
	if err := v.evict(s); err != nil {
		t.Fatal(err)
	}
	if err := l.files.remove(checkName); err != nil {
		t.Fatal(err)
	}
	l.restart(l.files.kill)
	if got := l.versionNow(1); got != 0 {
		t.Errorf("version %d is back", got)
	}
	closeDisk(t, l.d)
}

// An eviction does not copy an object that is being written again. The copy would lie behind the new record, and would
// count as the newer one after a kill.
func TestNoCopyWhileItsObjectIsWritten(t *testing.T) {
	l := newLife(t, 1, 8<<20)
	defer func() { closeDisk(t, l.d) }()
	v := l.d.volumes[0]
	put(t, l.d, 0, 1000)
	put(t, l.d, 1, 1000)
	l.flush()
	need(t, l.d, 0, 1000) // makes them worth a copy
	need(t, l.d, 1, 1000)
	put(t, l.d, 2, 1000) // so that there is a segment for copies
	v.writes(tiertest.Key(0), 1)
	v.mu.Lock()
	s := v.mu.segs[whereIsLocked(v, 0).seg]
	s.leaving = true
	v.mu.Unlock()
	if err := v.evict(s); err != nil {
		t.Fatal(err)
	}
	v.writes(tiertest.Key(0), -1)
	if err := get(t, l.d, 0, 1000, 0); !errors.Is(err, tier.ErrMissing) {
		t.Errorf("the object that is being written was copied: %v", err)
	}
	need(t, l.d, 1, 1000)
}

func whereIsLocked(v *volume, obj int) entry {
	k := tiertest.Key(obj)
	e, _ := v.mu.index.get(&k)
	return e
}

// A version that replaces an older one is synced before the journal says that the older one is gone. So a power cut in
// between loses only one of them.
func TestReplacedWhileItIsSealed(t *testing.T) {
	const objects = 8
	between := 0
	for seed := range uint64(12) {
		m, c := newMemFiles(seed, 1<<30), newClock()
		o := Options{SegmentBytes: minSegment, MinFree: 1, FirstTouch: true}
		d := openMem(t, o, 16<<20, c, m)
		for version := range 2 {
			for i := range objects {
				b, meta := versionOf(i, version)
				if err := d.Write(t.Context(), tiertest.Key(i), meta, b); err != nil {
					t.Fatal(err)
				}
			}
			if version == 0 {
				if err := d.Flush(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
		}
		m.mu.Lock()
		noted := false
		m.fail = func(deed, name string) error {
			if noted {
				m.dead = true // before anything else is done
				return errDead
			}
			noted = deed == "sync" && name == goneName
			return nil
		}
		m.mu.Unlock()
		if err := d.Flush(t.Context()); err != nil { // else all was noted before
			between++
		}
		m = m.cut()
		_ = d.Close()
		d = openMem(t, o, 16<<20, c, m)
		for i := range objects {
			metas := make([]tier.Meta, 1)
			if err := d.Stat(t.Context(), []kv.Key{tiertest.Key(i)}, metas); err != nil || metas[0].Len == 0 {
				t.Errorf("seed %d: object %d is gone in both versions: %v", seed, i, err)
			}
		}
		closeDisk(t, d)
	}
	if between == 0 {
		t.Error("no power cut came in between")
	}
}

// A record that is still being written while its segment is synced is synced the next time.
func TestWrittenWhileItsSegmentIsSynced(t *testing.T) {
	for seed := range uint64(12) {
		m, c := newMemFiles(seed, 1<<30), newClock()
		o := Options{SegmentBytes: 1 << 20, MinFree: 1, FirstTouch: true}
		d := openMem(t, o, 16<<20, c, m)
		put(t, d, 1, 5000)
		v := d.volumes[0]
		b, meta := object(2, 5000, 0)
		s, at, _, err := v.tryReserve(recordBytes(meta.Len), nil)
		if err != nil || s == nil {
			t.Fatal(s, err)
		}
		v.syncActive()
		r := record{tiertest.Key(2), uint32(at / block), uint32(meta.Len), meta.Sum, false, 0, 0}
		err = v.append(t.Context(), s, &r, b)
		v.finish(s, &r, nil, err)
		if err != nil {
			t.Fatal(err)
		}
		v.syncActive()
		m = m.cut()
		_ = d.Close()
		d = openMem(t, o, 16<<20, c, m)
		need(t, d, 1, 5000)
		need(t, d, 2, 5000)
		closeDisk(t, d)
	}
}
