package mooncake

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/kvasir-kv/kvasir/zmtp"
)

// onceV1 sends a V1 pull and waits for its one answer.
func (t *talk) onceV1(ctx context.Context) error {
	if t.dropAborted(); len(t.left) == 0 {
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
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r.wg.Go(func() { // all or nothing: V1 has one answer
		for {
			select {
			case <-t.wake:
				if slices.ContainsFunc(ids, func(id string) bool { return r.isAborted(id) }) {
					cancel()
					return
				}
			case <-ctx.Done():
				return
			}
		}
	})
	t.sent = true
	reply, err := s.Do(ctx, AppendPullV1(nil, &p))
	t.dropAborted()
	switch {
	case errors.Is(err, context.Canceled) && len(t.left) < len(ids):
		return fmt.Errorf("%w: pulled together with an aborted request", ErrLost) // again, without it
	case err != nil:
		return fmt.Errorf("%w: %w", ErrLost, err)
	case len(reply) == 1 && string(reply[0]) == replyV1Done:
		for _, id := range ids {
			t.answer(id, nil)
		}
	default:
		t.failAll(fmt.Errorf("%w: %.100q", ErrPeer, reply))
	}
	return nil
}

func (r *Receiver) isAborted(id string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	q := r.mu.active[id]
	return q != nil && q.aborted.Load()
}
