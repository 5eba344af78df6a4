// SPDX-License-Identifier: Apache-2.0

package store

import (
	"container/list"
	"hash/maphash"
	"math"
	"sync"

	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// AnswerPolicy says when chunks that hold generated tokens are written to the tier below. An engine looks a prompt up
// before it stores under the same request id: chunks beyond the prompt's last whole one hold tokens of the answer.
type AnswerPolicy uint8

// The policies.
const (
	AnswersAsPrompts AnswerPolicy = iota // as WritePolicy says
	AnswersAfterHit                      // once a lookup found them in the pool
	AnswersNever
)

// answerMark stands in the pool's index in the place of a tier's mark, so that a later server does not write an answer
// either.
var answerMark = pool.MarkOf("\x00answer")

// maxPrompts bounds the requests whose prompts are known.
const maxPrompts = 1 << 16

// promptNote is how many chunks the prompt of a request has.
type promptNote struct {
	peer   string
	id     uint64
	chunks int
	ended  bool // the session ended; its last stores may follow
}

// promptLengths remembers how long the prompts of requests are. When it is full, the peer with most requests loses its
// oldest one; chunks of a forgotten request count as a prompt's. Its mutex is a leaf.
type promptLengths struct {
	seed  maphash.Seed
	limit int

	mu struct {
		sync.Mutex
		len   int
		peers map[string]*promptsOf
	}
}

// promptsOf are the requests of one peer.
type promptsOf struct {
	byID  map[uint64]*list.Element
	order list.List // of *promptNote, the oldest first
}

func newPromptLengths(limit int) *promptLengths {
	p := &promptLengths{seed: maphash.MakeSeed(), limit: limit}
	p.mu.peers = make(map[string]*promptsOf)
	return p
}

// note records a lookup. A preempted request looks its answer up too, so the shortest prompt counts until the session
// ends.
func (p *promptLengths) note(peer string, request []byte, chunks int) {
	id := maphash.Bytes(p.seed, request)
	p.mu.Lock()
	defer p.mu.Unlock()
	of := p.mu.peers[peer]
	if of == nil {
		of = &promptsOf{byID: make(map[uint64]*list.Element)}
		p.mu.peers[peer] = of
	}
	if e, ok := of.byID[id]; ok {
		n := e.Value.(*promptNote)
		if n.ended || chunks < n.chunks {
			n.chunks, n.ended = chunks, false
		}
		of.order.MoveToBack(e)
		return
	}
	of.byID[id] = of.order.PushBack(&promptNote{peer: peer, id: id, chunks: chunks})
	if p.mu.len++; p.mu.len > p.limit {
		p.forgetLocked()
	}
}

// forgetLocked forgets the oldest request of the peer with most.
func (p *promptLengths) forgetLocked() {
	var most *promptsOf
	for _, of := range p.mu.peers {
		if most == nil || of.order.Len() > most.order.Len() {
			most = of
		}
	}
	n := most.order.Remove(most.order.Front()).(*promptNote)
	delete(most.byID, n.id)
	if p.mu.len--; most.order.Len() == 0 {
		delete(p.mu.peers, n.peer)
	}
}

// end records that a session ended.
func (p *promptLengths) end(peer string, request []byte) {
	p.with(peer, request, func(n *promptNote) { n.ended = true })
}

// chunks returns how many chunks the prompt of a request has, math.MaxInt where that is not known.
func (p *promptLengths) chunks(peer string, request []byte) int {
	chunks := math.MaxInt
	p.with(peer, request, func(n *promptNote) { chunks = n.chunks })
	return chunks
}

func (p *promptLengths) with(peer string, request []byte, f func(*promptNote)) {
	id := maphash.Bytes(p.seed, request)
	p.mu.Lock()
	defer p.mu.Unlock()
	if of := p.mu.peers[peer]; of != nil {
		if e, ok := of.byID[id]; ok {
			f(e.Value.(*promptNote))
		}
	}
}

// NotePrompt records how many whole chunks the prompt of a request has: what the request stores beyond them is an
// answer.
func (s *Store) NotePrompt(request []byte, owner lease.Owner, chunks int) {
	if s.prompts != nil {
		s.prompts.note(owner.Peer, request, chunks)
	}
}

// promptOf returns how many chunks of what a request stores are its prompt's.
func (s *Store) promptOf(peer string, request []byte) int {
	if s.prompts == nil {
		return math.MaxInt
	}
	return s.prompts.chunks(peer, request)
}

// markAnswerLocked notes of a staged slot whether it will hold tokens of an answer.
func (s *Store) markAnswerLocked(slot pool.Slot, answer bool) {
	if s.prompts != nil {
		s.mu.answers.Grow(int(slot) + 1)
		*s.mu.answers.At(int(slot)) = answer
	}
}

func (s *Store) answerLocked(slot pool.Slot) bool {
	return int(slot) < s.mu.answers.Len() && *s.mu.answers.At(int(slot))
}

// hitLocked notes that a lookup found a resident slot: with AnswersAfterHit its object is a prompt's from then on.
func (s *Store) hitLocked(slot pool.Slot) {
	if s.opts.WriteAnswers == AnswersAfterHit && s.answerLocked(slot) {
		s.markAnswerLocked(slot, false)
		if s.mu.pool.Below(slot) == answerMark {
			s.mu.pool.SetBelow(slot, 0)
		}
		s.offerNewLocked(slot)
	}
}
