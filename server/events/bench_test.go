// SPDX-License-Identifier: Apache-2.0

package events

import (
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/event"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store"
)

// script is a Source that says what it is told to.
type script struct {
	after  uint64 // events that were read
	events []store.Event
}

func (s *script) Watch(int)             {}
func (s *script) News() <-chan struct{} { return nil }
func (s *script) LastEvent() uint64     { return s.after + uint64(len(s.events)) }
func (s *script) Residents(int, []kv.Key) ([]kv.Key, int, bool) {
	return nil, 0, false
}

func (s *script) Events(_ uint64, dst []store.Event) (n int, lost bool) {
	n = copy(dst, s.events)
	s.after, s.events = s.after+uint64(n), append(s.events[:0], s.events[n:]...)
	return n, false
}

// The cost of stores of 8 chunks of 256 tokens: while they are answered, and later. Each chunk is removed 1,000 stores later.
func BenchmarkStored(b *testing.B) {
	const (
		chunks, tokens = 8, 256
		perTick        = 8 // stores that are applied together
		lives          = 1000
	)
	src := &script{}
	book := New(src, Options{})
	book.Activate()
	book.catchUp()
	sh := object.Shard{Namespace: kv.NamespaceOf("model", "", "layout"), World: 1, Groups: object.FullAttention(tokens, 4096)}
	text := &Text{Head: []byte{0xdc, tokens >> 8, tokens & 0xff}}
	for i := range chunks {
		ids := make([]int64, tokens)
		for t := range ids {
			ids[t] = int64(1000*i+7919*t) % 150_000
		}
		text.Tokens = append(text.Tokens, event.AppendTokens(nil, ids)[3:]...)
		text.Ends = append(text.Ends, len(text.Tokens))
	}
	hashesOf := func(n int) []kv.Hash {
		out := make([]kv.Hash, chunks)
		for i := range out {
			out[i] = kv.Hash{byte(n), byte(n >> 8), byte(n >> 16), byte(n >> 24), byte(i)}
		}
		return out
	}
	change := func(hashes []kv.Hash, removed bool) {
		for _, h := range hashes {
			e := store.Event{Removed: removed}
			sh.Key(&e.Key, 0, 0, h)
			src.events = append(src.events, e)
		}
	}
	model := []byte("meta-llama/Llama-3.1-8B-Instruct")
	n := 0
	step := func(announced, applied func(func())) {
		hashes := hashesOf(n)
		change(hashes, false)
		announced(func() { book.Announce(model, nil, &sh, hashes, 0, text) })
		if n >= lives {
			change(hashesOf(n-lives), true)
		}
		if n++; n%perTick == 0 {
			applied(book.catchUp)
		}
	}
	timed := func(f func()) { f() }
	untimed := func(b *testing.B) func(func()) {
		return func(f func()) { b.StopTimer(); f(); b.StartTimer() }
	}
	for range lives {
		step(timed, timed)
	}
	b.Run("answered", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			step(timed, untimed(b))
		}
	})
	b.Run("all", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			step(timed, timed)
		}
	})
}
