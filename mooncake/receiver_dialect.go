// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// errPullAgain means that a pull with one answer ended because D aborted some of its
// requests. The caller pulls the rest again; this does not count as an attempt.
var errPullAgain = errors.New("mooncake: pulled together with an aborted request")

// pullForAll sends a pull that gets one answer for all of its requests. If that answer is a failure, or bytes of some requests are
// missing, it pulls these requests again one by one, to find out which of them fails.
func (t *pullConn) pullForAll(ctx context.Context) error {
	if t.recordAborted(true); len(t.left) == 0 {
		return nil
	}
	r := t.r
	p := wire.Pull{
		Host: r.host, Port: r.port, TPSize: r.o.Self.TPSize, TPRank: r.o.Self.TPRank, PPSize: r.o.Self.PPSize,
		Wanted: make(map[string]wire.Wanted, len(t.left)), Regions: t.window.regions,
	}
	for id, q := range t.left {
		p.Wanted[id] = q.want
	}
	wanted := slices.Collect(maps.Values(t.left))
	aborted := func() bool {
		return slices.ContainsFunc(wanted, func(q *receiving) bool { return q.gaveUp() != nil })
	}
	one, cancel := context.WithCancel(ctx)
	defer cancel()
	r.wg.Go(func() { // ends this pull when D aborts one of its requests: errPullAgain
		for !aborted() {
			select {
			case <-t.wake:
			case <-one.Done():
				return
			}
		}
		cancel()
	})
	t.sent = true
	err := r.o.Dialect.Pull(one, t.addr, &p)
	switch {
	case err == nil:
		for id, q := range t.left {
			if len(p.Wanted) > 1 && r.missing(q) > 0 { // P sends nothing when it lacks one of them
				t.pullAlone(ctx, q)
			} else {
				t.recordResult(id, nil)
			}
		}
	case errors.Is(err, ErrPeer) && len(t.left) > 1:
		for _, q := range t.left {
			t.pullAlone(ctx, q)
		}
	case errors.Is(err, ErrPeer):
		t.failAll(err)
	case ctx.Err() == nil && aborted():
		return errPullAgain
	default:
		return fmt.Errorf("%w: %w", ErrLost, err)
	}
	return nil
}

// pullAlone takes q out of this pull and, in the background, pulls it again in a pull of its own.
func (t *pullConn) pullAlone(ctx context.Context, q *receiving) {
	r := t.r
	r.mu.Lock()
	q.suspect = true // P may still be writing for this pull
	r.mu.Unlock()
	delete(t.left, q.id)
	r.wg.Go(func() { r.pullFrom(ctx, t.from, t.index, t.workers, t.window, []*receiving{q}) })
}
