// SPDX-License-Identifier: Apache-2.0

package prefix

import (
	"crypto/sha256"
	"fmt"
	"sync"
)

// RelayedKey is a hash of everything in a request that determines the KV of its prompt, and of the client to whom the prompt belongs.
type RelayedKey [sha256.Size]byte

// RelayedKV names a prompt's KV that went from P to D through a relay. The relay may still have it.
type RelayedKV struct {
	Registry string // the relay's address
	Engine   string // P, under the relay's name
	Transfer string // id under which P sent the KV
}

// RelayedPrompts remembers the prompts whose KV relays have. It keeps two sets of at most 8,192 prompts, some 250 bytes each; when the
// newer set is full, it drops the older one. The zero RelayedPrompts is empty. Its methods are safe for concurrent use.
type RelayedPrompts struct {
	mu struct {
		sync.Mutex
		young, old map[RelayedKey]RelayedKV
		turn       uint64
	}
}

const maxRelayedPrompts = 8192 // prompts in each of the two sets of a RelayedPrompts

// Add remembers that r is the KV of the prompt k.
func (s *RelayedPrompts) Add(k RelayedKey, r RelayedKV) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.addLocked(k, r)
}

func (s *RelayedPrompts) addLocked(k RelayedKey, r RelayedKV) {
	if _, there := s.mu.young[k]; !there && len(s.mu.young) >= maxRelayedPrompts {
		s.mu.young, s.mu.old = nil, s.mu.young
	}
	if s.mu.young == nil {
		s.mu.young = make(map[RelayedKey]RelayedKV)
	}
	s.mu.young[k] = r
}

// Find returns where a relay has the KV of a prompt, and a transfer id under which D can get that KV once more.
func (s *RelayedPrompts) Find(k RelayedKey) (r RelayedKV, id string, ok bool) {
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
func (s *RelayedPrompts) Forget(k RelayedKey) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.mu.young, k)
	delete(s.mu.old, k)
}
