// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// clock is a time that a test moves.
type clock struct{ atomic.Int64 }

func newClock() *clock {
	c := &clock{}
	c.Store(time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC).UnixNano())
	return c
}

func (c *clock) now() time.Time        { return time.Unix(0, c.Load()) }
func (c *clock) pass(by time.Duration) { c.Add(int64(by)) }

// openMem opens directories in memory, each with so many bytes of limit.
func openMem(t testing.TB, o Options, limit int64, c *clock, dirs ...*memFiles) *Disk {
	t.Helper()
	o.Dirs = nil
	byPath := map[string]*memFiles{}
	for i, m := range dirs {
		path := string(rune('a' + i))
		o.Dirs, byPath[path] = append(o.Dirs, Dir{path, limit}), m
	}
	d, err := openWith(o, func(path string) (files, error) { return byPath[path], nil }, c.now)
	if err != nil {
		t.Fatal(err)
	}
	<-d.Opened()
	return d
}

// With four times as many distinct objects as there is room, files never take more than
// the limit, and less than 1.3 bytes are written for each byte of objects, although some
// are read all the time.
func TestLimitAndWriteAmplification(t *testing.T) {
	const limit = 8 << 20
	m := newMemFiles(1, 1<<30)
	d := openMem(t, Options{SegmentBytes: 512 << 10, MinFree: 1, FirstTouch: true}, limit, newClock(), m)
	r := rand.New(rand.NewPCG(1, 1))
	total := int64(0)
	for i := 0; total < 4*limit; i++ {
		n := 4<<10 + r.IntN(60<<10)
		total += int64(n)
		put(t, d, i, n)
		if i%3 == 0 { // popular and old ones
			k := tiertest.Key(i / 2)
			var metas [1]tier.Meta
			_ = d.Stat(t.Context(), []kv.Key{k}, metas[:])
			if metas[0].Len > 0 {
				_, _ = d.Read(t.Context(), k, make([]byte, metas[0].Len))
			}
		}
	}
	closeDisk(t, d)
	if m.worst > limit {
		t.Errorf("%d bytes of segments, above the limit of %d", m.worst, limit)
	}
	s := d.Stats()
	factor := float64(s.Written["all"]) / float64(s.Written["objects"])
	t.Logf("write amplification %.3f, %d segments evicted, %d bytes readmitted", factor, s.Evicted, s.Readmitted)
	if factor >= 1.3 || s.Written["objects"] != total {
		t.Errorf("%.3f bytes were written per byte of %d", factor, s.Written["objects"])
	}
	if s.Evicted == 0 || s.Readmitted == 0 {
		t.Error("nothing was evicted, or nothing readmitted")
	}
}

// An object that is read again and again stays while many times the limit of unread objects are written.
func TestHotObjectsStay(t *testing.T) {
	m := newMemFiles(1, 1<<30)
	d := openMem(t, Options{SegmentBytes: 128 << 10, MinFree: 1, FirstTouch: true}, 4<<20, newClock(), m)
	defer closeDisk(t, d)
	const n = 2000
	for i := range 8 {
		put(t, d, i, n)
	}
	for i := range 4000 {
		put(t, d, 100+i, n)
		need(t, d, i%8, n)
		if t.Failed() {
			t.Fatalf("after %d others", i)
		}
	}
	cold := 0
	for i := range 1000 {
		if get(t, d, 100+i, n, 0) == nil {
			cold++
		}
	}
	if cold > 200 { // of the segments that have hot ones
		t.Errorf("%d of 1,000 old and cold ones are there", cold)
	}
}

// With SecondTouch an object is kept when it is offered the second time.
func TestSecondTouch(t *testing.T) {
	m := newMemFiles(1, 1<<30)
	d := openMem(t, Options{SegmentBytes: 256 << 10, MinFree: 1, SecondTouch: true}, 4<<20, newClock(), m)
	defer closeDisk(t, d)
	for _, seed := range []int{1, 2} {
		b, meta := object(seed, 1000, 0)
		if err := d.Write(t.Context(), tiertest.Key(seed), meta, b); !errors.Is(err, tier.ErrNotKept) {
			t.Errorf("first touch: %v", err)
		}
		if err := get(t, d, seed, 1000, 0); !errors.Is(err, tier.ErrMissing) {
			t.Errorf("after the first touch: %v", err)
		}
	}
	for _, seed := range []int{1, 2} {
		put(t, d, seed, 1000)
		need(t, d, seed, 1000)
	}
	if s := d.Stats(); s.NotKept["first_touch"] != 2 {
		t.Errorf("%v", s.NotKept)
	}
}

