// Package together runs what stands alone otherwise in one process: it starts parts in
// order, and ends them in reverse.
package together

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
)

// ErrEnded means that a part ended that nobody had told to.
var ErrEnded = errors.New("it ended")

// Part is what runs until it is told to stop.
type Part struct {
	Name string

	// Run serves until ctx ends, and then for as long as the part needs to end well. It
	// calls ready once it can be reached. ctx carries nothing and has no deadline.
	Run func(ctx context.Context, ready func()) error
}

// Run starts each part once the one before is ready, and waits until ctx ends or a part
// does. Then it ends them, the last first, each once the later ones have ended. A part that
// fails, or ends by itself, ends the others too. The error names the parts that failed.
func Run(ctx context.Context, log *slog.Logger, parts ...Part) error {
	ended := make(chan struct{}, len(parts)) // of any part
	var started []*running
	var errs []error
	for i := range parts {
		if ctx.Err() != nil || slices.ContainsFunc(started, (*running).over) {
			break
		}
		r, ready := start(&parts[i], ended)
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
				r.err = ErrEnded
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

// running is a part that was started. err counts once done is closed.
type running struct {
	name   string
	cancel context.CancelFunc
	done   chan struct{}
	err    error
}

// over reports whether the part has ended.
func (r *running) over() bool {
	select {
	case <-r.done:
		return true
	default:
		return false
	}
}

func start(p *Part, ended chan<- struct{}) (r *running, ready <-chan struct{}) {
	ctx, cancel := context.WithCancel(context.Background())
	is, told := context.WithCancel(context.Background())
	r = &running{name: p.Name, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer told()
		r.err = p.Run(ctx, told)
		close(r.done)
		ended <- struct{}{}
	}()
	return r, is.Done()
}
