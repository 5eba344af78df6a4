// SPDX-License-Identifier: Apache-2.0

package events

import (
	"slices"
	"sync"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
)

// Text has the tokens of a prompt: msgpack integers, one after the other. Chunk i ends before Ends[i] and begins where the chunk before it
// ends. Head and a chunk together are a msgpack array.
type Text struct {
	Head, Tokens []byte
	Ends         []int
}

// size returns the bytes of chunk i, without the Head.
func (x *Text) size(i int) int { return x.Ends[i] - x.begin(i) }

func (x *Text) begin(i int) int {
	if i == 0 {
		return 0
	}
	return x.Ends[i-1]
}

// queue has the announcements that are not applied yet. Requests do not wait for the Book: announcements are copied into memory that is
// used again and again.
type queue struct {
	arrived chan struct{} // has a value while there are announcements; capacity 1

	mu     sync.Mutex // a leaf
	news   news
	spare  news   // empty
	missed uint64 // number of chunks for which there was no room
}

// news has announcements, and the chunks of all of them.
type news struct {
	list   []announcement
	chunks []announced
	bytes  int // memory that the announcements count for, queueBytes at most

	pages [][]byte // memory of the announcements' texts; pages from number used on are empty
	used  int
}

// announcement has the model, salt and shard of the next `chunks` chunks of news: those after the chunks of the announcement before.
type announcement struct {
	model, salt []byte
	group       int // see Chunk
	shard       object.Shard
	chunks      int
}

type announced struct {
	hash kv.Hash
	tokens
}

const (
	queueBytes  = 16 << 20  // bytes in the queue; a chunk for which there is no room is announced when a lookup finds it
	pageBytes   = 128 << 10 // bytes of text; a longer text has its own page, which is freed later
	keptPages   = 16        // pages that reset keeps for reuse; it frees the others
	keptEntries = 1 << 14   // announcements, and chunks, for which reset keeps the memory
)

// copy returns a copy of texts, one after the other, which is valid until reset.
func (x *news) copy(texts ...[]byte) []byte {
	n := 0
	for _, t := range texts {
		n += len(t)
	}
	if x.used == len(x.pages) || cap(x.pages[x.used])-len(x.pages[x.used]) < n {
		if x.used < len(x.pages) && len(x.pages[x.used]) > 0 {
			x.used++
		}
		if x.used == len(x.pages) {
			x.pages = append(x.pages, nil)
		}
		if cap(x.pages[x.used]) < n {
			x.pages[x.used] = make([]byte, 0, max(n, pageBytes))
		}
	}
	page := &x.pages[x.used]
	from := len(*page)
	for _, t := range texts {
		*page = append(*page, t...)
	}
	return (*page)[from:len(*page):len(*page)]
}

// reset empties x. It frees memory beyond keptEntries and keptPages.
func (x *news) reset() {
	clear(x.list)
	x.list, x.chunks = x.list[:0], x.chunks[:0]
	if cap(x.list) > keptEntries || cap(x.chunks) > keptEntries {
		x.list, x.chunks = nil, nil
	}
	x.pages = slices.DeleteFunc(x.pages, func(p []byte) bool { return cap(p) > pageBytes })
	if len(x.pages) > keptPages {
		clear(x.pages[keptPages:])
		x.pages = x.pages[:keptPages]
	}
	for i, p := range x.pages {
		x.pages[i] = p[:0]
	}
	x.bytes, x.used = 0, 0
}

// add queues `a` with those chunks of hashes for which wanted reports true. With a nil text their tokens are not known. If queueBytes do not
// suffice it queues nothing, and counts these chunks as missed. It copies all its arguments.
func (q *queue) add(a announcement, hashes []kv.Hash, wanted func(i int) bool, text *Text) {
	model, salt := a.model, a.salt
	chunks, bytes := 0, len(model)+len(salt)+256
	for i := range hashes {
		if wanted(i) {
			chunks++
			bytes += 128
			if text != nil {
				bytes += len(text.Head) + text.size(i)
			}
		}
	}
	q.mu.Lock()
	x := &q.news
	if x.bytes+bytes > queueBytes {
		q.missed += uint64(chunks)
		q.mu.Unlock()
		return
	}
	x.bytes += bytes
	a.model, a.salt, a.chunks = x.copy(model), x.copy(salt), chunks
	x.list = append(x.list, a)
	x.chunks = slices.Grow(x.chunks, chunks)
	for i, h := range hashes {
		if !wanted(i) {
			continue
		}
		t := tokens{text: noTokens}
		if text != nil {
			t.index, t.text = i, x.copy(text.Head, text.Tokens[text.begin(i):text.Ends[i]])
		}
		if text != nil && i > 0 {
			t.parent = hashes[i-1]
		}
		x.chunks = append(x.chunks, announced{h, t})
	}
	q.mu.Unlock()
	select {
	case q.arrived <- struct{}{}:
	default:
	}
}