// A day's budget is a limit, also over a restart. The next day there is another.
func TestWriteBudget(t *testing.T) {
	m, c := newMemFiles(1, 1<<30), newClock()
	o := Options{SegmentBytes: 256 << 10, MinFree: 1, FirstTouch: true, WriteBudget: 1 << 20}
	d := openMem(t, o, 8<<20, c, m)
	offer := func(i int) error {
		b, meta := object(i, 20_000, 0)
		return d.Write(t.Context(), tiertest.Key(i), meta, b)
	}
	i, kept := 0, 0
	fill := func() {
		for kept = 0; offer(i) == nil; i++ {
			kept++
		}
		if err := offer(i); !errors.Is(err, tier.ErrNotKept) || !errors.Is(err, errBudget) {
			t.Errorf("%v", err)
		}
	}
	// used: a day's budget is used up, and more by objects than by bookkeeping. The number of checkpoints meanwhile, of
	// up to 80 KiB each, depends on which goroutine is faster.
	used := func() {
		t.Helper()
		each := recordBytes(20_000)
		if today := d.Stats().Today["a"]; today+each <= o.WriteBudget || int64(kept)*each > o.WriteBudget || int64(kept)*each < o.WriteBudget/2 {
			t.Errorf("%d objects of %d bytes are in the budget, of which %d bytes are used", kept, each, today)
		}
	}
	fill()
	used()
	need(t, d, 0, 20_000)
	closeDisk(t, d)
	d = openMem(t, o, 8<<20, c, m)
	if fill(); kept > 8 { // the next life does not count the bytes of bookkeeping
		t.Errorf("a restart gave %d objects more", kept)
	}
	c.pass(24 * time.Hour)
	fill()
	used()
	s := d.Stats()
	if s.Today["a"] > 1<<20+256<<10 || s.Ever["a"] < 2<<20-256<<10 || s.NotKept["budget"] == 0 {
		t.Errorf("today %d, ever %d, not kept %v", s.Today["a"], s.Ever["a"], s.NotKept)
	}
	closeDisk(t, d)
}

// Files of others come first: the disk frees the room that they need, down to nothing, and uses it
// again when they are gone.
func TestMinFree(t *testing.T) {
	m, c := newMemFiles(1, 16<<20), newClock()
	o := Options{SegmentBytes: 256 << 10, MinFree: 4 << 20, FirstTouch: true}
	d := openMem(t, o, 64<<20, c, m)
	defer closeDisk(t, d)
	for i := range 400 {
		put(t, d, i, 50_000)
	}
	testkit.Eventually(t, "a segment at most is missing", func() bool { // a checkpoint is a little more, for a moment
		_, free, _ := m.space()
		return free >= 4<<20-256<<10
	})
	others := func(bytes int64) {
		m.mu.Lock()
		m.free = 16<<20 - bytes
		m.mu.Unlock()
	}
	others(8 << 20)
	for began := time.Now(); ; time.Sleep(time.Millisecond) {
		if _, free, _ := m.space(); free >= 4<<20 {
			break
		}
		if time.Since(began) > time.Minute {
			t.Fatal("others do not get what they need")
		}
	}
	if d.Space().Objects == 0 {
		t.Error("everything is gone")
	}
	others(15<<20 + 1<<19)
	b, meta := object(2000, 200_000, 0)
	err := error(nil)
	for i := 0; err == nil && i < 10; i++ { // what is reserved already may be used
		err = d.Write(t.Context(), tiertest.Key(2000+i), meta, b)
	}
	if !errors.Is(err, tier.ErrNotKept) || !errors.Is(err, errFull) && !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("%v", err)
	}
	others(0)
	c.pass(refusePause)
	put(t, d, 3000, 200_000)
	need(t, d, 3000, 200_000)
}

// A disk that cannot be written keeps its objects. Other disks get its new objects, and
// after a while it is tried again.
func TestDiskThatFails(t *testing.T) {
	a, b, c := newMemFiles(1, 1<<30), newMemFiles(2, 1<<30), newClock()
	d := openMem(t, Options{SegmentBytes: 256 << 10, MinFree: 1, FirstTouch: true}, 16<<20, c, a, b)
	defer closeDisk(t, d)
	objects := func() (n [2]int64) {
		s := d.Stats()
		return [2]int64{s.Objects["a"], s.Objects["b"]}
	}
	for i := range 100 {
		put(t, d, i, 10_000)
	}
	if n := objects(); n[0] < 25 || n[1] < 25 || n[0]+n[1] != 100 {
		t.Errorf("%v objects", n)
	}
	fail := func(err error) {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.fail = func(deed, _ string) error {
			if deed == "write" || deed == "create" {
				return err
			}
			return nil
		}
	}
	fail(syscall.EIO)
	before := objects()
	for i := 100; i < 200; i++ {
		put(t, d, i, 10_000)
	}
	if n := objects(); n[0] != before[0] || n[1] != before[1]+100 {
		t.Errorf("%v objects after %v", n, before)
	}
	fail(nil)
	c.pass(refusePause)
	for i := 200; i < 300; i++ {
		put(t, d, i, 10_000)
	}
	if n := objects(); n[0] < before[0]+25 {
		t.Errorf("%v objects after %v: it was not tried again", n, before)
	}
	for i := range 300 {
		need(t, d, i, 10_000)
	}
}

