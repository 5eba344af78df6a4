package store

import (
	"fmt"
	"runtime/debug"
)

// lock begins a section that changes the books.
func (s *Store) lock() { s.mu.Lock() }

// unlock ends it; it must be deferred directly. A panic inside the section leaves
// the books in an unknown state, from which wrong bytes could be served. So it
// ends the process, even where a caller recovers from panics.
func (s *Store) unlock() {
	if v := recover(); v != nil {
		exit(fmt.Sprintf("BUG: store: panic while the books change: %v\n%s", v, debug.Stack()))
	}
	s.mu.Unlock()
}

// exit panics on a goroutine where nobody recovers. Tests replace it.
var exit = func(why string) {
	go panic(why)
	select {}
}
