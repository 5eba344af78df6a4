// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
)

// follower is a reader of changes. It fails if a change tells it what it already knows.
type follower struct {
	t     *testing.T
	k     *Keeper
	after uint64
	has   map[string]bool
	anew  int // times that it looked at all chunks
}

func follow(t *testing.T, k *Keeper) *follower {
	f := &follower{t: t, k: k}
	f.begin(k.Chunks())
	return f
}

func nameOf(c Chunk) string { return fmt.Sprintf("%s %x %d", c.Model, c.Hash, c.Group) }

func (f *follower) begin(all *Chunks, last uint64) {
	f.t.Helper()
	f.has, f.after = map[string]bool{}, last
	f.anew++
	models := map[string]bool{}
	for i := range all.Len() {
		if m := all.Model(i); (i == 0 || m != all.Model(i-1)) && models[m] {
			f.t.Errorf("chunks of %s do not stand together", m)
		}
		models[all.Model(i)] = true
		if name := nameOf(all.At(i)); f.has[name] {
			f.t.Errorf("%s is there twice", name)
		} else {
			f.has[name] = true
		}
	}
}

// read takes in all changes.
func (f *follower) read() {
	f.t.Helper()
	for {
		news, next, lost := f.k.Changes(f.after, 16)
		if lost {
			f.begin(f.k.Chunks())
			continue
		}
		if next == f.after {
			return
		}
		for _, c := range news {
			name := nameOf(c.Chunk)
			if f.has[name] == !c.Removed {
				f.t.Errorf("%s: removed %v, which it was before", name, c.Removed)
			}
			if f.has[name] = true; c.Removed {
				delete(f.has, name)
			}
		}
		f.after = next
	}
}

// chunkFile is the file of a chunk in the directory of a rank.
func (x *tier) chunkFile(rank, i int) string {
	return strings.Replace(x.path(i), base+"_r0", fmt.Sprintf("%s_r%d", base, rank), 1)
}

// A reader that follows the changes knows which chunks the directories have, each one once however many ranks and roots have it, while
// files come, are unlinked for room and by others, and also when it was too slow.
func TestChangesTellWhatIsThere(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	for round, w := range watches(t) {
		rnd := rand.New(rand.NewPCG(seed, uint64(round)))
		x, y := newTier(t, 1000), newTier(t, 1000)
		k := open(t, Options{Roots: []string{x.root, y.root}, Limit: 150_000, Watch: w, Changes: 8, Log: slog.New(slog.NewTextHandler(t.Output(), nil))})
		f := follow(t, k)
		truth := func() map[string]bool {
			out := map[string]bool{}
			for _, root := range []string{x.root, y.root} {
				paths, _ := filepath.Glob(filepath.Join(root, "*", "*", "*", "*.bin"))
				for _, p := range paths {
					out[fmt.Sprintf("org/model %s 0", strings.TrimSuffix(filepath.Base(p), ".bin"))] = true
				}
			}
			return out
		}
		for step := range 200 {
			on, rank, i := x, rnd.IntN(2), rnd.IntN(60)
			if rnd.IntN(2) == 0 {
				on = y
			}
			path := on.chunkFile(rank, i)
			if rnd.IntN(4) == 0 {
				_ = os.Remove(path)
			} else if _, err := os.Stat(path); err != nil {
				on.write(path)
			}
			if step%50 < 20 { // else it falls behind
				f.read()
			}
		}
		testkit.Eventually(t, fmt.Sprintf("%s: the reader knows what is there", w), func() bool { f.read(); return maps.Equal(f.has, truth()) })
		if len(f.has) == 0 || f.anew < 2 {
			t.Errorf("%s: %d chunks, %d beginnings", w, len(f.has), f.anew)
		}
		closed(t, k)
	}
}

