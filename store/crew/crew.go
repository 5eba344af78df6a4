// Package crew has a few goroutines work while there is something to do, and sleep else.
package crew

import (
	"context"
	"sync"
)

// Crew works. New makes one.
type Crew struct{ work chan struct{} }

// New returns a Crew that nobody has woken.
func New() Crew { return Crew{make(chan struct{}, 1)} }

// Wake has one of the crew look for work.
func (c Crew) Wake() {
	select {
	case c.work <- struct{}{}:
	default:
	}
}

// Run has n goroutines call do, once they are woken, until it reports that there is nothing
// to do. It returns when ctx has ended and so have they.
func (c Crew) Run(ctx context.Context, n int, do func() bool) {
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
					c.Wake() // there may be work for another one
				}
			}
		})
	}
}
