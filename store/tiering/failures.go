// SPDX-License-Identifier: Apache-2.0

package tiering

import (
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

const (
	// failedFor is how long an object that could not be read counts as absent.
	failedFor = 5 * time.Second

	// maxFailed bounds the failures that are remembered; beyond it the oldest is forgotten.
	maxFailed = 1 << 14
)

// failures has the objects that could not be read a moment ago. The zero value has none.
type failures struct {
	mu struct {
		sync.Mutex
		until map[kv.Key]time.Time
		order []kv.Key // oldest first; each at least once
	}
}

// add records that an object could not be read.
func (f *failures) add(k kv.Key) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.mu.until == nil {
		f.mu.until = make(map[kv.Key]time.Time)
	}
	now := time.Now()
	for len(f.mu.order) > 0 && (len(f.mu.order) >= maxFailed || !now.Before(f.mu.until[f.mu.order[0]])) {
		delete(f.mu.until, f.mu.order[0])
		f.mu.order = f.mu.order[1:]
	}
	f.mu.until[k] = now.Add(failedFor)
	f.mu.order = append(f.mu.order, k)
}

// forget removes an object, because it was written.
func (f *failures) forget(k kv.Key) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.mu.until, k)
}

// hide sets the metas of objects that could not be read a moment ago to zero, as if they were missing.
func (f *failures) hide(keys []kv.Key, metas []tier.Meta) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.mu.until) == 0 {
		return
	}
	now := time.Now()
	for i := range keys {
		if until, ok := f.mu.until[keys[i]]; ok && now.Before(until) {
			metas[i] = tier.Meta{}
		}
	}
}
