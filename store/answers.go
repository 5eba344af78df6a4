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

// AnswerPolicy says when chunks with generated tokens are written to the tier below. An engine looks a prompt up before it stores under the
// same request id. So chunks beyond the prompt's last whole chunk have tokens of the answer.
type AnswerPolicy uint8

// The policies.
const (
	AnswersAsPrompts AnswerPolicy = iota // written as WritePolicy says
	AnswersAfterHit                      // written once a lookup found them in the pool
	AnswersNever                         // never written
)

// answerMark is what the pool's index records for an object with tokens of an answer, in place of the mark of the tier that has the object.
// A later server then does not write that object either.
var answerMark = pool.MarkOf("\x00answer")

// maxPrompts bounds the requests of which promptLengths remembers the prompt's length; it says which one it forgets beyond them.
const maxPrompts = 1 << 16

// promptNote is how many chunks the prompt of a request has.
type promptNote struct {
	peer   string
	id     uint64
	chunks int
	ended  bool // the session ended; its last stores may follow
}

// promptLengths remembers how many chunks the prompts of requests have. When it is full, it forgets the oldest request of the peer with the
// most requests; all chunks of a forgotten request count as chunks of its prompt. Its mutex is a leaf.
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

// note records that a request looked up a prompt of `chunks` chunks. A preempted request looks up its answer too, so the shortest prompt
// counts until the session ends.
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

// forgetLocked forgets, of the peer that has the most requests, the request that looked up least recently.
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

// end records that the session of a request ended: the next lookup with its id counts as another prompt.
func (p *promptLengths) end(peer string, request []byte) {
	p.with(peer, request, func(n *promptNote) { n.ended = true })
}

// chunks returns how many chunks the prompt of a request has; math.MaxInt if the request is not known.
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

// NotePrompt records how many whole chunks the prompt of a request has. Chunks that the request stores beyond them belong to the answer.
func (s *Store) NotePrompt(request []byte, owner lease.Owner, chunks int) {
	if s.prompts != nil {
		s.prompts.note(owner.Peer, request, chunks)
	}
}

// promptOf returns how many leading chunks of a request belong to its prompt; math.MaxInt if that is not known.
func (s *Store) promptOf(peer string, request []byte) int {
	if s.prompts == nil {
		return math.MaxInt
	}
	return s.prompts.chunks(peer, request)
}

// markAnswerLocked records whether the object of a slot has tokens of an answer.
func (s *Store) markAnswerLocked(slot pool.Slot, answer bool) {
	if s.prompts != nil {
		s.mu.answers.Grow(int(slot) + 1)
		*s.mu.answers.At(int(slot)) = answer
	}
}

func (s *Store) answerLocked(slot pool.Slot) bool {
	return int(slot) < s.mu.answers.Len() && *s.mu.answers.At(int(slot))
}

// hitLocked records that a lookup found the object of a resident slot. With AnswersAfterHit an object of an answer is treated as one of a
// prompt from then on.
func (s *Store) hitLocked(slot pool.Slot) {
	if s.opts.WriteAnswers == AnswersAfterHit && s.answerLocked(slot) {
		s.markAnswerLocked(slot, false)
		if s.mu.pool.Below(slot) == answerMark {
			s.mu.pool.SetBelow(slot, 0)
		}
		s.offerNewLocked(slot)
	}
}
