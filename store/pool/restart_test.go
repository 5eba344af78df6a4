// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/kv"
)

// image is a pool's two files at one moment: what a kill leaves.
type image struct{ pool, index []byte }

func (p *Pool) image() image {
	return image{slices.Clone(p.segment.Bytes(0, p.segment.Len())), slices.Clone(p.index.Bytes(0, p.index.Len()))}
}

// boot writes an image into dir and opens it as the next server would.
func (im image) boot(dir string, o Options) (*Pool, error) {
	path := filepath.Join(dir, o.Name)
	for name, b := range map[string][]byte{path: im.pool, path + IndexSuffix: im.index} {
		_ = os.Remove(name)
		if err := os.WriteFile(name, b, 0o600); err != nil {
			return nil, err
		}
	}
	seg, err := shm.Attach(path)
	if err != nil {
		return nil, err
	}
	inode := seg.Inode()
	ix, err := shm.Attach(path + IndexSuffix)
	if err != nil {
		return nil, err
	}
	if ix.Word(0).Load() != 0 { // the copy of the segment has another inode
		h := ix.Bytes(0, headerBytes)
		binary.LittleEndian.PutUint64(h[40:], inode)
		binary.LittleEndian.PutUint32(h[56:], crc32.Checksum(h[:56], castagnoli))
	}
	if err := errors.Join(seg.Close(), ix.Close()); err != nil {
		return nil, err
	}
	o.Dir = dir
	return Open(o)
}

// truth is what a restart must find.
type truth struct {
	resident map[kv.Key]int64 // committed, with its offset
	touched  map[Slot]bool    // slots that a worker may still touch
}

func check(t *rapid.T, where string, p *Pool, want truth) {
	found := p.Restored()
	if len(found.Resident) != len(want.resident) {
		t.Fatalf("%s: %d resident, want %d", where, len(found.Resident), len(want.resident))
	}
	for k, off := range want.resident {
		s, st := p.Find(&k)
		if st != Resident || p.Offset(s) != off {
			t.Fatalf("%s: a committed chunk is in state %d at %d, want %d", where, st, p.Offset(s), off)
		}
	}
	held := map[Slot]bool{}
	for _, h := range found.Held {
		s := h.Slot
		held[s] = true
		if p.Holds(s) != 1 {
			t.Fatalf("%s: slot %d has %d holds", where, s, p.Holds(s))
		}
	}
	for s := range want.touched {
		if !held[s] {
			t.Fatalf("%s: slot %d may be touched and is not held", where, s)
		}
	}
	if u := p.Usage(); u.FreeBytes+u.ResidentBytes+u.CondemnedBytes != u.Bytes || u.StagedBytes != 0 {
		t.Fatalf("%s: %+v", where, u)
	}
	for s := range held { // every byte comes back
		p.Unhold(s)
	}
	for _, s := range found.Resident {
		p.Drop(s)
	}
	if u := p.Usage(); u.FreeBytes != u.Bytes {
		t.Fatalf("%s: %+v after everything was given back", where, u)
	}
}

// A kill at any moment: after each operation, and inside each at every boundary
// of the bytes it writes, the next server finds every committed chunk where it
// was, nothing uncommitted, and keeps out of use what a worker may still touch.
func TestKilledAnywhere(t *testing.T) {
	dir, copies := t.TempDir(), t.TempDir()
	cuts := 0
	rapid.Check(t, func(r *rapid.T) {
		o := Options{Name: "p", Bytes: 6 * 4096, Dir: dir, ChunkTokens: 1, Cold: true}
		p, err := Open(o)
		if err != nil {
			r.Fatal(err)
		}
		defer func() { _ = p.Close() }()
		o.Cold = false
		now := truth{resident: map[kv.Key]int64{}, touched: map[Slot]bool{}}
		var slots []Slot
		for step := range rapid.IntRange(1, 25).Draw(r, "steps") {
			before, old := p.image(), truth{cloneMap(now.resident), cloneMap(now.touched)}
			slots = operate(r, p, &now, slots)
			after := p.image()
			where := fmt.Sprint("step ", step)
			boot := func(where string, im image, want truth) {
				cuts++
				next, err := im.boot(copies, o)
				if err != nil {
					r.Fatalf("%s: %v", where, err)
				}
				check(r, where, next, want)
				if err := next.Close(); err != nil {
					r.Fatal(err)
				}
			}
			boot(where, after, now)
			for _, cut := range tears(before.index, after.index) {
				boot(where+", torn", image{after.pool, cut}, old)
			}
		}
	})
	t.Logf("%d kills", cuts)
}

