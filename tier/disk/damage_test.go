// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// segmentFiles returns the names of the segment files in memory, the oldest first, and the records in
// them.
func segmentFiles(t *testing.T, m *memFiles) (names []string, records map[string][]record) {
	t.Helper()
	records = map[string][]record{}
	list, _ := m.list()
	for name, size := range list {
		if _, id, ok := parseSegment(name); ok {
			f, _ := m.open(name)
			_, r, err := readIndex(f, id, size)
			if err != nil {
				t.Fatal(err)
			}
			names, records[name] = append(names, name), r
		}
	}
	return names, records
}

// A changed byte of a segment costs only the object that it belongs to; a changed byte of an index
// or of the checkpoint costs none. The disk serves no wrong byte.
func TestDamageCostsOneObject(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 3))
	for round := range 60 {
		m, c := newMemFiles(uint64(round), 1<<30), newClock()
		o := Options{SegmentBytes: 128 << 10, MinFree: 1, FirstTouch: true}
		d := openMem(t, o, 16<<20, c, m)
		const objects, n = 30, 9000
		for i := range objects {
			put(t, d, i, n)
		}
		closeDisk(t, d)
		names, records := segmentFiles(t, m)
		name := names[r.IntN(len(names))]
		f := m.names[name]
		at := r.IntN(len(f.data))
		switch round % 3 {
		case 0: // somewhere
		case 1: // in a header, or the index
			at = at/block*block + r.IntN(headBytes)
		case 2:
			at = len(f.data) - 1 - r.IntN(3*block)
		}
		f.data[at] ^= 1 << r.IntN(8)
		if round%2 == 0 {
			m.names[checkName].data[r.IntN(len(m.names[checkName].data))] ^= 1
		}
		hit := map[int]bool{}
		for _, rec := range records[name] {
			if int64(at) >= int64(rec.block)*block && int64(at) < rec.end() {
				hit[int(rec.key.Rank)] = true
			}
		}
		for life := range 2 {
			d = openMem(t, o, 16<<20, c, m)
			for i := range objects {
				err := get(t, d, i, n, 0)
				corrupt := isCorrupt(err) || errors.Is(err, tier.ErrMissing)
				if err != nil && !(hit[i] && corrupt) {
					t.Errorf("round %d, life %d, byte %d of %s: object %d: %v", round, life, at, name, i, err)
				}
				if corrupt {
					if err := get(t, d, i, n, 0); !errors.Is(err, tier.ErrMissing) {
						t.Errorf("damaged object %d is not forgotten: %v", i, err)
					}
				}
			}
			closeDisk(t, d)
		}
		if t.Failed() {
			return
		}
	}
}

func isCorrupt(err error) bool { _, ok := errors.AsType[*tier.CorruptError](err); return ok }

// A damaged object is written again and healed.
func TestDamagedObjectIsReplaced(t *testing.T) {
	m := newMemFiles(1, 1<<30)
	d := openMem(t, Options{SegmentBytes: 128 << 10, MinFree: 1, FirstTouch: true}, 16<<20, newClock(), m)
	defer closeDisk(t, d)
	put(t, d, 1, 9000)
	put(t, d, 2, 9000)
	m.edit(func(names map[string]*memFile) {
		for _, f := range names {
			if i := bytes.Index(f.data, []byte(recordMagic)); i > 0 {
				f.data[i+block+100] ^= 1
			}
		}
	})
	if err := get(t, d, 1, 9000, 0); !isCorrupt(err) {
		t.Errorf("%v", err)
	}
	put(t, d, 1, 9000)
	need(t, d, 1, 9000)
	need(t, d, 2, 9000)
	if s := d.Stats(); s.Corrupt != 1 {
		t.Errorf("%d corrupt", s.Corrupt)
	}
}

