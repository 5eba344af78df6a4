// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// The checkpoint records which objects were read, so that they are still known as used after a restart.
func TestReadsSurviveInTheCheckpoint(t *testing.T) {
	m, c := newMemFiles(1, 1<<30), newClock()
	o := Options{SegmentBytes: minSegment, MinFree: 1, FirstTouch: true}
	d := openMem(t, o, 16<<20, c, m)
	for i := range 6 {
		put(t, d, i, 9000)
	}
	if err := d.Flush(t.Context()); err != nil { // sealed: their own indexes say nothing of what is read from now on
		t.Fatal(err)
	}
	need(t, d, 1, 9000)
	need(t, d, 4, 9000)
	put(t, d, 6, 9000) // so that Close has a checkpoint to write
	closeDisk(t, d)
	d = openMem(t, o, 16<<20, c, m)
	defer closeDisk(t, d)
	v := d.volumes[0]
	v.mu.Lock()
	defer v.mu.Unlock()
	for i := range 7 {
		if e := whereIsLocked(v, i); e.hot != (i == 1 || i == 4) {
			t.Errorf("object %d was read: %v", i, e.hot)
		}
	}
}

// If the disk finds older records of an object beside newer ones, and no journal names them, the older ones do not come back
// when the newer ones are deleted, in whatever order it found them.
func TestOlderRecordsThatAreFoundStayGone(t *testing.T) {
	const objects = 40
	m, c := newMemFiles(1, 1<<30), newClock()
	o := Options{SegmentBytes: minSegment, MinFree: 1, FirstTouch: true}
	d := openMem(t, o, 16<<20, c, m)
	var keys []kv.Key
	for version := range 2 {
		for i := range objects {
			b, meta := versionOf(i, version)
			if err := d.Write(t.Context(), tiertest.Key(i), meta, b); err != nil {
				t.Fatal(err)
			}
			keys = append(keys, tiertest.Key(i))
		}
		if err := d.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	next := func(without ...string) {
		t.Helper()
		m = m.kill()
		_ = d.Close() // of files that are dead
		m.dead = false
		for _, name := range without {
			delete(m.names, name)
		}
		d = openMem(t, o, 16<<20, c, m)
	}
	next(goneName, checkName)
	if err := d.Delete(t.Context(), keys[:objects]); err != nil {
		t.Fatal(err)
	}
	next(checkName)
	defer closeDisk(t, d)
	if n := d.Space().Objects; n != 0 {
		t.Errorf("%d older objects are back", n)
	}
}

// An object that is written again while another disk is still being opened replaces the record found there.
func TestWrittenWhileAnotherDiskIsRead(t *testing.T) {
	c := newClock()
	o := Options{SegmentBytes: minSegment, MinFree: 1, FirstTouch: true}
	const objects = 20
	a, b := newMemFiles(1, 1<<30), newMemFiles(2, 1<<30)
	d := openMem(t, o, 16<<20, c, a) // all are on the first disk
	for i := range objects {
		bytes, meta := versionOf(i, 1)
		if err := d.Write(t.Context(), tiertest.Key(i), meta, bytes); err != nil {
			t.Fatal(err)
		}
	}
	closeDisk(t, d)
	release, reads := make(chan struct{}), 0
	var once sync.Once
	free := func() { once.Do(func() { close(release) }) }
	a.fail = func(deed, name string) error {
		if deed == "read" && (strings.HasPrefix(name, checkName) || strings.HasSuffix(name, suffix)) {
			if reads++; reads > 2 { // wear is read by Open
				a.mu.Unlock()
				<-release
				a.mu.Lock()
			}
		}
		return nil
	}
	o.Dirs = []Dir{{"a", 16 << 20}, {"b", 16 << 20}}
	d, err := openWith(o, func(path string) (files, error) { return map[string]*memFiles{"a": a, "b": b}[path], nil }, c.now)
	if err != nil {
		t.Fatal(err)
	}
	defer closeDisk(t, d)
	defer free()
	for i := range objects {
		bytes, meta := versionOf(i, 2)
		if err := d.Write(t.Context(), tiertest.Key(i), meta, bytes); err != nil {
			t.Fatal(err)
		}
	}
	if !d.Stats().Opening {
		t.Fatal("it is open already")
	}
	free()
	select {
	case <-d.Opened():
	case <-time.After(time.Minute):
		t.Fatal("never open")
	}
	var old []int
	for i := range objects {
		want, meta := versionOf(i, 2)
		metas := make([]tier.Meta, 1)
		if err := d.Stat(t.Context(), []kv.Key{tiertest.Key(i)}, metas); err != nil {
			t.Fatal(err)
		}
		dst := make([]byte, len(want))
		got, err := d.Read(t.Context(), tiertest.Key(i), dst)
		if _, corrupt := errors.AsType[*tier.CorruptError](err); metas[0] != meta || got != meta || corrupt || !slices.Equal(dst, want) {
			old = append(old, i)
		}
	}
	if len(old) > 0 {
		t.Errorf("%d of %d objects are of the version that was replaced: %v", len(old), objects, old)
	}
}
