package events

import (
	"sync"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/objects"
)

// queue is what was announced and is not applied yet: requests wait for no Book.
type queue struct {
	told chan struct{} // capacity 1: there is something

	mu     sync.Mutex // a leaf
	list   []announcement
	bytes  int
	missed uint64 // chunks that found no room
}

// queueBytes bounds the tokens in the queue. What finds no room is announced when a lookup has it.
const queueBytes = 16 << 20

// announcement says whose chunks some are.
type announcement struct {
	model, salt string
	shard       objects.Shard
	hashes      []kv.Hash
	tokens      []tokens
}

func (q *queue) add(a announcement, bytes int) {
	q.mu.Lock()
	if q.bytes+bytes > queueBytes {
		q.missed += uint64(len(a.hashes))
		q.mu.Unlock()
		return
	}
	q.list = append(q.list, a)
	q.bytes += bytes
	q.mu.Unlock()
	select {
	case q.told <- struct{}{}:
	default:
	}
}

func (q *queue) take() (list []announcement) {
	q.mu.Lock()
	defer q.mu.Unlock()
	list, q.list, q.bytes = q.list, nil, 0
	return list
}

func (q *queue) lost() uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.missed
}

// Announce tells what the chunks with these hashes are, which begin a prompt, whose they are, and which shards a
// lookup asks for together. Those from number from on were just stored. text returns the msgpack array of chunk i, and is
// called for those that are wanted, in order. It is applied later, and only for what is there.
func (b *Book) Announce(model, salt []byte, sh *objects.Shard, hashes []kv.Hash, from int, text func(i int) []byte) {
	var wanted []bool // of those before from
	if b.Wonders() && from > 0 {
		wanted = b.lacks(hashes[:from])
	}
	n := len(hashes) - from
	for _, w := range wanted {
		if w {
			n++
		}
	}
	if n == 0 && sh.Each == nil && b.nameless.Load() == 0 {
		return
	}
	a := announcement{model: string(model), salt: string(salt), shard: *sh, hashes: make([]kv.Hash, 0, n), tokens: make([]tokens, 0, n)}
	bytes := len(model) + len(salt) + 256
	for i, h := range hashes {
		if i < from && (wanted == nil || !wanted[i]) {
			continue
		}
		t := tokens{index: i, text: text(i)}
		if i > 0 {
			t.parent = hashes[i-1]
		}
		a.hashes, a.tokens = append(a.hashes, h), append(a.tokens, t)
		bytes += len(t.text) + 128
	}
	b.queue.add(a, bytes)
}

// lacks says which of these chunks are in the pool without tokens.
func (b *Book) lacks(hashes []kv.Hash) []bool {
	out := make([]bool, len(hashes))
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, h := range hashes {
		bound := b.mu.bindings[h]
		out[i] = bound != nil && bound.text == nil
	}
	return out
}

// expect has chunks that come now have their tokens, also those that go at once and stay in a tier.
func (b *Book) expect(told []announcement) {
	if len(told) == 0 || b.o.Tiers == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, a := range told {
		for i, h := range a.hashes {
			b.mu.told[h] = a.tokens[i]
		}
	}
}

// learn applies what was announced, once all events before it are.
func (b *Book) learn(told []announcement) {
	for len(told) > 0 {
		n := min(len(told), learnBatch)
		b.learnSome(told[:n])
		told = told[n:]
	}
	if b.o.Tiers == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	clear(b.mu.told)
}

// learnBatch is how many announcements are applied while others wait for the mutex.
const learnBatch = 16

func (b *Book) learnSome(told []announcement) {
	b.mu.Lock()
	defer b.unlock()
	for _, a := range told {
		b.namedLocked(a.model, a.salt, &a.shard)
		for i, h := range a.hashes {
			if bound := b.mu.bindings[h]; bound != nil && bound.text == nil && !b.bindLocked(bound, a.tokens[i]) {
				b.mu.n.Unbound++
			}
		}
	}
}