// A keeper tells no changes while it first reads its directories, and then all at once.
func TestChangesBeginOnceAllFilesAreKnown(t *testing.T) {
	k := &Keeper{books: newBooks(1), changes: newChanges(8, 1)}
	k.books.changes = k.changes
	k.books.dirs = append(k.books.dirs, &directory{root: &rootDir{}, model: "m"})
	f := follow(t, k)
	woken := k.Changed()
	k.books.add(0, id{hash: [32]byte{1}, bytes: 32}, "", 1, 1)
	f.read()
	select {
	case <-woken:
		t.Error("the reader is woken")
	default:
	}
	if len(f.has) > 0 {
		t.Errorf("%v", f.has)
	}
	k.changes.begin()
	<-woken
	f.read()
	if len(f.has) != 1 || f.anew != 2 {
		t.Errorf("%v, %d beginnings", f.has, f.anew)
	}
}

// A chunk of LMCache counts as there while the files of all ranks of a group are there. Tenants share no chunk. File names of releases
// without groups count, too.
func TestChunksOfLMCacheNeedAllRanks(t *testing.T) {
	k := &Keeper{books: newBooks(1), changes: newChanges(64, 1)}
	k.books.changes = k.changes
	for i := range 2 {
		k.books.dirs = append(k.books.dirs, &directory{root: &rootDir{number: uint16(i)}, layout: lmcacheLayout})
	}
	k.changes.begin()
	f := follow(t, k)
	hash := kv.Hash(sha256.Sum256([]byte("chunk")))
	numbers := map[string]uint32{}
	add := func(dir uint32, name string) {
		id, ok := lmcacheID(name)
		if !ok {
			t.Fatalf("%s is no name", name)
		}
		numbers[fmt.Sprint(dir, name)] = k.books.add(dir, id, name, 1, 1)
		f.read()
	}
	remove := func(dir uint32, name string) {
		k.books.remove(numbers[fmt.Sprint(dir, name)])
		f.read()
	}
	want := func(names ...string) {
		t.Helper()
		all := map[string]bool{}
		for _, n := range names {
			all[n] = true
		}
		if !maps.Equal(f.has, all) {
			t.Errorf("%v, want %v", f.has, all)
		}
		again := follow(t, k)
		if !maps.Equal(again.has, all) {
			t.Errorf("all chunks are %v, want %v", again.has, all)
		}
	}
	file := func(rank, group int, salt string) string {
		r, _ := kv.NewRank(2, rank)
		return fmt.Sprintf("org-SEP-m@0x%08x@%x@%s%s.data", uint32(r), group, hash, salt)
	}
	plain := fmt.Sprintf("org/m %s 0", hash)
	add(0, file(0, 0, ""))
	add(1, file(1, 0, "")) // another engine's directory
	add(0, file(1, 1, ""))
	want()
	add(0, file(1, 0, ""))
	want(plain)
	remove(1, file(1, 0, ""))
	want(plain)
	for rank := range 2 {
		add(0, file(rank, 0, "@team"))
	}
	salted := kv.SaltedHash("team", hash)
	want(plain, fmt.Sprintf("org/m %s 0", salted))
	remove(0, file(0, 0, ""))
	want(fmt.Sprintf("org/m %s 0", salted))
	old := fmt.Sprintf("old@0x01000100@%s.data", hash)
	add(0, old)
	want(fmt.Sprintf("org/m %s 0", salted), fmt.Sprintf("old %s -1", hash))
	before := k.changes.unnamed
	add(0, "old@0x01000100@"+hex.EncodeToString(hash[:16])+".data") // half a hash
	if want(fmt.Sprintf("org/m %s 0", salted), fmt.Sprintf("old %s -1", hash)); k.changes.unnamed != before+1 {
		t.Errorf("%d files are not told", k.changes.unnamed-before)
	}
}

// The first look may end while a reader collects all chunks. Changes then reports the missing chunks as lost, and the reader must ask for
// all again.
func TestChunksWhileTheFirstLookEnds(t *testing.T) {
	k := &Keeper{books: newBooks(1), changes: newChanges(4, 1)}
	k.books.changes = k.changes
	k.books.dirs = append(k.books.dirs, &directory{root: &rootDir{}, model: "m"})
	k.books.add(0, id{hash: [32]byte{1}, bytes: 32}, "", 1, 1)
	if n := k.beginCollect(); n != 0 {
		t.Fatalf("file %d is the first", n)
	}
	k.changes.begin()
	_, _, last := k.endCollect()
	if _, _, lost := k.Changes(last, 1); !lost {
		t.Errorf("a reader without chunks goes on from number %d", last)
	}
	if all, last := k.Chunks(); all.Len() != 1 || last != 1 {
		t.Errorf("%d chunks, number %d", all.Len(), last)
	}
}