// take removes and returns the queued announcements. The caller must give their memory back with giveBack.
func (q *queue) take() news {
	q.mu.Lock()
	defer q.mu.Unlock()
	x := q.news
	q.news, q.spare = q.spare, news{}
	return x
}

func (q *queue) giveBack(x *news) {
	x.reset()
	q.mu.Lock()
	defer q.mu.Unlock()
	q.spare = *x
}

// lost returns the number of chunks for which the queue had no room.
func (q *queue) lost() uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.missed
}

// Announce describes the first chunks of a prompt: their hashes, model, salt and tokens, and the shards that a lookup searches together.
// The chunks from number `from` on were just stored. The Book applies the announcement later, and only to chunks that are in the pool or a
// tier. It copies its arguments.
func (b *Book) Announce(model, salt []byte, sh *object.Shard, hashes []kv.Hash, from int, text *Text) {
	var lacking []bool // which of the chunks before `from` have no tokens yet
	if b.HasUnannounced() && from > 0 {
		lacking = b.withoutTokens(hashes[:from])
	}
	if from == len(hashes) && !slices.Contains(lacking, true) && sh.Each == nil && b.nameless.Load() == 0 {
		return
	}
	b.queue.add(announcement{model: model, salt: salt, group: -1, shard: *sh}, hashes, func(i int) bool { return i >= from || lacking != nil && lacking[i] }, text)
}

// noTokens is an empty msgpack array.
var noTokens = []byte{0x90}

// AnnounceRows describes rows of one group that an engine stored or a lookup found. Only their hashes are known, so their records have no
// tokens. The Book applies it later, and only to rows that are in the pool or a tier. It copies its arguments.
func (b *Book) AnnounceRows(model, salt []byte, group int, sh *object.Shard, hashes []kv.Hash) {
	b.queue.add(announcement{model: model, salt: salt, group: group, shard: *sh}, hashes, func(int) bool { return true }, nil)
}

// withoutTokens reports which of these chunks are in the pool and have no tokens. Until Run has looked at the store for the first time it
// reports all.
func (b *Book) withoutTokens(hashes []kv.Hash) []bool {
	out := make([]bool, len(hashes))
	if !b.looked.Load() {
		for i := range out {
			out[i] = true
		}
		return out
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, h := range hashes {
		bound := b.mu.bindings[h]
		out[i] = bound != nil && bound.text == nil
	}
	return out
}

// expect records the tokens of announced chunks before the events of these chunks are applied. So a chunk that leaves the pool at once, and
// stays in a tier, has its tokens too.
func (b *Book) expect(batch *news) {
	if len(batch.list) == 0 || b.o.Tiers == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range batch.chunks {
		b.mu.announced[batch.chunks[i].hash] = batch.chunks[i].tokens
	}
}

// learn applies announcements after all events that came before them.
func (b *Book) learn(batch *news) {
	chunks := batch.chunks
	for list := batch.list; len(list) > 0; {
		n := min(len(list), learnBatch)
		chunks = b.applyAnnouncements(list[:n], chunks)
		list = list[n:]
	}
	if b.o.Tiers == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	clear(b.mu.announced)
}

// learnBatch is how many announcements are applied under the mutex at a time.
const learnBatch = 16

// applyAnnouncements applies some announcements. It returns the chunks of the announcements after them.
func (b *Book) applyAnnouncements(list []announcement, chunks []announced) []announced {
	b.mu.Lock()
	defer b.unlock()
	for i := range list {
		a := &list[i]
		b.namedLocked(a.model, a.salt, a.group, &a.shard)
		for j := range chunks[:a.chunks] {
			c := &chunks[j]
			if bound := b.mu.bindings[c.hash]; bound != nil && bound.text == nil && !b.bindLocked(bound, c.tokens) {
				b.mu.n.Unbound++
			}
		}
		chunks = chunks[a.chunks:]
	}
	return chunks
}