func cloneMap[K comparable, V any](m map[K]V) map[K]V {
	out := make(map[K]V, len(m))
	for k, v := range m {
		out[k] = v
	}
	return out
}

// tears returns the images between two moments in which the record's bytes are
// written up to some point, and its state word not yet.
func tears(before, after []byte) (out [][]byte) {
	for rec := headerBytes; rec+recordBytes <= len(after); rec += recordBytes {
		old, new := before[rec:rec+recordBytes], after[rec:rec+recordBytes]
		if slices.Equal(old[8:92], new[8:92]) {
			continue
		}
		for _, upTo := range []int{8, 9, 16, 24, 40, 56, 72, 80, 92, 94, recordBytes} {
			cut := slices.Clone(before)
			copy(cut[:headerBytes], after[:headerBytes]) // the count of used records comes first
			copy(cut[rec+8:rec+upTo], new[8:upTo])
			out = append(out, cut)
		}
	}
	return out
}

// operate does one random operation and keeps the truth up to date.
func operate(r *rapid.T, p *Pool, now *truth, slots []Slot) []Slot {
	pick := func() (Slot, bool) {
		if len(slots) == 0 {
			return 0, false
		}
		return slots[rapid.IntRange(0, len(slots)-1).Draw(r, "slot")], true
	}
	sync := func() {
		now.resident, now.touched = map[kv.Key]int64{}, map[Slot]bool{}
		slots = slices.DeleteFunc(slots, func(s Slot) bool { return p.StateOf(s) == Free })
		for _, s := range slots {
			if p.StateOf(s) == Resident {
				now.resident[p.KeyOf(s)] = p.Offset(s)
			}
			if p.Holds(s) > 0 {
				now.touched[s] = true
			}
		}
	}
	defer sync()
	switch rapid.IntRange(0, 5).Draw(r, "op") {
	case 0, 1:
		k := kv.Key{Chunk: kv.Hash{byte(rapid.IntRange(0, 9).Draw(r, "key"))}}
		if s, err := p.Reserve(&k, int64(rapid.IntRange(1, 2*4096).Draw(r, "bytes")), Writer{}); err == nil {
			slots = append(slots, s)
		}
	case 2:
		if s, ok := pick(); ok && p.StateOf(s) == Staged {
			p.Commit(s)
			p.Stamp(s)
		}
	case 3:
		if s, ok := pick(); ok && p.StateOf(s) == Resident {
			p.Hold(s)
		}
	case 4:
		if s, ok := pick(); ok && p.Holds(s) > 0 && p.StateOf(s) != Staged {
			p.Unhold(s)
		}
	case 5:
		if s, ok := pick(); ok && (p.StateOf(s) == Resident || p.StateOf(s) == Staged) {
			p.Drop(s)
		}
	}
	return slots
}