// Chunks returns the chunks of one moment, although files come and go while it reads them. With the changes after that moment a reader
// knows all.
func TestChunksAreOfOneMoment(t *testing.T) {
	k := &Keeper{books: newBooks(1), changes: newChanges(1<<17, 1)}
	k.books.changes = k.changes
	for range 2 {
		k.books.dirs = append(k.books.dirs, &directory{root: &rootDir{}, model: "m"})
	}
	k.changes.begin()
	there := map[[2]byte]uint32{} // under k.mu
	change := func(rnd *rand.Rand) {
		k.mu.Lock()
		defer k.mu.Unlock()
		key := [2]byte{byte(rnd.IntN(2)), byte(rnd.IntN(200))}
		if n := there[key]; n != 0 {
			k.books.remove(n)
			delete(there, key)
			return
		}
		there[key] = k.books.add(uint32(key[0]), id{hash: [32]byte{key[1]}, bytes: 32}, "", 1, 1)
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		change(rnd)
	}
	stop := make(chan struct{})
	// On a busy machine there could be more changes than are kept while this test waits for its turn.
	const perReader = 2000
	var allowed atomic.Int64
	var writer sync.WaitGroup
	writer.Go(func() {
		for made := int64(0); ; {
			select {
			case <-stop:
				return
			default:
			}
			if made < allowed.Load() {
				change(rnd)
				made++
			} else {
				runtime.Gosched()
			}
		}
	})
	var followers []*follower
	for len(followers) < 50 {
		allowed.Add(perReader)
		f := &follower{t: t, k: k}
		f.begin(k.collect(50))
		f.read()
		followers = append(followers, f)
	}
	close(stop)
	writer.Wait()
	want := map[string]bool{}
	for key := range there {
		want[nameOf(Chunk{"m", append([]byte{key[1]}, make([]byte, 31)...), 0})] = true
	}
	once := 0
	for _, f := range followers {
		if f.read(); !maps.Equal(f.has, want) {
			t.Fatalf("a reader has %d chunks of %d", len(f.has), len(want))
		}
		if f.anew == 1 {
			once++
		}
	}
	if once == 0 {
		t.Error("each reader had to begin again")
	}
}

// The keeper tells no changes of models beyond the limit, and counts them.
func TestChangesOfTooManyModels(t *testing.T) {
	c := newChanges(8, 1)
	c.begin()
	for i := range maxModels + 3 {
		c.set(&directory{root: &rootDir{}, model: fmt.Sprint("m", i)}, id{hash: [32]byte{1}, bytes: 32}, "", true)
	}
	if c.unnamed != 3 || len(c.files) != maxModels {
		t.Errorf("%d files are not told, %d are", c.unnamed, len(c.files))
	}
}

func FuzzChunkOfName(f *testing.F) {
	f.Add("org-SEP-m@0x02000200@0@" + strings.Repeat("ab", 32) + ".data")
	f.Add("m@0x01000100@" + strings.Repeat("ab", 32) + ".data")
	f.Add("m@0x01000100@1@" + strings.Repeat("ab", 32) + "@salt.data")
	f.Fuzz(func(t *testing.T, name string) {
		model, x, ok := lmcacheChunk(name)
		if ok && (model == "" || x.need < 1 || x.need > 255 || x.bytes != 32 || x.group < -1) {
			t.Errorf("%q: %q %+v", name, model, x)
		}
		c := newChanges(4, 1)
		c.begin()
		d := &directory{root: &rootDir{}, layout: lmcacheLayout}
		c.set(d, id{}, name, true)
		c.set(d, id{}, name, false)
		if len(c.files) != 0 {
			t.Errorf("%q leaves %v", name, c.files)
		}
	})
}
