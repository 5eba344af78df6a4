// Package relayed remembers of which prompts relays have the KV.
package relayed

import (
	"crypto/sha256"
	"fmt"
	"sync"
)

// Key names all of a request that decides on the KV of its prompt, and whose it is.
type Key [sha256.Size]byte

// KV is what went from P to D through a relay, which may still have it.
type KV struct {
	Registry string // the relay's address
	Engine   string // P, as the relay names it
	Transfer string // the id under which P sent it
}

// Prompts remembers which prompts relays have. It keeps two sets of at most 8,192, some 250 bytes for each prompt;
// when the younger is full the older goes. The zero Prompts is empty. Methods are safe for concurrent use.
type Prompts struct {
	mu struct {
		sync.Mutex
		young, old map[Key]KV
		turn       uint64
	}
}

const maxPrompts = 8192 // of one set

// Add remembers a prompt.
func (s *Prompts) Add(k Key, r KV) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.addLocked(k, r)
}

func (s *Prompts) addLocked(k Key, r KV) {
	if _, there := s.mu.young[k]; !there && len(s.mu.young) >= maxPrompts {
		s.mu.young, s.mu.old = nil, s.mu.young
	}
	if s.mu.young == nil {
		s.mu.young = make(map[Key]KV)
	}
	s.mu.young[k] = r
}

// Find returns what a relay has of a prompt, and a transfer id under which it gives it once more.
func (s *Prompts) Find(k Key) (r KV, id string, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r, ok = s.mu.young[k]; !ok {
		if r, ok = s.mu.old[k]; !ok {
			return r, "", false
		}
		s.addLocked(k, r)
	}
	s.mu.turn++
	return r, fmt.Sprintf("%s#%d!", r.Transfer, s.mu.turn), true
}

// Forget forgets a prompt.
func (s *Prompts) Forget(k Key) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.mu.young, k)
	delete(s.mu.old, k)
}