// A disk more or less moves only the keys that fall to it, by its size.
func TestKeysFallByBytes(t *testing.T) {
	vols := []*volume{{id: 1, dir: Dir{Bytes: 1 << 30}}, {id: 2, dir: Dir{Bytes: 3 << 30}}, {id: 3, dir: Dir{Bytes: 4 << 30}}}
	two, three := &Disk{volumes: vols[:2]}, &Disk{volumes: vols}
	var n [4]int
	for i := range 8000 {
		k := tiertest.Key(i)
		was, is := two.order(&k)[0], three.order(&k)[0]
		if n[is.id]++; is != was && is != vols[2] {
			t.Fatalf("key %d went from one old disk to the other", i)
		}
	}
	for id, want := range []int{0, 1000, 3000, 4000} {
		if n[id] < want-200 || n[id] > want+200 {
			t.Errorf("disk %d has %d keys, want about %d", id, n[id], want)
		}
	}
}

// An object that no segment can hold is not kept, one that just fits is.
func TestLargest(t *testing.T) {
	m := newMemFiles(1, 1<<30)
	d := openMem(t, Options{SegmentBytes: 256 << 10, MinFree: 1, FirstTouch: true}, 4<<20, newClock(), m)
	defer closeDisk(t, d)
	n := int(d.volumes[0].largest())
	put(t, d, 1, n)
	need(t, d, 1, n)
	b, meta := object(2, n+1, 0)
	if err := d.Write(t.Context(), tiertest.Key(2), meta, b); !errors.Is(err, tier.ErrNotKept) {
		t.Errorf("%v", err)
	}
	if n := d.Stats().NotKept["too_large"]; n != 1 {
		t.Errorf("%d", n)
	}
}

// Many write, read and flush while segments are evicted, until it is closed under them:
// every call ends.
func TestCloseUnderLoad(t *testing.T) {
	m := newMemFiles(1, 1<<30)
	d := openMem(t, Options{SegmentBytes: 256 << 10, MinFree: 1, FirstTouch: true, ScrubRate: 1 << 40}, 2<<20, newClock(), m)
	var wg sync.WaitGroup
	var done atomic.Int64
	for g := range 8 {
		wg.Go(func() {
			b, meta := object(g, 30_000, 0)
			for i := 0; ; i++ {
				if err := d.Write(t.Context(), tiertest.Key(g*100_000+i), meta, b); errors.Is(err, errClosed) {
					return
				} else if err != nil && !errors.Is(err, tier.ErrNotKept) {
					t.Errorf("write: %v", err)
					return
				}
				if _, err := d.Read(t.Context(), tiertest.Key(g*100_000+i/2), make([]byte, 30_000)); err != nil && !errors.Is(err, tier.ErrMissing) && !errors.Is(err, errClosed) {
					t.Errorf("read: %v", err)
				}
				if g == 0 && i%10 == 0 {
					if err := d.Flush(t.Context()); err != nil && !errors.Is(err, errClosed) {
						t.Errorf("flush: %v", err)
					}
				}
				done.Add(1)
			}
		})
	}
	for done.Load() < 1000 {
		time.Sleep(time.Millisecond)
	}
	closeDisk(t, d)
	wg.Wait()
}

// By default a small disk leaves a twentieth of its file system to others and a large one 4 GiB; Rooms says what is
// left of a limit then, with what the files take already.
func TestRooms(t *testing.T) {
	small, large := newMemFiles(1, 16<<20), newMemFiles(2, 1<<40)
	d := openMem(t, Options{SegmentBytes: 256 << 10, FirstTouch: true}, 64<<20, newClock(), small, large)
	defer closeDisk(t, d)
	for i := range 40 {
		put(t, d, i, 100_000)
	}
	if err := d.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	got, err := d.Rooms()
	if err != nil || len(got) != 2 {
		t.Fatal(got, err)
	}
	for i, want := range []Space{
		{Dir{"a", 64 << 20}, 16 << 20 / 20, 16<<20 - 16<<20/20},
		{Dir{"b", 64 << 20}, 4 << 30, 64 << 20},
	} {
		now := got[i].Now
		got[i].Now = want.Now
		if got[i] != want || now > want.Now+512<<10 || now < want.Now-512<<10 { // other files take some, and a segment may be made just now
			t.Errorf("%+v with %d now, want %+v", got[i], now, want)
		}
	}
}
