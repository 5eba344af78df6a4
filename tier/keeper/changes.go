// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"slices"
	"strings"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier/fs"
)

// Chunk is what an engine loads from the directories by one hash: a file of vLLM, or LMCache's files of one group, one for each rank.
// A chunk that several directories have counts once for its model.
type Chunk struct {
	Model string
	Hash  []byte // 8 to 32 bytes: vLLM's hash of the last block, or LMCache's hash of the chunk, which differs for each salt
	Group int    // -1: file names of LMCache up to 0.4.6 have no group
}

// Change says that a chunk can be loaded, or can no longer.
type Change struct {
	Chunk
	Removed bool
}

// chunk is a Chunk in a compact form.
type chunk struct {
	model uint32 // in changes.names
	root  uint16 // root of a chunk of several files, which must all be in one root; else 0
	need  uint16 // number of files that the chunk needs
	group int32
	bytes uint8 // length of hash
	hash  [32]byte
}

func (c *chunk) compare(d *chunk) int {
	return cmp.Or(cmp.Compare(c.model, d.model), bytes.Compare(c.hash[:], d.hash[:]), cmp.Compare(c.bytes, d.bytes),
		cmp.Compare(c.group, d.group), cmp.Compare(c.need, d.need), cmp.Compare(c.root, d.root))
}

// changes has the last changes of chunks, numbered from 1, for readers that follow them. A reader that has fallen too far behind reads all
// chunks instead. The keeper's lock guards it.
type changes struct {
	ring  []change
	last  uint64 // number of the newest change
	floor uint64 // changes up to this number are not reported, because the keeper did not know all files
	begun bool   // the keeper knows all files
	asked bool   // a reader waits for news
	news  chan struct{}

	files   map[xxh3.Uint128]uint16 // number of existing files of a chunk
	moved   map[chunk]bool          // while collect runs: chunks of which a file came or went; else nil
	seed    uint64
	models  map[string]uint32
	names   []string // of models; it only grows
	unnamed int64    // files whose name is of no chunk, or whose model is beyond maxModels
}

type change struct {
	chunk
	removed bool
}

// maxModels bounds the models whose chunks are reported. Files of further models are only counted, as unnamed.
const maxModels = 4096

func newChanges(size int, seed uint64) *changes {
	return &changes{ring: make([]change, size), news: make(chan struct{}), files: map[xxh3.Uint128]uint16{}, seed: seed, models: map[string]uint32{}}
}

// set records that a file came (`there`) or went. If its chunk thereby became whole, or no longer is, set adds a change.
func (c *changes) set(d *directory, id id, name string, there bool) {
	x, ok := c.chunkOf(d, id, name)
	if !ok {
		if there {
			c.unnamed++
		}
		return
	}
	if c.moved != nil {
		c.moved[x] = there
	}
	key := c.key(&x)
	had := c.files[key]
	switch {
	case there:
		c.files[key] = had + 1
	case had <= 1:
		delete(c.files, key)
	default:
		c.files[key] = had - 1
	}
	if there && had+1 == x.need || !there && had == x.need {
		c.record(change{x, !there})
	}
}

// chunkOf returns the chunk of a file. It reports false if the file's name is of no chunk.
func (c *changes) chunkOf(d *directory, id id, name string) (x chunk, ok bool) {
	model := d.model
	x = chunk{need: 1, group: int32(id.group), bytes: id.bytes, hash: id.hash}
	if d.layout == lmcacheLayout {
		if model, x, ok = lmcacheChunk(name); !ok {
			return x, false
		}
		if x.need > 1 {
			x.root = d.root.number
		}
	}
	x.model, ok = c.models[model]
	if !ok {
		if len(c.names) >= maxModels {
			return x, false
		}
		x.model = uint32(len(c.names))
		c.names = append(c.names, model)
		c.models[model] = x.model
	}
	return x, true
}

// lmcacheChunk reads the name of a file of LMCache.
func lmcacheChunk(name string) (model string, x chunk, ok bool) {
	group := true
	if parts := strings.Split(name, "@"); len(parts) == 3 {
		name, group = parts[0]+"@"+parts[1]+"@0@"+parts[2], false
	}
	n, k, ok := fs.ParseFileName(name)
	if !ok || k.Group > 1<<30 {
		return "", chunk{}, false
	}
	x = chunk{need: max(1, uint16(k.Rank>>24)), group: -1, bytes: uint8(len(k.Chunk)), hash: kv.SaltedHash(n.Salt, k.Chunk)}
	if group {
		x.group = int32(k.Group)
	}
	return n.Model, x, true
}

func (c *changes) key(x *chunk) xxh3.Uint128 {
	b := make([]byte, 0, 64)
	b = binary.NativeEndian.AppendUint32(b, x.model)
	b = binary.NativeEndian.AppendUint16(b, x.root)
	b = binary.NativeEndian.AppendUint16(b, x.need)
	b = binary.NativeEndian.AppendUint32(b, uint32(x.group))
	return xxh3.Hash128Seed(append(b, x.hash[:x.bytes]...), c.seed)
}

func (c *changes) record(x change) {
	if !c.begun {
		return
	}
	c.last++
	c.ring[c.last%uint64(len(c.ring))] = x
	c.wake()
}

