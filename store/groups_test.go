// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/coordinator"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
)

// hybrid is a model with groups and what was done with it, naively.
type hybrid struct {
	*bench
	r      *rapid.T
	groups *object.Groups
	tails  []int           // chunks needed, by group; 0 is none of them
	bytes  []int64         // by group
	world  int             //
	kept   map[string]bool // committed objects
	copies []*hybridCopy
	n      int
}

type hybridCopy struct {
	copy   *store.Transfer
	name   hold.Transfer
	hashes []kv.Hash
	dead   bool
	clear  bool // a forced clear dropped what it had staged
}

const whole = 1 << 30

func newHybrid(r *rapid.T, dir string, pages int) *hybrid {
	h := &hybrid{bench: newBench(r, dir, pages, store.Options{}), r: r, kept: map[string]bool{}, world: rapid.IntRange(1, 2).Draw(r, "world")}
	const chunk = 4
	var list []object.Group
	for i := range rapid.IntRange(1, 4).Draw(r, "groups") {
		g := object.Group{Bytes: int64(1+i) * 1000, ChunkGroup: coordinator.ChunkGroup{Window: -1}}
		tail := whole
		switch rapid.IntRange(0, 4).Draw(r, "kind") {
		case 0, 1:
			g.Window = rapid.IntRange(1, 13).Draw(r, "window")
			tail = (g.Window + chunk - 1) / chunk
		case 2:
			g.Recurrent, tail = true, 1
		}
		list, h.tails, h.bytes = append(list, g), append(h.tails, tail), append(h.bytes, g.Bytes)
	}
	var err error
	if h.groups, err = object.NewGroups(chunk, list); err != nil {
		r.Fatalf("%v", err)
	}
	return h
}

func (h *hybrid) shard(i int) object.Shard {
	return object.Shard{Namespace: kv.Namespace{2}, World: h.world, Index: i, Groups: h.groups}
}

func objectName(hash kv.Hash, shard, group int) string { return fmt.Sprint(hash, shard, group) }

func objectBytes(hash kv.Hash, shard, group int, n int64) []byte {
	one := binary.LittleEndian.AppendUint64(slices.Clone(hash[:]), uint64(shard)<<32|uint64(group))
	return bytes.Repeat(one, int(n)/len(one)+1)[:n]
}

func (h *hybrid) request() []byte {
	h.n++
	return fmt.Append(nil, "h", h.n)
}

func (h *hybrid) prompt() []kv.Hash {
	return prompt(rapid.IntRange(0, 5).Draw(h.r, "prompt"), rapid.IntRange(1, 8).Draw(h.r, "chunks"))
}

// stage begins a store of some chunks, without some groups of some of them.
func (h *hybrid) stage() {
	hashes := h.prompt()
	shard := rapid.IntRange(0, h.world-1).Draw(h.r, "shard")
	name := hold.Transfer{
		Instance: int64(rapid.IntRange(1, 2).Draw(h.r, "worker")), Shard: h.shard(shard),
		From: rapid.IntRange(0, len(hashes)-1).Draw(h.r, "from"), To: len(hashes), Last: hashes[len(hashes)-1],
	}
	without := rapid.IntRange(0, 9).Draw(h.r, "without")
	skip := func(g, c int) bool { return without < 3 && h.tails[g] != whole && (c+without)%3 == 0 }
	c := &store.Transfer{Own: true, Skip: skip}
	got, err := h.store.BeginStore(name, h.request(), hashes, c)
	if err != nil {
		h.r.Fatalf("%v", err)
	}
	chunks := map[int]bool{}
	if len(c.Parts) > 0 {
		for _, p := range c.Parts {
			if chunks[p.Chunk] = true; skip(p.Group, p.Chunk) {
				h.r.Fatalf("chunk %d of group %d is staged", p.Chunk, p.Group)
			}
			if int64(len(p.Bytes)) != h.bytes[p.Group] {
				h.r.Fatalf("group %d: %d bytes", p.Group, len(p.Bytes))
			}
			copy(p.Bytes, objectBytes(hashes[name.From+p.Chunk], shard, p.Group, int64(len(p.Bytes))))
		}
		h.copies = append(h.copies, &hybridCopy{copy: c, name: name, hashes: hashes})
	}
	if n := len(chunks) + got.Cached + got.Staged + got.NoRoom + got.Skipped; n != name.To-name.From {
		h.r.Fatalf("%d of %d chunks accounted for: %+v", n, name.To-name.From, got)
	}
}

