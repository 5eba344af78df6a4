// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/tier"
)

// A request looks up a prompt of two chunks, stores them and two chunks with its answer: the answer is written below
// with the prompt, once a lookup found it, or never. The same holds after a restart.
func TestAnswersBelow(t *testing.T) {
	const chunks, n = 2, 4
	f := func(answers store.AnswerPolicy, restart bool, atCommit, atHit int) {
		t.Helper()
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t, t.TempDir(), 2*n, store.Options{WriteAnswers: answers, ChecksumRate: 1 << 30, Place: "one"})
			defer func() { b.release(); b.stop() }()
			b.memory = tier.NewMemory(1 << 20)
			b.restart()
			end := b.run()
			defer func() { end() }()
			again := func() {
				if restart {
					end()
					b.restart()
					end = b.run()
				}
			}
			below := func(h []kv.Hash) int { return (&tiered{bench: b, memory: b.memory}).below(t, h) }
			h := prompt(1, n)
			b.store.NotePrompt([]byte("p"), lease.Owner{}, chunks)
			b.put("p", h, 0, chunks+1, chunks+1)
			b.store.EndSession([]byte("p"), lease.Owner{})
			b.put("p", h, chunks+1, n, 1) // the last store follows the end
			time.Sleep(time.Minute)
			again()
			time.Sleep(time.Minute)
			if got := below(h); got != atCommit {
				t.Errorf("policy %d, restart %v: %d chunks are below after the commit, want %d", answers, restart, got, atCommit)
			}
			if got := b.store.Stats(); !restart && got.AnswerChunks != uint64(n-atCommit) {
				t.Errorf("policy %d: %d answers were counted, want %d", answers, got.AnswerChunks, n-atCommit)
			}
			if got := b.hit(h); got.Hit != n {
				t.Errorf("policy %d, restart %v: %+v", answers, restart, got)
			}
			time.Sleep(time.Minute)
			again()
			time.Sleep(time.Minute)
			if got := below(h); got != atHit {
				t.Errorf("policy %d, restart %v: %d chunks are below after a hit, want %d", answers, restart, got, atHit)
			}
			other := prompt(2, 2*n)
			b.store.NotePrompt([]byte("p"), lease.Owner{}, 2*n) // the same id, another request
			b.put("p", other, 0, 2*n, 2*n)                      // in the place of the answer
			time.Sleep(time.Minute)
			if got, stats := below(other), b.store.Stats(); got != 2*n || stats.LostChunks > 0 {
				t.Errorf("policy %d, restart %v: %d of %d chunks of the next prompt are below; %+v", answers, restart, got, 2*n, stats)
			}
			b.idle()
		})
	}
	for _, restart := range []bool{false, true} {
		f(store.AnswersAsPrompts, restart, n, n)
		f(store.AnswersAfterHit, restart, chunks, n)
		f(store.AnswersNever, restart, chunks, chunks)
	}
}

// A preempted request looks up what it has generated, too: that stays an answer. What was stored without a lookup, by
// another peer, or after a request was forgotten, counts as a prompt.
func TestWhichChunksAreAnswers(t *testing.T) {
	p := store.NewPromptLengths(4)
	f := func(peer, request string, want int) {
		t.Helper()
		if got := p.Chunks(peer, []byte(request)); got != want {
			t.Errorf("%s of %s: %d chunks, want %d", request, peer, got, want)
		}
	}
	const unknown = int(^uint(0) >> 1)
	p.Note("one", []byte("a"), 3)
	p.Note("one", []byte("a"), 7)
	f("one", "a", 3)
	f("two", "a", unknown)
	p.End("one", []byte("a"))
	f("one", "a", 3)
	p.Note("one", []byte("a"), 7)
	f("one", "a", 7)
	p.Note("two", []byte("a"), 1)
	for _, request := range []string{"b", "c", "d", "e", "f"} {
		p.Note("one", []byte(request), 2)
	}
	f("two", "a", 1) // the peer with most loses its oldest ones
	f("one", "a", unknown)
	f("one", "c", unknown)
	f("one", "d", 2)
	f("one", "f", 2)
}