// Bytes of a payload that look like a record are not taken for one, also if the segment has lost
// its index.
func TestPayloadThatLooksLikeARecord(t *testing.T) {
	m, c := newMemFiles(1, 1<<30), newClock()
	o := Options{SegmentBytes: 256 << 10, MinFree: 1, FirstTouch: true}
	d := openMem(t, o, 16<<20, c, m)
	put(t, d, 1, 3*block)
	v := d.volumes[0]
	v.mu.Lock()
	seg := v.mu.segs[whereIsLocked(v, 1).seg]
	v.mu.Unlock()
	forged := shm.MakeAligned(4*block, block)
	bytes2, meta2 := object(2, 100, 0)
	victim := record{tiertest.Key(2), 7, 100, meta2.Sum, false, 0, 0} // where the payload's second block will be
	putRecord(forged[block:], seg.id+1, &victim)                      // the writer of a payload does not know the id of the segment
	copy(forged[block+headBytes:], bytes2)
	sum := tier.Meta{Len: int64(len(forged)), Sum: hashOf(forged)}
	if err := d.Write(t.Context(), tiertest.Key(3), sum, forged); err != nil {
		t.Fatal(err)
	}
	m = m.kill()
	_ = d.Close()
	file := m.names[segmentName(seg.seq, seg.id)]
	if string(file.data[7*block:][:8]) != recordMagic {
		t.Fatal("the payload is elsewhere")
	}
	clear(file.data[5*block:][:headBytes]) // so that the disk searches the payload for records
	d = openMem(t, o, 16<<20, c, m)
	defer closeDisk(t, d)
	need(t, d, 1, 3*block)
	if err := get(t, d, 2, 100, 0); !errors.Is(err, tier.ErrMissing) {
		t.Errorf("the forged object: %v", err)
	}
}

// The scrub finds what nobody reads.
func TestScrub(t *testing.T) {
	m := newMemFiles(1, 1<<30)
	o := Options{SegmentBytes: 128 << 10, MinFree: 1, FirstTouch: true, ScrubRate: 1 << 40}
	d := openMem(t, o, 16<<20, newClock(), m)
	for i := range 50 {
		put(t, d, i, 9000)
	}
	closeDisk(t, d)
	names, records := segmentFiles(t, m)
	rec := records[names[0]][3]
	m.names[names[0]].data[int(rec.block)*block+headBytes] ^= 1
	d = openMem(t, o, 16<<20, newClock(), m)
	defer closeDisk(t, d)
	for d.Stats().Corrupt == 0 {
		time.Sleep(time.Millisecond)
	}
	var metas [50]tier.Meta
	var keys [50]kv.Key
	for i := range keys {
		keys[i] = tiertest.Key(i)
	}
	if err := d.Stat(t.Context(), keys[:], metas[:]); err != nil {
		t.Fatal(err)
	}
	for i := range keys {
		if (metas[i].Len == 0) != (keys[i] == rec.key) {
			t.Errorf("object %d: %v", i, metas[i])
		}
	}
}

// While the disk still searches a large segment without an index, it serves the objects of the checkpoint
// and takes new ones. Delete waits, and also deletes records that are found later.
func TestServesWhileOpening(t *testing.T) {
	m, c := newMemFiles(1, 1<<30), newClock()
	o := Options{SegmentBytes: 128 << 10, MinFree: 1, FirstTouch: true}
	d := openMem(t, o, 16<<20, c, m)
	for i := range 30 {
		put(t, d, i, 9000)
	}
	closeDisk(t, d)
	d = openMem(t, o, 16<<20, c, m)
	put(t, d, 100, 9000)
	put(t, d, 101, 9000)
	m = m.kill()
	_ = d.Close()

	list, _ := m.list()
	reads := 0 // of what is unfinished; the first is for the header of the newest
	blocked, release := make(chan struct{}), make(chan struct{})
	var once sync.Once
	m.fail = func(deed, name string) error {
		if deed == "read" && strings.HasSuffix(name, suffix) && list[name] == o.SegmentBytes {
			if reads++; reads > 1 {
				m.mu.Unlock()
				once.Do(func() { close(blocked) })
				<-release
				m.mu.Lock()
			}
		}
		return nil
	}
	o.Dirs = []Dir{{"mem", 16 << 20}}
	d, err := openWith(o, func(string) (files, error) { return m, nil }, c.now)
	if err != nil {
		t.Fatal(err)
	}
	defer closeDisk(t, d)
	<-blocked
	for i := range 30 {
		for errors.Is(get(t, d, i, 9000, 0), tier.ErrMissing) { // the checkpoint comes first, and soon
			time.Sleep(time.Millisecond)
		}
	}
	put(t, d, 200, 9000)
	need(t, d, 200, 9000)
	if !d.Stats().Opening {
		t.Error("it is open already")
	}
	deleted := make(chan error, 1)
	go func() { deleted <- d.Delete(t.Context(), []kv.Key{tiertest.Key(100)}) }()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := d.Delete(ended, []kv.Key{tiertest.Key(1)}); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	close(release)
	<-d.Opened()
	if err := <-deleted; err != nil {
		t.Error(err)
	}
	need(t, d, 101, 9000)
	need(t, d, 1, 9000)
	if err := get(t, d, 100, 9000, 0); !errors.Is(err, tier.ErrMissing) {
		t.Errorf("%v", err)
	}
}