func (h *hybrid) done() {
	if len(h.copies) == 0 {
		return
	}
	i := rapid.IntRange(0, len(h.copies)-1).Draw(h.r, "copy")
	c := h.copies[i]
	h.copies = slices.Delete(h.copies, i, i+1)
	h.check(c)
	ok := rapid.IntRange(0, 4).Draw(h.r, "ok") > 0
	got := c.copy.Done(c.hashes, ok)
	if !got.Found || got.Late != c.dead {
		h.r.Fatalf("%+v, dead %v", got, c.dead)
	}
	if c.name.Load {
		return
	}
	if want := len(c.copy.Parts); ok && !c.dead && !c.clear && got.Chunks != want || (!ok || c.dead || c.clear) && got.Chunks != 0 {
		h.r.Fatalf("%d objects of %d became visible (ok %v, dead %v)", got.Chunks, want, ok, c.dead)
	}
	if got.Chunks > 0 {
		for _, p := range c.copy.Parts {
			h.kept[objectName(c.hashes[c.name.From+p.Chunk], c.name.Shard.Index, p.Group)] = true
		}
	}
}

// check compares what a Copy holds with what it must: nothing may have written
// there since.
func (h *hybrid) check(c *hybridCopy) {
	for _, p := range c.copy.Parts {
		if !bytes.Equal(p.Bytes, objectBytes(c.hashes[c.name.From+p.Chunk], c.name.Shard.Index, p.Group, int64(len(p.Bytes)))) {
			h.r.Fatalf("wrong bytes: chunk %d of group %d (load %v)", p.Chunk, p.Group, c.name.Load)
		}
	}
}

// hit counts the longest hit out.
func (h *hybrid) hit(hashes []kv.Hash) int {
	for n := len(hashes); n > 0; n-- {
		ok := true
		for g, tail := range h.tails {
			for c := max(0, n-tail); c < n; c++ {
				for shard := range h.world {
					ok = ok && h.kept[objectName(hashes[c], shard, g)]
				}
			}
		}
		if ok {
			return n
		}
	}
	return 0
}

// load looks up, compares the hit and fetches it. exact: nothing was evicted.
func (h *hybrid) load(exact bool) {
	hashes, request := h.prompt(), h.request()
	got := h.store.Lookup(request, h.shard(0), store.Hashed(hashes), 1)
	if want := h.hit(hashes); got.Hit > want || exact && got.Hit != want {
		h.r.Fatalf("hit %d, want %d (tails %v)", got.Hit, want, h.tails)
	}
	if (got.Hit == len(hashes)) != (got.Why == miss.None) {
		h.r.Fatalf("hit %d of %d: %v", got.Hit, len(hashes), got.Why)
	}
	if got.Hit == 0 {
		return
	}
	from := 0
	if rapid.Bool().Draw(h.r, "own prefix") {
		from = rapid.IntRange(0, got.Hit-1).Draw(h.r, "from")
		h.store.FreePins(request, lease.Owner{}, 0, from, 1)
	}
	shard := rapid.IntRange(0, h.world-1).Draw(h.r, "shard")
	name := hold.Transfer{Instance: 2, Shard: h.shard(shard), From: from, To: got.Hit, Last: hashes[got.Hit-1], Load: true}
	c := &store.Transfer{Own: true}
	why := h.store.BeginLoad(request, name, hashes, c)
	if why != miss.None {
		h.r.Fatalf("a hit cannot be loaded: %v", why)
	}
	parts := 0
	for _, tail := range h.tails {
		parts += min(tail, got.Hit-from)
	}
	if len(c.Parts) != parts {
		h.r.Fatalf("%d objects, want %d of chunks [%d, %d), tails %v", len(c.Parts), parts, from, got.Hit, h.tails)
	}
	h.copies = append(h.copies, &hybridCopy{copy: c, name: name, hashes: hashes})
	if why := h.store.BeginLoad(request, name, hashes, &store.Transfer{Own: true}); why != miss.NotPinned {
		h.r.Fatalf("loaded twice: %v", why)
	}
	if rapid.Bool().Draw(h.r, "end") {
		h.store.EndSession(request, lease.Owner{})
	}
}