func TestUseOrderSurvives(t *testing.T) {
	dir := t.TempDir()
	o := Options{Name: "p", Bytes: 4 * 4096, Dir: dir}
	p, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	var slots []Slot
	for i := range 4 {
		s, err := p.Reserve(&kv.Key{Chunk: kv.Hash{byte(i)}}, 1, Writer{})
		if err != nil {
			t.Fatal(err)
		}
		p.Commit(s)
		slots = append(slots, s)
	}
	want := []Slot{slots[2], slots[0], slots[3], slots[1]}
	for _, s := range want {
		p.Stamp(s)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if p, err = Open(o); err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if got := p.Restored().Resident; !slices.Equal(got, want) {
		t.Fatalf("order %v, want %v", got, want)
	}
}

// The quarantine of a slot counts from the first start that found it held, unless
// somebody else took a hold since.
func TestHeldFor(t *testing.T) {
	clock := time.Hour
	o := Options{Name: "p", Bytes: 4 * 4096, Dir: t.TempDir(), Clock: func() time.Duration { return clock }}
	p, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { p.Close() }()
	var slots []Slot
	for i := range 2 {
		s, err := p.Reserve(&kv.Key{Chunk: kv.Hash{byte(i)}}, 4096, Writer{})
		if err != nil {
			t.Fatal(err)
		}
		p.Commit(s)
		p.Hold(s)
		slots = append(slots, s)
	}
	restart := func(after, want0, want1 time.Duration) {
		t.Helper()
		clock += after
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
		if p, err = Open(o); err != nil {
			t.Fatal(err)
		}
		var got [2]time.Duration
		for _, h := range p.Restored().Held {
			got[h.Slot] = h.For
		}
		if len(p.Restored().Held) != 2 || got != [2]time.Duration{want0, want1} {
			t.Errorf("held for %v, want %v and %v", p.Restored().Held, want0, want1)
		}
	}
	restart(time.Minute, 0, 0)
	restart(time.Minute, time.Minute, time.Minute)
	p.Hold(slots[1])
	restart(time.Minute, 2*time.Minute, 0)
	clock = time.Second // as after a boot, should the files have come along
	restart(0, 0, 0)
}

// Damage is refused, not served.
func TestDamagedIndex(t *testing.T) {
	dir := t.TempDir()
	o := Options{Name: "p", Bytes: 4 * 4096, Dir: dir}
	p, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	for i := range 2 {
		s, err := p.Reserve(&kv.Key{Chunk: kv.Hash{byte(i)}}, 4096, Writer{})
		if err != nil {
			t.Fatal(err)
		}
		p.Commit(s)
	}
	good := p.image()
	f := func(what string, damage func(b []byte)) {
		t.Helper()
		im := image{good.pool, slices.Clone(good.index)}
		damage(im.index)
		next, err := im.boot(t.TempDir(), o)
		if !errors.Is(err, ErrIndex) {
			t.Errorf("%s: %v", what, err)
		}
		if next != nil {
			next.Close()
		}
	}
	f("hash", func(b []byte) { b[headerBytes+30] ^= 1 })
	f("state", func(b []byte) { b[headerBytes] = 9 })
	f("two slots in one place", func(b []byte) {
		copy(b[headerBytes+recordBytes:headerBytes+2*recordBytes], b[headerBytes:headerBytes+recordBytes])
	})
	f("records used", func(b []byte) { binary.LittleEndian.PutUint64(b[headerUsed:], 1<<40) })

	unfinished := image{good.pool, make([]byte, len(good.index))}
	next, err := unfinished.boot(t.TempDir(), o)
	if err != nil || len(next.Restored().Resident) != 0 {
		t.Fatalf("an index without a header: %v", err)
	}
	next.Close()
}

// FuzzOpen opens arbitrary indexes: an error or a pool that adds up.
func FuzzOpen(f *testing.F) {
	dir := f.TempDir()
	o := Options{Name: "p", Bytes: 2 * 4096, Dir: dir}
	p, err := Open(o)
	if err != nil {
		f.Fatal(err)
	}
	s, err := p.Reserve(&kv.Key{}, 100, Writer{})
	if err != nil {
		f.Fatal(err)
	}
	p.Commit(s)
	im := p.image()
	p.Close()
	f.Add(im.index[headerBytes:])
	f.Fuzz(func(t *testing.T, records []byte) {
		b := slices.Clone(im.index)
		copy(b[headerBytes:], records)
		next, err := image{im.pool, b}.boot(t.TempDir(), o)
		if err != nil {
			return
		}
		defer next.Close()
		if u := next.Usage(); u.FreeBytes+u.ResidentBytes+u.CondemnedBytes != u.Bytes {
			t.Fatalf("%+v", u)
		}
	})
}

// Taking over a pool of a million chunks.
func BenchmarkRestore(b *testing.B) {
	const chunks = 1 << 20
	o := Options{Name: "p", Bytes: chunks * 4096, Dir: b.TempDir()}
	p, err := Open(o)
	if err != nil {
		b.Fatal(err)
	}
	for i := range uint32(chunks) {
		k := kv.Key{}
		binary.LittleEndian.PutUint32(k.Chunk[:], i*2654435761)
		s, err := p.Reserve(&k, 4096, Writer{})
		if err != nil {
			b.Fatal(err)
		}
		p.Commit(s)
		p.Stamp(s)
	}
	if err := p.Close(); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		p, err := Open(o)
		if err != nil {
			b.Fatal(err)
		}
		if err := p.Close(); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(chunks, "chunks/op")
}
