// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"sync"
)

// crew runs a few goroutines that work while there is something to do and sleep otherwise. newCrew makes one.
type crew struct{ work chan struct{} }

// newCrew returns a crew that sleeps.
func newCrew() crew { return crew{make(chan struct{}, 1)} }

// Wake makes one goroutine of the crew look for work.
func (c crew) Wake() {
	select {
	case c.work <- struct{}{}:
	default:
	}
}

// Run starts n goroutines. Each sleeps until Wake, and then calls do until do reports false: there is nothing to do. Run returns when ctx
// and all its goroutines have ended.
func (c crew) Run(ctx context.Context, n int, do func() bool) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for range n {
		wg.Go(func() {
			for {
				select {
				case <-ctx.Done():
					return
				case <-c.work:
				}
				for ctx.Err() == nil && do() {
					c.Wake() // there may be work for another goroutine
				}
			}
		})
	}
}
