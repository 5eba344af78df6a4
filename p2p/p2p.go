// Package p2p answers LMCache's peer-to-peer operations for a node that lends nothing
// to its peers: a lookup gets a task id, and asking for its result says of each key
// that it is not held, once.
package p2p

import (
	"errors"
	"sync"
)

const (
	maxTasks = 1024
	maxKeys  = 1 << 16
)

// ErrKeys means that a lookup names too many keys.
var ErrKeys = errors.New("too many keys")

// Tasks are the lookups whose results were not asked for yet; beyond 1,024 the oldest
// is forgotten. Its zero value is ready, its methods are safe for concurrent use.
type Tasks struct {
	mu    sync.Mutex
	last  int64
	keys  map[int64]int
	order []int64
}

// Lookup begins a task about so many keys and returns its id.
func (t *Tasks) Lookup(keys int) (id int64, err error) {
	if keys > maxKeys {
		return 0, ErrKeys
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.keys == nil {
		t.keys = make(map[int64]int)
	}
	if len(t.order) >= maxTasks {
		delete(t.keys, t.order[0])
		t.order = append(t.order[:0], t.order[1:]...)
	}
	t.last++
	t.keys[t.last] = keys
	t.order = append(t.order, t.last)
	return t.last, nil
}

// Result returns how many keys the task was about, once; ok is false for a task that
// is not known, or not any more.
func (t *Tasks) Result(id int64) (keys int, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	keys, ok = t.keys[id]
	delete(t.keys, id)
	return keys, ok
}