// A Read whose context ends between two pieces returns, and nothing writes to its memory
// afterwards.
func TestCancelInTheMiddleOfARead(t *testing.T) {
	for shift := range 2 {
		m := newMemFiles(1, 1<<30)
		d := openMem(t, Options{SegmentBytes: 16 << 20, MinFree: 1, FirstTouch: true}, 128<<20, newClock(), m)
		n := 2*directPiece + 5000
		put(t, d, 1, n)
		ctx, cancel := context.WithCancel(t.Context())
		var reads atomic.Int64
		m.mu.Lock()
		m.fail = func(deed, _ string) error {
			if deed == "read" && reads.Add(1) == 2 {
				cancel()
			}
			return nil
		}
		m.mu.Unlock()
		dst, _ := object(2, n, shift)
		if _, err := d.Read(ctx, tiertest.Key(1), dst); !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
		before := reads.Load()
		poison := bytes.Repeat([]byte{0xee}, n)
		copy(dst, poison)
		need(t, d, 1, n)
		if !bytes.Equal(dst, poison) || before != 2 {
			t.Errorf("memory was written to after its Read had ended (%d reads)", before)
		}
		closeDisk(t, d)
	}
}

// If somebody truncates a segment under a running server, at any length, the objects behind that are lost as damaged ones.
// The disk does not count as failed.
func TestCutUnderTheServer(t *testing.T) {
	for _, left := range []int64{0, block, 3 * block, 3*block + 1000, 3*block + 512} {
		dir := t.TempDir()
		d := open(t, small(dir))
		put(t, d, 1, 3000) // in the second block
		put(t, d, 2, 100_000)
		for name := range snapshot(t, dir) {
			if _, _, ok := parseSegment(name); ok {
				if err := os.Truncate(filepath.Join(dir, name), left); err != nil {
					t.Fatal(err)
				}
			}
		}
		if left >= 2*block {
			need(t, d, 1, 3000)
		}
		err := get(t, d, 2, 100_000, 0)
		if _, ok := errors.AsType[*tier.CorruptError](err); !ok {
			t.Errorf("%d bytes left: %v", left, err)
		}
		closeDisk(t, d)
	}
}

// If files of a directory lost their ends, at any length, the disk serves the rest.
func TestTornFiles(t *testing.T) {
	dir := t.TempDir()
	o := small(dir)
	d := open(t, o)
	for i := range 40 {
		put(t, d, i, 50_000)
	}
	closeDisk(t, d)
	names, _ := filepath.Glob(filepath.Join(dir, "*"))
	r := rand.New(rand.NewPCG(1, 9))
	for range 10 {
		whole := snapshot(t, dir)
		name := names[r.IntN(len(names))]
		if base := filepath.Base(name); base == markName || base == goneName {
			continue
		}
		if err := os.Truncate(name, r.Int64N(int64(len(whole[filepath.Base(name)])+1))); err != nil {
			t.Fatal(err)
		}
		d := open(t, o)
		found := 0
		for i := range 40 {
			if err := get(t, d, i, 50_000, 0); err == nil {
				found++
			} else if !errors.Is(err, tier.ErrMissing) {
				t.Errorf("%s cut: object %d: %v", name, i, err)
			}
		}
		if found < 20 { // two segments have them
			t.Errorf("%s cut: %d objects are left", name, found)
		}
		closeDisk(t, d)
		left, _ := filepath.Glob(filepath.Join(dir, "*"))
		for _, name := range left {
			if strings.HasSuffix(name, suffix) {
				_ = os.Remove(name)
			}
		}
		for name, b := range whole {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(b), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// The bytes of damaged objects that the scrub reads count towards its rate, too.
func TestScrubOfDamageIsPaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemFiles(1, 1<<30)
		const objects, n, rate = 40, 64 << 10, 128 << 10
		o := Options{SegmentBytes: 1 << 20, MinFree: 1, FirstTouch: true, ScrubRate: rate}
		d := openMem(t, o, 16<<20, newClock(), m)
		for i := range objects {
			put(t, d, i, n)
		}
		closeDisk(t, d)
		_, records := segmentFiles(t, m)
		for name, of := range records {
			for _, r := range of {
				m.names[name].data[int64(r.block)*block] ^= 1
			}
		}
		d = openMem(t, o, 16<<20, newClock(), m)
		defer closeDisk(t, d)
		<-d.Opened()
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if got := d.Stats().Corrupt; got < 5 || got > 1+5*rate/n {
			t.Errorf("%d objects of %d bytes in 5 s, at %d bytes a second", got, n, rate)
		}
	})
}
