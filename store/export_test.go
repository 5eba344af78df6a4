// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"

	"github.com/kvasir-kv/kvasir/kv"
)

// SumNext is what the background does once.
func (s *Store) SumNext() int64 { return s.sumNext() }

// Kill leaves the pool as a server that is killed does.
func (s *Store) Kill() error { return s.close() }

// WriteNext begins to write one object below that waits for it. It reports false when
// none does.
func (s *Store) WriteNext(now context.Context) bool {
	it, ok := s.outbox.Next(now)
	if ok {
		s.beginWriting(it)
	}
	return ok
}

// PromptLengths is promptLengths for tests of its books.
type PromptLengths struct{ p *promptLengths }

func NewPromptLengths(limit int) PromptLengths { return PromptLengths{newPromptLengths(limit)} }

func (p PromptLengths) Note(peer string, request []byte, chunks int) { p.p.note(peer, request, chunks) }

func (p PromptLengths) End(peer string, request []byte) { p.p.end(peer, request) }

func (p PromptLengths) Chunks(peer string, request []byte) int { return p.p.chunks(peer, request) }

// ParentOf returns what the policy knows as the chunk before that of a resident object.
func (s *Store) ParentOf(k *kv.Key) uint64 {
	s.lock()
	defer s.unlock()
	slot, _ := s.mu.pool.Find(k)
	if int(slot) >= s.mu.parents.Len() {
		return 0
	}
	return *s.mu.parents.At(int(slot))
}