// begin starts the reporting of changes. Readers must then read all chunks.
func (c *changes) begin() {
	c.begun = true
	c.last++
	c.floor = c.last
	c.wake()
}

func (c *changes) wake() {
	if c.asked {
		close(c.news)
		c.news, c.asked = make(chan struct{}), false
	}
}

// lost reports whether some changes after the number `after` were dropped or never recorded.
func (c *changes) lost(after uint64) bool {
	return after > c.last || after < c.floor || c.last-after > uint64(len(c.ring))
}

func (c *chunk) public(names []string) Chunk {
	return Chunk{Model: names[c.model], Hash: bytes.Clone(c.hash[:c.bytes]), Group: int(c.group)}
}

// Changed returns a channel that is closed at the next change. Changed and the methods below may only be called for a keeper with
// Options.Changes.
func (k *Keeper) Changed() <-chan struct{} {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.changes.asked = true
	return k.changes.news
}

// LastChange returns the number of the newest change.
func (k *Keeper) LastChange() uint64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.changes.last
}

// Changes returns the changes after the number `after`, at most limit of them, and the number of the last one. lost means that some were
// dropped, or that the keeper did not know all files at that number; the caller must then read Chunks.
func (k *Keeper) Changes(after uint64, limit int) (out []Change, next uint64, lost bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	c := k.changes
	if c.lost(after) {
		return nil, after, true
	}
	for ; after < c.last && len(out) < limit; after++ {
		x := &c.ring[(after+1)%uint64(len(c.ring))]
		out = append(out, Change{x.public(c.names), x.removed})
	}
	return out, after, false
}

// Chunks are the chunks of one moment, sorted by model. They take 48 bytes each, and never change.
type Chunks struct {
	list  []chunk
	names []string
}

// Len is the number of chunks.
func (c *Chunks) Len() int { return len(c.list) }

// Model returns the model of chunk i.
func (c *Chunks) Model(i int) string { return c.names[c.list[i].model] }

// At returns chunk i.
func (c *Chunks) At(i int) Chunk { return c.list[i].public(c.names) }

// Chunks returns all chunks, and the number of the newest change that they include. It returns none before the keeper knows all files.
func (k *Keeper) Chunks() (all *Chunks, last uint64) { return k.collect(collectFiles) }

// collectFiles is how many files are read in one hold of the lock.
const collectFiles = 4096

// collect reads all files, `step` of them in one hold of the lock. A chunk of which a file came or went meanwhile gets its state at the end.
func (k *Keeper) collect(step int) (all *Chunks, last uint64) {
	k.collecting.Lock()
	defer k.collecting.Unlock()
	all = &Chunks{}
	for n := k.beginCollect(); n > 0; {
		all.list, n = k.collectSome(all.list, n, step)
	}
	var moved map[chunk]bool
	moved, all.names, last = k.endCollect()
	all.correct(moved)
	return all, last
}

// beginCollect returns the number of the first file, 0 if changes are not reported yet.
func (k *Keeper) beginCollect() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.changes.begun {
		return 0
	}
	k.changes.moved = map[chunk]bool{}
	return 1
}

// collectSome appends to dst the chunks of the next `files` files, from file number `from` on. It returns the number to continue from; 0
// after the last file.
func (k *Keeper) collectSome(dst []chunk, from, files int) (_ []chunk, next int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	end := min(from+files, int(k.books.used))
	for n := uint32(from); int(n) < end; n++ {
		f := k.books.file(n)
		if f.id.bytes == 0 {
			continue // the file was removed
		}
		if x, ok := k.changes.chunkOf(k.books.dirs[f.dir], f.id, k.books.names[n]); ok {
			dst = append(dst, x)
		}
	}
	if end == int(k.books.used) {
		end = 0
	}
	return dst, end
}

// endCollect returns, for each chunk of which a file came or went since beginCollect, whether the chunk is whole now. last is 0 if
// beginCollect returned 0, even if the keeper knows all files by now; the reader then sees change 1 next.
func (k *Keeper) endCollect() (moved map[chunk]bool, names []string, last uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	c := k.changes
	if c.moved == nil {
		return nil, c.names, 0
	}
	moved, c.moved = c.moved, nil
	for x := range moved {
		moved[x] = c.files[c.key(&x)] >= x.need
	}
	return moved, c.names, c.last
}

// correct sets the chunks in `there` to present or absent, sorts the list, and reduces it to one entry for each chunk with all of its
// files.
func (c *Chunks) correct(there map[chunk]bool) {
	c.list = slices.DeleteFunc(c.list, func(x chunk) bool { _, changed := there[x]; return changed })
	for x, is := range there {
		for range x.need {
			if is {
				c.list = append(c.list, x)
			}
		}
	}
	slices.SortFunc(c.list, func(x, y chunk) int { return x.compare(&y) })
	whole := c.list[:0]
	for i, n := 0, 0; i < len(c.list); i += n {
		for n = 1; i+n < len(c.list) && c.list[i+n] == c.list[i]; {
			n++
		}
		if n >= int(c.list[i].need) {
			whole = append(whole, c.list[i])
		}
	}
	c.list = whole
}
