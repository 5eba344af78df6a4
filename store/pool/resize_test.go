// SPDX-License-Identifier: Apache-2.0

package pool_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/store/pool"
)

const resizeChunk = 8192

func resized(t *testing.T, dir string, chunks int64) *pool.Pool {
	t.Helper()
	p, err := pool.Open(pool.Options{Name: "p", Bytes: chunks * resizeChunk, Dir: dir, ChunkTokens: 256})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func chunkOf(i byte) []byte { return bytes.Repeat([]byte{i, 0xa5}, resizeChunk/2) }

// put stores a chunk of a key, with its checksum; it was used later than those before.
func put(t *testing.T, p *pool.Pool, i byte) pool.Slot {
	t.Helper()
	s, err := p.Reserve(key(i), resizeChunk, pool.Writer{})
	if errors.Is(err, pool.ErrIndexMemory) { // after a restart
		if err = p.BackIndex(); err == nil {
			s, err = p.Reserve(key(i), resizeChunk, pool.Writer{})
		}
	}
	if err != nil {
		t.Fatalf("chunk %d: %v", i, err)
	}
	copy(p.View(s), chunkOf(i))
	p.Commit(s)
	p.Stamp(s)
	p.SetSum(s, uint64(i))
	p.SetBelow(s, uint32(i))
	return s
}

// kept checks that exactly these keys are in a pool, with their bytes, checksums and order of use.
func kept(t *testing.T, what string, p *pool.Pool, want ...byte) {
	t.Helper()
	var got []byte
	for _, s := range p.Restored().Resident {
		k := p.KeyOf(s)
		i := k.Chunk[0]
		got = append(got, i)
		sum, ok := p.Sum(s)
		if !bytes.Equal(p.View(s), chunkOf(i)) || !ok || sum != uint64(i) || p.Below(s) != uint32(i) {
			t.Errorf("%s: chunk %d has other bytes, or checksum %d, %v, place below %d", what, i, sum, ok, p.Below(s))
		}
		if p.Offset(s)+resizeChunk > p.Bytes() {
			t.Errorf("%s: chunk %d is at %d, above the end", what, i, p.Offset(s))
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("%s: chunks %v, want %v", what, got, want)
	}
	if u := p.Usage(); u.FreeBytes+u.ResidentBytes+u.CondemnedBytes != u.Bytes {
		t.Errorf("%s: %+v", what, u)
	}
}

// A pool that becomes smaller keeps the chunks that were used last, wherever they were, with
// their checksums, and gives the other memory back. One that becomes larger keeps all. The segment stays
// the same file, so engines that map it go on.
func TestResizeKeepsTheHottest(t *testing.T) {
	dir := t.TempDir()
	p := resized(t, dir, 8)
	for i := range byte(8) {
		put(t, p, i)
	}
	for _, i := range []byte{0, 6, 2} {
		s, _ := p.Find(key(i))
		p.Stamp(s)
	}
	inode := p.Inode()
	next := func(chunks int64) {
		t.Helper()
		former := p.Bytes()
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
		p = resized(t, dir, chunks)
		if p.Inode() != inode || p.Bytes() != chunks*resizeChunk || p.FormerBytes() != former {
			t.Errorf("%d chunks: another file, or %d bytes, before %d, want %d", chunks, p.Bytes(), p.FormerBytes(), former)
		}
	}
	defer func() { p.Close() }()
	next(4)
	kept(t, "half", p, 7, 0, 6, 2)
	if file, err := shm.Stat(p.Path()); err != nil || file.Taken > 4*resizeChunk {
		t.Errorf("half: the file takes %d bytes, %v", file.Taken, err)
	}
	if got := p.Provided(); got > 4*resizeChunk {
		t.Errorf("half: %d bytes are said to have memory", got)
	}
	if _, err := p.Reserve(key(100), 1, pool.Writer{}); !errors.Is(err, pool.ErrFull) {
		t.Errorf("half: there is room above the end: %v", err)
	}
	next(4)
	kept(t, "half again", p, 7, 0, 6, 2)
	next(6)
	kept(t, "six", p, 7, 0, 6, 2)
	put(t, p, 20)
	put(t, p, 21)
	next(20)
	kept(t, "twenty", p, 7, 0, 6, 2, 20, 21)
	for i := byte(30); i < 44; i++ {
		put(t, p, i)
	}
	next(1)
	kept(t, "one", p, 43)
}

// Chunks of several lengths: a hot one above the new end gets a place. Others move together for it, and where
// a held one lies in the way, those that were used before it are dropped.
func TestResizeMakesRoomForLongerChunks(t *testing.T) {
	f := func(pages []int64, to int64, hold, use byte, want ...byte) {
		t.Helper()
		dir := t.TempDir()
		p := open(t, dir, 10*4096)
		store := func(i byte, n int64) pool.Slot {
			t.Helper()
			s, err := p.Reserve(key(i), n, pool.Writer{})
			if err != nil {
				t.Fatal(err)
			}
			copy(p.View(s), bytes.Repeat([]byte{i}, int(n)))
			p.Commit(s)
			p.Stamp(s)
			if i == hold {
				p.Hold(s)
			}
			return s
		}
		for i, n := range pages {
			store(byte(i), n*4096)
		}
		store(99, 3*4096) // above the new end
		s, _ := p.Find(key(use))
		p.Stamp(s)
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
		p = open(t, dir, to*4096)
		defer p.Close()
		var got []byte
		for _, s := range p.Restored().Resident {
			k := p.KeyOf(s)
			got = append(got, k.Chunk[0])
			if b := p.View(s); b[0] != k.Chunk[0] || b[len(b)-1] != k.Chunk[0] {
				t.Errorf("chunk %d has the bytes of %d", k.Chunk[0], b[0])
			}
		}
		if u := p.Usage(); u.FreeBytes+u.ResidentBytes != u.Bytes || !slices.Equal(got, want) {
			t.Errorf("chunks of %v pages, then %d pages, %d is held: kept are %v, want %v: %+v", pages, to, hold, got, want, u)
		}
	}
	f([]int64{1, 1, 1, 1, 1}, 5, 200, 2, 4, 99, 2)      // 2, in the middle, moves
	f([]int64{1, 1, 1, 1, 1, 1}, 6, 3, 99, 3, 4, 5, 99) // 0, 1 and 2 make the place
	f([]int64{1, 1, 1, 2}, 6, 1, 99, 1, 99)             // 3 is of two pages, and there is no other place for it
	f([]int64{1, 1, 1, 2}, 6, 1, 3, 1, 3)               // 3 was used later
}

// What a worker may still touch above the new end stays as it is, with its memory, until its hold ends; its
// object moves. A writer's place becomes no chunk.
func TestResizeLeavesWhatWorkersTouch(t *testing.T) {
	dir := t.TempDir()
	p := resized(t, dir, 8)
	for i := range byte(7) {
		put(t, p, i)
	}
	read, _ := p.Find(key(6))
	p.Hold(read)
	at := p.Offset(read)
	written, err := p.Reserve(key(7), resizeChunk, pool.Writer{Name: 9})
	if err != nil {
		t.Fatal(err)
	}
	place := p.Offset(written)
	worker, err := shm.Attach(p.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer worker.Close()
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	p = resized(t, dir, 3)
	defer func() { p.Close() }()
	kept(t, "three", p, 4, 5, 6)
	copy(worker.Bytes(place, 4), "late")
	look := func(what string) {
		t.Helper()
		if !bytes.Equal(worker.Bytes(at, resizeChunk), chunkOf(6)) {
			t.Errorf("%s: the reader's bytes changed", what)
		}
		if string(worker.Bytes(place, 4)) != "late" {
			t.Errorf("%s: the writer's place lost its memory", what)
		}
		if n := len(p.Restored().Held); n != 2 {
			t.Errorf("%s: %d slots are held, want 2", what, n)
		}
	}
	look("after the resize")
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	p = resized(t, dir, 3)
	kept(t, "three again", p, 4, 5, 6)
	look("after another start")
	for _, h := range p.Restored().Held {
		p.Unhold(h.Slot)
	}
	if file, err := shm.Stat(p.Path()); err != nil || file.Taken > 3*resizeChunk {
		t.Errorf("after the holds the file takes %d bytes, %v", file.Taken, err)
	}
	if u := p.Usage(); u.CondemnedBytes != 0 || u.FreeBytes+u.ResidentBytes != u.Bytes {
		t.Errorf("after the holds: %+v", u)
	}
	kept(t, "after the holds", p, 4, 5, 6)
}

// A cold start frees the memory of the old pool that no worker may touch, also while engines map it, and
// leaves what one is reading.
func TestColdFreesWhatNoWorkerTouches(t *testing.T) {
	dir := t.TempDir()
	p := resized(t, dir, 8)
	for i := range byte(8) {
		put(t, p, i)
	}
	s, _ := p.Find(key(3))
	p.Hold(s)
	at := p.Offset(s)
	worker, err := shm.Attach(p.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer worker.Close()
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	cold, err := pool.Open(pool.Options{Name: "p", Bytes: 8 * resizeChunk, Dir: dir, ChunkTokens: 128, Cold: true})
	if err != nil {
		t.Fatal(err)
	}
	defer cold.Close()
	if len(cold.Restored().Resident) != 0 || cold.Inode() == worker.Inode() {
		t.Errorf("not a new pool: %+v", cold.Restored())
	}
	if got := worker.Taken(); got != resizeChunk {
		t.Errorf("the old pool takes %d bytes, want one chunk", got)
	}
	if !bytes.Equal(worker.Bytes(at, resizeChunk), chunkOf(3)) {
		t.Error("the reader's bytes changed")
	}
}

// A pool that cannot become so large, or cannot be made anew, is left as it is, and the error says what takes the memory.
func TestPoolStaysWhereThereIsNoRoom(t *testing.T) {
	free, err := shm.Free(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	chunks := free/resizeChunk + 1024
	if chunks*resizeChunk > pool.MaxBytes {
		t.Skip("the file system of tests has no end")
	}
	for _, cold := range []bool{false, true} {
		dir := t.TempDir()
		p := resized(t, dir, 4)
		for i := range byte(4) {
			put(t, p, i)
		}
		if err := errors.Join(p.SetNote([]byte("workers")), p.Close()); err != nil {
			t.Fatal(err)
		}
		_, err := pool.Open(pool.Options{Name: "p", Bytes: chunks * resizeChunk, Dir: dir, ChunkTokens: 256, Cold: cold})
		if !errors.Is(err, pool.ErrNoSpace) || strings.Contains(err.Error(), "\n") {
			t.Fatalf("cold %v: %v", cold, err)
		}
		p = resized(t, dir, 4)
		kept(t, "after the refusal", p, 0, 1, 2, 3)
		if note, err := p.Note(); err != nil || string(note) != "workers" {
			t.Errorf("cold %v: the note is %q, %v", cold, note, err)
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// A pool that was removed while a process maps it is listed with that process and its size.
func TestRemovedPoolsAreListed(t *testing.T) {
	dir := t.TempDir()
	name := "kvasir_removed"
	p, err := pool.Open(pool.Options{Name: name, Bytes: 16 * 4096, Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if got := pool.ListRemoved(dir); len(got) != 0 {
		t.Fatalf("before: %+v", got)
	}
	if err := errors.Join(p.Populate(0, 16*4096, false), os.Remove(filepath.Join(dir, name))); err != nil {
		t.Fatal(err)
	}
	got := pool.ListRemoved(dir)
	if len(got) != 1 || got[0].Name != name || got[0].Bytes != 16*4096 || got[0].Taken == 0 || !slices.Equal(got[0].Mappers, []int{os.Getpid()}) {
		t.Errorf("listed: %+v", got)
	}
}
