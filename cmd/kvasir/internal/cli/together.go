// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
)

// errEnded means that a part ended although no other part stopped it.
var errEnded = errors.New("it ended, although nothing stopped it")

// runPart is a part of kvasir all. It runs until its context ends.
type runPart struct {
	Name string

	// Run serves until ctx ends, and then for as long as the part needs to end properly. It must call ready when it can be reached. ctx
	// has no values and no deadline.
	Run func(ctx context.Context, ready func()) error
}

// runTogether starts each part when the part before it is ready, and waits until ctx ends or one of the parts ends. Then it ends the
// parts, the last one first, each after the later ones have ended. A part that fails, or ends by itself, makes the others end, too. The
// error names the parts that failed.
func runTogether(ctx context.Context, log *slog.Logger, parts ...runPart) error {
	ended := make(chan struct{}, len(parts)) // gets a value when any part has ended
	var started []*runningPart
	var errs []error
	for i := range parts {
		if ctx.Err() != nil || slices.ContainsFunc(started, (*runningPart).hasEnded) {
			break
		}
		r, ready := startPart(&parts[i], ended)
		started = append(started, r)
		select {
		case <-ready:
		case <-r.done:
		case <-ctx.Done():
		}
	}
	if len(started) == len(parts) {
		select {
		case <-ctx.Done():
		case <-ended:
		}
	}
	for i := len(started) - 1; i >= 0; i-- {
		r := started[i]
		select {
		case <-r.done:
			if r.err == nil && ctx.Err() == nil {
				r.err = errEnded
			}
		default:
			log.Info("stopping a part", "part", r.name)
		}
		r.cancel()
		<-r.done
		if r.err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", r.name, r.err))
		}
	}
	return errors.Join(errs...)
}

// runningPart is a part that was started. err is valid when done is closed.
type runningPart struct {
	name   string
	cancel context.CancelFunc
	done   chan struct{}
	err    error
}

// hasEnded reports whether the part has ended.
func (r *runningPart) hasEnded() bool {
	select {
	case <-r.done:
		return true
	default:
		return false
	}
}

func startPart(p *runPart, ended chan<- struct{}) (r *runningPart, ready <-chan struct{}) {
	ctx, cancel := context.WithCancel(context.Background())
	listening, listens := context.WithCancel(context.Background())
	r = &runningPart{name: p.Name, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer listens()
		r.err = p.Run(ctx, listens)
		close(r.done)
		ended <- struct{}{}
	}()
	return r, listening.Done()
}