func (h *hybrid) finish() {
	defer h.stop() // also after a failure: the same process plays it again
	for len(h.copies) > 0 {
		c := h.copies[0]
		h.copies = h.copies[1:]
		h.check(c)
		c.copy.Done(c.hashes, false)
	}
	if st := h.store.Stats(); st.Transfers != 0 || st.StagedBytes != 0 || st.CondemnedBytes != 0 {
		h.r.Fatalf("left over: %+v", st)
	}
}

// Hits of hybrid models are the longest that every group can serve, and every
// load gets the right bytes of the right objects.
func TestGroupsExact(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(r *rapid.T) {
		h := newHybrid(r, dir, 4000)
		defer h.finish()
		r.Repeat(map[string]func(*rapid.T){
			"":      func(*rapid.T) {},
			"stage": func(*rapid.T) { h.stage() }, "done": func(*rapid.T) { h.done() }, "load": func(*rapid.T) { h.load(true) },
		})
	})
}

// The same in a pool that is always too small, with workers that vanish and
// clears.
func TestGroupsEvicting(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(r *rapid.T) {
		h := newHybrid(r, dir, 24)
		defer h.finish()
		r.Repeat(map[string]func(*rapid.T){
			"":      func(*rapid.T) {},
			"stage": func(*rapid.T) { h.stage() }, "done": func(*rapid.T) { h.done() }, "load": func(*rapid.T) { h.load(false) },
			"detach": func(r *rapid.T) {
				w := int64(rapid.IntRange(1, 2).Draw(r, "worker"))
				h.store.Detach(w)
				for _, c := range h.copies {
					c.dead = c.dead || c.name.Instance == w
				}
			},
			"clear": func(r *rapid.T) {
				force := rapid.Bool().Draw(r, "force")
				h.store.Clear(force)
				for _, c := range h.copies {
					c.clear = c.clear || force
				}
			},
			"expire": func(*rapid.T) { h.store.Expire() },
		})
	})
}

// In a window group the chunks that no hit can load go first, and a chunk that
// does not fit in all groups is not kept in some.
func TestDeadWindowChunks(t *testing.T) {
	b := newBench(t, t.TempDir(), 12, store.Options{})
	defer b.stop()
	groups, err := object.NewGroups(2, []object.Group{
		{ChunkGroup: coordinator.ChunkGroup{Window: -1}, Bytes: 4096}, {ChunkGroup: coordinator.ChunkGroup{Window: 2}, Bytes: 4096},
	})
	if err != nil {
		t.Fatal(err)
	}
	sh := object.Shard{Namespace: kv.Namespace{3}, World: 1, Groups: groups}
	put := func(h []kv.Hash, from int, skip func(g, c int) bool) store.Reserved {
		t.Helper()
		c := &store.Transfer{Own: true, Skip: skip}
		got, err := b.store.BeginStore(hold.Transfer{Instance: 1, Shard: sh, From: from, To: len(h), Last: h[len(h)-1]}, []byte("s"), h, c)
		if err != nil {
			t.Fatal(err)
		}
		if len(c.Parts) > 0 {
			c.Done(h, true)
		}
		return got
	}
	long, other := prompt(1, 6), prompt(2, 4)
	put(long[:5], 0, func(g, c int) bool { return g == 0 && c > 1 }) // full: 2 chunks, window: 5
	put(other[:2], 0, nil)                                           // 4 more objects: one page is free
	before := b.store.Stats()
	if before.FreeBytes != 4096 {
		t.Fatalf("free %d", before.FreeBytes)
	}
	put(other, 2, nil) // evicts what is the oldest: nothing of its own is dead
	if got := b.store.Stats(); got.DeadChunks != 0 {
		t.Errorf("%d dead chunks", got.DeadChunks)
	}
	b.store.Clear(true)
	put(long[:5], 0, func(g, c int) bool { return g == 0 && c > 1 })
	put(other[:2], 0, nil)
	// Window chunks 2 to 4 serve no hit, the full group has only 0 and 1.
	put(long, 5, nil)
	got := b.store.Stats()
	if got.DeadChunks != 3 {
		t.Errorf("%d dead chunks, want 3", got.DeadChunks)
	}
	if hit := b.store.Lookup([]byte("l"), sh, store.Hashed(long), 1); hit.Hit != 2 {
		t.Errorf("hit %d, want 2", hit.Hit)
	}
	if hit := b.store.Lookup([]byte("o"), sh, store.Hashed(other[:2]), 1); hit.Hit != 2 {
		t.Errorf("the other prompt lost chunks: hit %d, want 2", hit.Hit)
	}
}
