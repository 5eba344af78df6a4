// SPDX-License-Identifier: Apache-2.0

package store

import (
	"fmt"
	"runtime/debug"
	"time"
)

// lock begins a section that changes the store's books, under the mutex.
func (s *Store) lock() {
	s.mu.Lock()
	if s.mu.policy.Mortal() { // so that a use is recorded at its own time, however late Expire is called
		s.mu.policy.Tick(time.Since(s.began))
	}
	if s.mu.lives.any() {
		s.mu.lives.now = time.Since(s.began)
	}
	if watch != nil {
		watch(true)
	}
}

// unlock ends the section; it must be deferred directly. A panic inside the section leaves the books in an unknown state, from which wrong
// bytes could be served. So unlock ends the process, even if a caller recovers from panics.
func (s *Store) unlock() {
	if v := recover(); v != nil {
		exit(fmt.Sprintf("BUG: store: panic while the books change: %v\n%s", v, debug.Stack()))
	}
	if watch != nil {
		watch(false)
	}
	news, short := s.mu.events.news, s.mu.indexShort
	s.mu.events.news, s.mu.indexShort = false, false
	s.mu.Unlock()
	if short {
		_ = s.mu.pool.BackIndex() // after an error the pool is full
	}
	if news {
		select {
		case s.news <- struct{}{}:
		default:
		}
	}
}

// watch is called at the beginning (begin) and at the end of each section. It is nil; only benchmarks set it.
var watch func(begin bool)

// exit panics on a goroutine of its own, where no recover can catch it. Tests replace it.
var exit = func(why string) {
	go panic(why)
	select {}
}
