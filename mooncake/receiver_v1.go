package mooncake

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/kvasir-kv/kvasir/zmtp"
)

// errAskAgain means that a V1 pull ended because D gave some of its requests up: the
// rest are pulled again, as often as it takes.
var errAskAgain = errors.New("mooncake: pulled together with an aborted request")

// onceV1 sends a V1 pull and waits for its one answer. When that is a failure of
// several requests, each is pulled again by itself.
func (t *talk) onceV1(ctx context.Context) error {
	if t.dropAborted(true); len(t.left) == 0 {
		return nil
	}
	r := t.r
	ids := slices.Sorted(maps.Keys(t.left))
	p := PullV1{Host: r.host, Port: r.port, Requests: ids}
	for i := range t.window.regions {
		p.Bases = append(p.Bases, t.window.regions[i].Base)
	}
	for _, id := range ids {
		p.Blocks = append(p.Blocks, slices.Concat(t.left[id].want.Blocks...))
	}
	s := zmtp.NewReq(t.addr, zmtp.DealerOptions{ConnectTimeout: r.o.ConnectTimeout})
	if err := s.Start(); err != nil {
		return err
	}
	defer func() { _ = s.Close() }() // P sees D go, should it still be at it
	ctxAll := ctx
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	wanted := slices.Collect(maps.Values(t.left))
	r.wg.Go(func() { // V1 has one answer for all: without an aborted request the pull is another one
		for {
			if slices.ContainsFunc(wanted, func(q *receiving) bool { return q.gaveUp() != nil }) {
				cancel()
				return
			}
			select {
			case <-t.wake:
			case <-ctx.Done():
				return
			}
		}
	})
	t.sent = true
	reply, err := s.Do(ctx, AppendPullV1(nil, &p))
	switch {
	case err != nil && ctxAll.Err() == nil && slices.ContainsFunc(wanted, func(q *receiving) bool { return q.gaveUp() != nil }):
		return errAskAgain
	case err != nil:
		return fmt.Errorf("%w: %w", ErrLost, err)
	case len(reply) == 1 && string(reply[0]) == replyV1Done:
		for _, id := range ids {
			t.answer(id, nil)
		}
	case len(ids) > 1: // one answer for all: the next ones tell whose fault it was
		r.mu.Lock()
		for _, q := range t.left {
			q.suspect = true // P may still be writing for this pull
		}
		r.mu.Unlock()
		for id, q := range t.left {
			delete(t.left, id)
			r.wg.Go(func() { r.ask(ctxAll, t.from, t.addr, t.window, []*receiving{q}) })
		}
	default:
		t.failAll(fmt.Errorf("%w: %.100q", ErrPeer, reply))
	}
	return nil
}
