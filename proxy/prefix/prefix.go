// SPDX-License-Identifier: Apache-2.0

// Package prefix remembers which engine has seen which beginnings of prompts, in a fixed amount
// of memory, and chooses engines for unseen beginnings so that several proxies agree.
// It also remembers the prompts whose KV relays have.
//
// Beginnings are bytes, not tokens: a proxy has no tokenizer. They are marked by a chain of hashes at fixed offsets, which lie closer
// together near the start of a prompt.
package prefix

import (
	"sync"
	"sync/atomic"

	"github.com/zeebo/xxh3"
)

// Mark is a hash of the first End bytes of a prompt and of the seed of the chain.
type Mark struct {
	Hash uint64
	End  int
}

// step is the distance between the first marks, in bytes. From 16 steps on, the distance is a sixteenth of the offset.
const step = 512

// next returns the offset of the mark after the one at off.
func next(off int) int { return off + max(step, off/16/step*step) }

// Marks appends to dst the marks of a prompt: about 100 for a prompt of 1 MiB. seed separates prompts that never share KV, such as
// those of different models or salts. The last mark covers the whole prompt.
func Marks(dst []Mark, seed uint64, prompt []byte) []Mark {
	h, at := seed, 0
	for end := next(0); end < len(prompt); end = next(end) {
		h = xxh3.HashSeed(prompt[at:end], h)
		dst, at = append(dst, Mark{h, end}), end
	}
	if len(prompt) > 0 {
		dst = append(dst, Mark{xxh3.HashSeed(prompt[at:], ^h), len(prompt)})
	}
	return dst
}

// Seed returns the seed of a chain for some texts, for example model and salt.
func Seed(texts ...string) uint64 {
	h := uint64(0)
	for _, t := range texts {
		h = xxh3.HashStringSeed(t, h+1)
	}
	return h
}

const (
	shards = 64
	ways   = 8 // entries of a row
)

// Index knows which engine has seen which mark. Its memory is fixed: in each row of 8 entries, a new entry replaces the least recently
// used one. Its methods are safe for concurrent use.
type Index struct {
	clock  atomic.Uint32
	rows   uint64
	shards [shards]struct {
		sync.Mutex
		rows [][ways]entry
	}
}

type entry struct {
	hash   uint64 // 0: the entry is free
	engine uint32
	used   uint32 // Index.clock at the last use
}

// New returns an Index with room for that many entries of 16 bytes, rounded up to a multiple of 512.
func New(entries int) *Index {
	x := new(Index)
	each := max(1, (entries+shards*ways-1)/(shards*ways))
	x.rows = uint64(each)
	for i := range x.shards {
		x.shards[i].rows = make([][ways]entry, each)
	}
	return x
}

// Entries returns how many entries the Index has room for.
func (x *Index) Entries() int { return int(x.rows) * shards * ways }

// Seen says how many leading bytes of a prompt an engine has seen.
type Seen struct {
	Engine uint32
	Bytes  int
}

// Lookup appends to dst, for each engine that has seen any of the marks, the end of the last mark that it has seen. It stops after two
// marks in a row that no engine has seen.
func (x *Index) Lookup(dst []Seen, marks []Mark) []Seen {
	from, missed := len(dst), 0
	for _, m := range marks {
		found := false
		s := &x.shards[m.Hash%shards]
		s.Lock()
		row := &s.rows[m.Hash/shards%x.rows]
		for i := range row {
			if row[i].hash != m.Hash || row[i].hash == 0 {
				continue
			}
			found = true
			at := from
			for at < len(dst) && dst[at].Engine != row[i].engine {
				at++
			}
			if at == len(dst) {
				dst = append(dst, Seen{Engine: row[i].engine})
			}
			dst[at].Bytes = m.End
		}
		s.Unlock()
		if found {
			missed = 0
		} else if missed++; missed == 2 {
			break
		}
	}
	return dst
}

// Add records that an engine has seen the marks.
func (x *Index) Add(marks []Mark, engine uint32) {
	now := x.clock.Add(1)
	for _, m := range marks {
		s := &x.shards[m.Hash%shards]
		s.Lock()
		row := &s.rows[m.Hash/shards%x.rows]
		at := 0
		for i := range row {
			if row[i].hash == m.Hash && row[i].engine == engine {
				at = i
				break
			}
			if row[i].hash == 0 && row[at].hash != 0 || row[i].hash != 0 && row[at].hash != 0 && int32(row[i].used-row[at].used) < 0 {
				at = i
			}
		}
		row[at] = entry{m.Hash, engine, now}
		s.Unlock()
	}
}

// Weight returns the weight of an engine for a key. The engine with the highest weight is the key's home. All proxies with the same
// engine names agree, and when an engine is removed, only its own keys move (rendezvous hashing).
func Weight(key uint64, engine string) uint64 { return xxh3.HashStringSeed(engine, key) }
